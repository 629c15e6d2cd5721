"""The measuring worker's handler, in this process and on the CPU: checks, times and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import faulty_template
import pytest
import torch
import triton
from faulty_template import Config, DoubleInputs, Problem

from kernel_templates.base import KernelCall, record_to_dict, template
from search_spaces.base import spaces
from tuner.device import known_gpus
from tuner.model import load_model
from tuner.trial import STICKY, Bench, Status, WrongResultError
from tuner.worker import Fatal

A100 = known_gpus()[0]


@pytest.fixture
def bench() -> Bench:
    return Bench("cpu")


def ready(bench: Bench, tokens: int = 5) -> Bench:
    bench.prepare("faulty_template", record_to_dict(Problem(tokens)), 0)
    return bench


def tried(bench: Bench, fault: str) -> dict[str, Any]:
    return bench.trial(record_to_dict(Config(fault, 4)))


@pytest.mark.parametrize("name", ["gelu_mul", "qkv_norm_rope"])
def test_a_real_kernel_is_prepared_checked_and_timed(name: str, bench: Bench) -> None:
    kernel = template(name)
    small = {"gelu_mul": {"width": 192, "up_stride": 384}}.get(
        name, {"head_dim": 64, "query_heads": 2}
    )
    problem = dataclasses.replace(
        kernel.problems(load_model("e2b"), [2])[0], dtype="float32", **small
    )
    if name == "qkv_norm_rope":
        problem = dataclasses.replace(problem, rotary_pairs=32)
    built = bench.prepare(f"kernel_templates.{name}", record_to_dict(problem), 0)
    inputs = kernel.make_inputs(problem, 0, torch.device("cpu"), 0)
    assert built == {"bytes_per_set": inputs.nbytes(), "sets": 1}
    assert [case.inputs.outputs().keys() for case in bench.cases] == [inputs.outputs().keys()] * 2
    # Another draw, padded rows.
    assert bench.cases[1].name == "odd size, padded rows"
    default = kernel.default(problem, A100)
    other = spaces()[name].neighbours(problem, default, A100)[-1]
    for config in (default, other):
        outcome = bench.trial(record_to_dict(config))
        assert (outcome["status"], outcome["reason"]) == ("ok", "")
        assert outcome["time_us"] > 0
        assert outcome["spread_us"] >= 0
        assert 0 <= outcome["error_ratio"] <= 2
        assert outcome["max_error"] >= 0
    samples = bench.finals([record_to_dict(default), record_to_dict(other)], False, 4)
    assert [len(one) for one in samples] == [4, 4]
    assert bench.check(record_to_dict(other)) == (outcome["error_ratio"], outcome["max_error"])


def test_odd_sizes_and_padded_rows_are_checked(bench: Bench) -> None:
    ready(bench, 64)
    as_served, odd = (case.inputs for case in bench.cases)
    assert as_served.x.shape[0] == 64
    assert odd.x.shape[0] == Bench.ODD_TOKENS
    assert odd.x.stride(0) > odd.x.shape[1]
    assert not torch.equal(as_served.x[:17], odd.x)
    ready(bench, 3)
    assert bench.cases[1].inputs.x.shape[0] == 3


def test_the_next_problem_replaces_the_last(bench: Bench) -> None:
    ready(bench, 4)
    ready(bench, 6)
    assert bench.problem == Problem(6)
    assert [len(case.inputs.x) for case in bench.cases] == [6, 6]
    assert len(bench.sets) == 1
    with pytest.raises(ValueError, match="unknown field 'rows'"):
        bench.prepare("faulty_template", {"tokens": 4, "rows": 4}, 0)
    with pytest.raises(ModuleNotFoundError):
        bench.prepare("no_such_template", {"tokens": 4}, 0)


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("fine", "ok", ""),
        ("wrong", "wrong result", "as served: y: "),
        ("raise", "failed", "RuntimeError: PassManager::run failed"),
        ("resources", "out of resources", "OutOfResources: out of resource: shared memory"),
    ],
)
def test_outcomes_name_their_reason(fault: str, status: str, reason: str, bench: Bench) -> None:
    outcome = tried(ready(bench), fault)
    assert outcome["status"] == status
    assert outcome["reason"].startswith(reason)
    assert (outcome["time_us"] is None) == (status != "ok")
    # The bench goes on.
    assert tried(bench, "fine")["status"] == "ok"


def test_a_poisoned_context_ends_the_worker(bench: Bench) -> None:
    with pytest.raises(Fatal, match="illegal memory access"):
        tried(ready(bench), "sticky")
    with pytest.raises(Fatal, match="illegal memory access"):
        bench.finals([{"fault": "sticky", "num_warps": 4}], False, 2)


def test_finals_of_a_failing_config_raise(bench: Bench) -> None:
    with pytest.raises(RuntimeError, match="PassManager"):
        ready(bench).finals([{"fault": "raise", "num_warps": 4}], False, 2)


def with_calls(bench: Bench, monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Let the prepared template's launches do something besides."""

    def calls(inputs: DoubleInputs, config: Config) -> Sequence[KernelCall]:
        spoil(inputs)
        return faulty_template.calls(inputs, config)

    monkeypatch.setattr(
        bench, "template", dataclasses.replace(faulty_template.TEMPLATE, calls=calls)
    )


