"""Compiling for GPUs that are not here, and the identity of binaries."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faulty_template import A100, TEMPLATE, Config, Problem, space
from test_run import Recorder

from kernel_templates.base import KernelCall, record_to_dict, template, templates
from kernel_templates.qkv_norm_rope import TEMPLATE as ROPE
from tuner.compile import CompileError, CompilePool, Resources, call_key, meta_calls
from tuner.evaluate import Predicting
from tuner.model import load_model
from tuner.run import Job, Settings, Tuner
from tuner.search import open_storage


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(80, 1) as made:
        yield made


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_resources_without_a_gpu(capability: int) -> None:
    gelu = template("gelu_mul")
    problem = gelu.problems(load_model("e2b"), [64])[0]
    config = dataclasses.replace(gelu.default(problem, A100), num_warps=8)
    with CompilePool(capability, 1) as made:
        (found,) = made.submit(gelu, problem, config).result()
    assert found.num_warps == 8
    assert 8 <= found.registers <= 255
    assert found.spill_bytes == 0
    assert found.shared_bytes == 0
    assert found.infeasible(A100) is None


def test_shared_memory_is_read_off_the_binary(pool: CompilePool) -> None:
    (found,) = pool.submit(TEMPLATE, Problem(4), Config("shared", 4)).result()
    # Seven stages ahead of two tiles of 128 x 128 float16.
    assert found.shared_bytes >= 7 * 2 * 128 * 128 * 2
    reason = found.infeasible(A100)
    assert reason == f"{found.shared_bytes} B of shared memory, limit {A100.shared_per_block}"


def test_one_binary_for_all_token_counts(pool: CompilePool) -> None:
    before = pool.compiled
    config = Config("fine", 2)
    future = pool.submit(TEMPLATE, Problem(1), config)
    assert pool.submit(TEMPLATE, Problem(64), config) is future
    assert pool.submit(TEMPLATE, Problem(8191), config) is future
    assert pool.compiled == before + 1
    assert pool.submit(TEMPLATE, Problem(1), Config("fine", 8)) is not future
    assert pool.submit(TEMPLATE, Problem(1, width=64), config) is not future
    assert pool.compiled == before + 3
    assert future.result()[0].num_warps == 2


def test_a_failing_kernel_says_why_and_harms_nothing(pool: CompilePool) -> None:
    with pytest.raises(CompileError, match="told to fail"):
        pool.submit(TEMPLATE, Problem(4), Config("static", 4)).result()
    assert pool.submit(TEMPLATE, Problem(4), Config("fine", 4)).result()


def test_a_killed_compiler_is_replaced(pool: CompilePool) -> None:
    assert pool.submit(TEMPLATE, Problem(4), Config("fine", 1)).result()
    (worker,) = pool._workers
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    # It is noticed before or while the next one compiles, never as a hang.
    for width in (128, 256):
        future = pool.submit(TEMPLATE, Problem(4, width=width), Config("fine", 1))
        error = future.exception()
        assert error is None or (isinstance(error, CompileError) and "SIGKILL" in str(error))
    assert error is None


def test_closing_ends_the_workers_and_what_waits() -> None:
    made = CompilePool(80, 1)
    futures = [
        made.submit(TEMPLATE, Problem(4, width=32 << n), Config("fine", 4)) for n in range(8)
    ]
    futures[0].result()
    pids = [worker.pid for worker in made._workers]
    made.close()
    for pid in pids:
        assert pid is not None
        assert not Path(f"/proc/{pid}").exists()
    assert futures[-1].cancelled()


def key(call: KernelCall, **changes: object) -> str:
    args = {name: value for name, value in changes.items() if name in call.args}
    rest = {name: value for name, value in changes.items() if name not in args}
    return call_key(dataclasses.replace(call, args={**call.args, **args}, **rest))  # type: ignore[arg-type]


def test_what_the_key_tells_apart() -> None:
    problem = ROPE.problems(load_model("e2b"), [16])[0]
    (call,) = meta_calls(ROPE, problem, ROPE.default(problem, A100))
    base = key(call)
    qkv = call.args["qkv"]
    same = [
        key(call, tokens=1),
        key(call, grid=(7,)),
        key(call, qkv_stride=call.args["qkv_stride"] + 16),
        key(call, qkv=torch.empty(3, 5, dtype=qkv.dtype, device="cpu")),
    ]
    assert set(same) == {base}
    unaligned = torch.empty(qkv.numel() + 1, dtype=qkv.dtype, device="meta")[1:]
    other = [
        key(call, num_warps=2 * call.num_warps),
        key(call, num_stages=5),
        key(call, ROWS=64),
        key(call, k_weight=None),
        key(call, qkv_stride=1),
        key(call, qkv_stride=call.args["qkv_stride"] + 1),
        key(call, qkv_stride=1 << 31),
        key(call, qkv=qkv.to(torch.float16)),
        key(call, qkv=unaligned),
    ]
    assert len({base, *other}) == len(other) + 1


AGREEMENT = """
import dataclasses, json, warnings
import torch
from triton.runtime.driver import driver
from kernel_templates.base import templates
from tuner.compile import CrossDriver, call_key, meta_calls
from tuner.device import known_gpus
from tuner.model import load_model