def test_writes_between_rows_are_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(inputs: DoubleInputs) -> None:
        assert inputs.y is not None
        if inputs.y.stride(0) > inputs.y.shape[1]:
            torch.as_strided(inputs.y, (1,), (1,), inputs.y.shape[1]).fill_(1.0)

    with_calls(ready(bench), monkeypatch, spoil)
    outcome = tried(bench, "fine")
    assert outcome["status"] == "wrong result"
    assert outcome["reason"] == "odd size, padded rows: wrote between the rows of an output"
    with pytest.raises(WrongResultError):
        bench.check({"fault": "fine", "num_warps": 4})


def test_stale_outputs_do_not_pass(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(bench)
    assert tried(bench, "fine")["status"] == "ok"  # the right result lies in the outputs now
    lazy = dataclasses.replace(faulty_template.TEMPLATE, calls=lambda inputs, config: [])
    monkeypatch.setattr(bench, "template", lazy)
    outcome = tried(bench, "fine")
    assert outcome["status"] == "wrong result"
    assert "nan" in outcome["reason"]


@pytest.mark.parametrize("mark", STICKY)
def test_sticky_messages(mark: str, bench: Bench) -> None:
    with pytest.raises(Fatal, match=mark.capitalize()):
        bench.classify(RuntimeError(f"CUDA error: {mark.capitalize()} was met\nmore"))


def test_an_error_that_shows_up_later_is_fatal_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: launch failed")

    monkeypatch.setattr(bench, "_synchronize", synchronize)
    with pytest.raises(Fatal, match=r"ValueError: harmless \(then CUDA error: launch failed\)"):
        bench.classify(ValueError("harmless"))


def named(name: str, message: str) -> Exception:
    kind: type[Exception] = type(name, (Exception,), {})
    return kind(message)


@pytest.mark.parametrize(
    ("failure", "status", "reason"),
    [
        (torch.OutOfMemoryError("no memory"), Status.OUT_OF_RESOURCES, "no memory"),
        (named("OutOfResources", "shared"), Status.OUT_OF_RESOURCES, "OutOfResources: shared"),
        (named("PTXASError", "ptxas"), Status.COMPILE_FAILED, "PTXASError: ptxas"),
        (
            named("CompilationError", "at 5:4:\n    x = y\n        ^\ny is not defined"),
            Status.COMPILE_FAILED,
            "CompilationError: at 5:4: y is not defined",
        ),
        (ValueError("one\ntwo"), Status.FAILED, "ValueError: one"),
        (ValueError(), Status.FAILED, "ValueError: "),
    ],
)
def test_errors_that_are_survived(
    failure: Exception, status: Status, reason: str, bench: Bench
) -> None:
    found, text = bench.classify(failure)
    assert found is status
    assert text.endswith(reason)
    assert "\n" not in text


def as_gpu(bench: Bench, monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr(bench, "device", torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, total))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)


def test_too_large_a_problem_is_refused_with_the_figures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:  # case 16
    as_gpu(bench, monkeypatch, 1 << 30, 2 << 30)
    # The experts of 128: gate_up [128, 1408, 2816] and down [128, 2816, 704] in bfloat16.
    experts = 2 * 128 * (1408 * 2816 + 2816 * 704)
    with pytest.raises(MemoryError) as refused:
        bench._refuse_if_too_large(experts, 11 * experts)
    text = str(refused.value)
    for figure in (
        "17424 MiB",
        "1452 MiB per input set",
        "15972 MiB for its references",
        "1024 MiB of 2048 MiB",
        "60%",
    ):
        assert figure in text
    # The same way through prepare, before anything is allocated.
    tokens = (1 << 30) // (4 * faulty_template.WIDTH)
    with pytest.raises(MemoryError, match="1024 MiB per input set"):
        bench.prepare("faulty_template", {"tokens": tokens}, 0)
    assert bench.sets == []


@pytest.mark.parametrize(("share", "fits"), [(0.59, True), (0.61, False)])
def test_memory_may_be_used_up_to_a_share(
    share: float, fits: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_gpu(bench, monkeypatch, 12 << 30, 80 << 30)
    size = int(share * (1 << 30))
    if fits:
        bench._refuse_if_too_large(size, 11 * size)
    else:
        with pytest.raises(MemoryError):
            bench._refuse_if_too_large(size, 11 * size)


def test_versions_name_what_made_the_binaries(bench: Bench) -> None:
    found = bench.versions()
    assert found["triton"] == triton.__version__
    assert found["torch"] == torch.__version__
    assert "uuid" not in found