warnings.filterwarnings("ignore")
driver.set_active(CrossDriver(80))
gpu = known_gpus()[0]

def launched(call):
    # Triton's own key of the binary that this launch takes.
    binary = call.warmup()
    cache = call.kernel.device_caches[0][0]
    (key,) = [name for name, value in cache.items() if value is binary]
    return call.kernel.__name__ + str(key)

found = []
for name, kernel in templates().items():
    model = load_model("26b-a4b" if name == "moe_routing" else "e2b")
    for problem in kernel.problems(model, [1])[:2]:
        default = kernel.default(problem, gpu)
        changed = dataclasses.replace(default, num_warps=8 if default.num_warps < 8 else 4)
        for config in (default, changed):
            ahead = meta_calls(kernel, problem, config)
            calls = {"ahead": ahead}
            for tokens, pad in ((1, 0), (16, 0), (37, 16), (37, 1)):
                real = dataclasses.replace(problem, tokens=tokens)
                inputs = kernel.make_inputs(real, 0, torch.device("cpu"), pad)
                calls[f"{tokens} tokens, pad {pad}"] = kernel.calls(inputs, config)
            for label, launches in calls.items():
                for call in launches:
                    found.append((name, str(config), label, call_key(call), launched(call)))
print(json.dumps(found))
"""


def test_keys_agree_with_tritons_own() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", AGREEMENT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {name for name, *_ in found} == set(templates())
    ours: dict[str, set[str]] = {}
    theirs: dict[str, set[str]] = {}
    for _, _, _, mine, tritons in found:
        ours.setdefault(mine, set()).add(tritons)
        theirs.setdefault(tritons, set()).add(mine)
    assert [row for row in found if len(ours[row[3]]) > 1] == []  # one key, several binaries
    assert [row for row in found if len(theirs[row[4]]) > 1] == []  # one binary, several keys
    # What is compiled ahead is what a launch of any token count takes.
    ahead = {
        (name, config, tritons) for name, config, label, _, tritons in found if label == "ahead"
    }
    for name, config, label, _, tritons in found:
        assert ((name, config, tritons) in ahead) or label.endswith("pad 1"), (name, config, label)


def test_no_config_fits_a_64_kib_gpu(tmp_path: Path) -> None:  # case 16
    small = dataclasses.replace(A100, shared_per_block=65_536, shared_per_sm=65_536)
    recorder = Recorder()
    work = [Job(TEMPLATE, space(["shared"], (4,)), Problem(4), ("m",))]
    storage = open_storage(None, tmp_path / "state")
    tuner = Tuner(small, Predicting(small), storage, Settings(tmp_path / "out", jobs=1), recorder)
    summary = tuner.run(work)
    assert summary.decided == []
    assert recorder.lost == ["no valid candidate (1 out of resources)"]
    assert all(reason.endswith("limit 65536") for _, reason in summary.reasons)
    assert not (tmp_path / "out").exists()


def test_resources_survive_json() -> None:
    usage = Resources(32, 8, 1024, 4)
    assert Resources(**json.loads(json.dumps(record_to_dict(usage)))) == usage
