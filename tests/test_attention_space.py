"""What attention asks of a GPU, by numbers; which problems a model has; what they cost."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from pathlib import Path

import pytest
import torch
from attention_oracle import assert_right, batch, decode_inputs
from test_templates import after, copy_package, functions

import kernel_templates
from kernel_templates import attention_decode as decode
from kernel_templates import attention_prefill as prefill
from kernel_templates.attention_limits import shared_memory
from kernel_templates.attention_problem import Problem
from kernel_templates.base import DeviceInfo
from search_spaces.base import spaces
from tuner.compile import CompilePool
from tuner.device import known_gpus
from tuner.model import load_model

A100, HOPPER = (next(gpu for gpu in known_gpus() if gpu.target == n) for n in (80, 90))
FULL = Problem(8192, 1024, 0, 8, 1, 512)
DECODE = Problem(16, 1, 4096, 8, 1, 512)


def faked(shared: int, capability: tuple[int, int] = (8, 9)) -> DeviceInfo:
    return dataclasses.replace(A100, name="faked", capability=capability, shared_per_block=shared)


def prefill_limit(problem: Problem, config: prefill.Config, device: DeviceInfo) -> str | None:
    return spaces()["attention_prefill"].infeasible(problem, config, device)


def test_a_64_kib_gpu_gets_a_small_tile_that_is_right() -> None:  # case 20
    turing = faked(65_536, (7, 5))
    problem = Problem(4, 4, 20, 16, 2, 512, dtype="float16")
    config = prefill.default(problem, turing)
    assert (config.block_m, config.tile) == (16, 16)
    assert prefill_limit(problem, config, turing) is None
    assert_right(prefill.TEMPLATE, batch([4], [20], (16, 2), 512), config)
    chosen = decode.default(problem, turing)
    assert spaces()["attention_decode"].infeasible(problem, chosen, turing) is None
    made, _ = decode_inputs(batch([4], [20], (16, 2), 512), chosen.splits)
    assert_right(decode.TEMPLATE, made, chosen)


def test_pruned_by_element_size_and_stages() -> None:  # case 21
    # Two buffered tiles of K and V: a pipeline of three stages, for warpgroups one of two.
    narrow = dataclasses.replace(FULL, kv_dtype="float8_e4m3fn")
    config = prefill.Config(16, 64, 1, True, False, 4, 3)
    for gpu in known_gpus():
        reason = prefill_limit(FULL, config, gpu)
        assert reason is not None
        assert f"2 tiles x K and V 64 x 512 x 2 B + P 16 x 64 x 2 B), limit {gpu.shared_per_block}"
        assert int(reason.split()[0]) >= 262_144
    grouped = prefill.Config(64, 64, 1, True, False, 8, 2)
    assert prefill_limit(FULL, grouped, faked(232_448, (9, 0))) is not None
    assert prefill_limit(narrow, config, faked(166_912)) is None
    assert prefill_limit(narrow, config, faked(232_448)) is None
    assert "limit 101376" in str(prefill_limit(narrow, config, faked(101_376)))
    needed, _ = shared_memory(narrow, 16, 64, 4, 3, faked(101_376))
    assert needed == 131_072 + 16 * 512 * 2 + 16 * 64 * 2
    assert "needs capability 8.9, this GPU has 8.0" in str(prefill_limit(narrow, config, A100))


def test_a_tile_of_queries_that_is_too_large_alone() -> None:  # case 22
    turing = faked(65_536, (7, 5))
    for tile, stages in itertools.product((16, 32), (1, 2)):
        reason = prefill_limit(FULL, prefill.Config(128, tile, 1, True, False, 8, stages), turing)
        assert reason is not None
        assert "128 x 512" in reason
    for queries in (255, 256, 257):
        problem = dataclasses.replace(FULL, tokens=queries, queries=queries)
        assert prefill_limit(problem, prefill.default(problem, turing), turing) is None


def test_registers_of_the_accumulator_are_counted() -> None:
    reason = prefill_limit(FULL, prefill.Config(64, 16, 1, True, False, 4, 1), HOPPER)
    assert reason == (
        "accumulator of 64 x 512 takes 256 registers of each of 128 threads, limit 200"
    )
    assert prefill_limit(FULL, prefill.Config(64, 16, 1, True, False, 8, 1), HOPPER) is None


def test_every_gpu_has_a_choice() -> None:
    for gpu in known_gpus():
        for name, problem in (("attention_prefill", FULL), ("attention_decode", DECODE)):
            assert len(list(spaces()[name].configs(problem, gpu))) >= 8, (gpu.name, name)


def test_splits_follow_the_sequences() -> None:
    assert [decode.most_splits(n) for n in (1, 32, 33, 64, 128, 256, 2048, 5000)] == [
        64, 64, 32, 32, 16, 8, 1, 1,
    ]  # fmt: skip
    # Compiling ahead stands 16 tokens in for any count: no config may need more scratch than that.
    assert decode.most_splits(16) == max(decode.SPLITS)
    space = spaces()["attention_decode"]
    many = dataclasses.replace(DECODE, tokens=256)
    reason = space.infeasible(many, decode.Config(32, 16, 4, 2), HOPPER)
    assert reason == "16 splits of 256 sequences, at most 8"
    sliding = dataclasses.replace(DECODE, window=512)
    reason = space.infeasible(sliding, decode.Config(16, 64, 4, 2), HOPPER)
    assert reason == "64 splits of 32 tiles"


def test_defaults_are_vllms_constants() -> None:
    assert prefill.default(FULL, HOPPER) == prefill.Config(16, 32, 1, True, False, 4, 3)
    assert decode.default(DECODE, HOPPER) == decode.Config(16, 16, 4, 3)
    assert decode.default(dataclasses.replace(DECODE, tokens=129), HOPPER).splits == 1
    four = dataclasses.replace(DECODE, query_heads=32, kv_heads=4)
    assert decode.default(dataclasses.replace(four, tokens=33), HOPPER).splits == 1
    small = next(gpu for gpu in known_gpus() if gpu.target == 89)
    assert prefill.default(FULL, small) == prefill.Config(16, 32, 1, True, False, 4, 2)
    wide = dataclasses.replace(FULL, query_heads=32)
    assert prefill.default(wide, HOPPER).block_m == 32


def test_problems_of_a_model() -> None:
    e2b = load_model("e2b")
    counts = (1, 32, 64, 256, 8192)
    found = prefill.problems(e2b, counts)
    assert [(p.tokens, p.sequences) for p in found[:3]] == [(64, 1), (256, 1), (8192, 8)]
    assert [(p.head_dim, p.window, p.block_size) for p in found[::3]] == [
        (256, 512, 32), (512, 0, 16), (256, 512, 128), (512, 0, 64),
    ]  # fmt: skip
    assert len({prefill.TEMPLATE.kernel_problem(p) for p in found}) == 4
    assert [p.tokens for p in decode.problems(e2b, counts)] == [1, 32, 64, 256] * 4
    # Blocks of equal bytes: 12B has 8 x 256 and 1 x 512.
    blocks = [(p.head_dim, p.block_size) for p in prefill.problems(load_model("12b"), [8192])]
    assert blocks == [(256, 16), (512, 64), (256, 64), (512, 256)]
    # Asked for nothing else, a template says what it would do.
    assert prefill.problems(e2b, [4])
    assert decode.problems(e2b, [4096])


@pytest.mark.parametrize("window", [0, 1, 5, 64])
@pytest.mark.parametrize(("tokens", "queries", "context"), [(40, 16, 0), (7, 1, 30), (9, 9, 3)])
def test_cost_counts_what_is_seen(tokens: int, queries: int, context: int, window: int) -> None:
    problem = Problem(tokens, queries, context, 4, 2, 32, window)
    pairs = positions = 0
    for new in problem.new:
        position = torch.arange(context, context + new)[:, None]
        j = torch.arange(context + new)[None, :]
        seen = (j <= position) & ((j > position - window) if window else True)
        pairs += int(seen.sum())
        positions += int(seen.any(0).sum())
    found = decode.cost(problem)
    assert found.flops == 4 * pairs * 4 * 32
    assert found.bytes == 2 * (2 * tokens * 4 * 32 + 2 * positions * 2 * 32)


def test_references_of_a_large_cache_fit_beside_it() -> None:
    # 31B's full layers, 256 sequences with 4096 keys: ten float32 copies of the cache would not.
    problem = Problem(256, 1, 4096, 32, 4, 512)
    sizes = decode.TEMPLATE.make_inputs(problem, 0, torch.device("meta"), 0)
    assert 8 << 30 < sizes.nbytes() < 9 << 30
    assert sizes.reference_bytes() < sizes.nbytes() + (4 << 30)


def test_the_hash_covers_the_shared_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(kernel_templates.__path__[0]) / "attention_common.py").read_text(encoding="utf-8")
    changed = after(text, functions(text)["_scores"][0], "unused = 1")
    copy_package(tmp_path, "copied_attention", {"attention_common": changed})
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("attention_prefill", "attention_decode", "gelu_mul"):
        copied = importlib.import_module(f"copied_attention.{name}").TEMPLATE
        mine = importlib.import_module(f"kernel_templates.{name}").TEMPLATE
        assert (copied.source_hash == mine.source_hash) == (name == "gelu_mul")


def test_descriptors_where_the_gpu_and_the_blocks_allow_them() -> None:
    blocks = dataclasses.replace(FULL, block_size=64)
    config = prefill.Config(128, 32, 2, True, True, 8, 2)
    assert prefill_limit(blocks, config, HOPPER) is None
    reason = prefill_limit(blocks, config, A100)
    assert reason == "descriptors need capability 9.0, this GPU has 8.0"
    assert prefill_limit(FULL, config, HOPPER) == "descriptors of tiles of 32 in blocks of 16"
    narrow = dataclasses.replace(blocks, kv_dtype="float8_e4m3fn")
    assert "must be widened" in str(prefill_limit(narrow, config, HOPPER))
    everywhere = dataclasses.replace(config, edges_apart=False)
    assert "32 keys, which may all be masked" in str(prefill_limit(blocks, everywhere, HOPPER))
    found = {c.descriptors for c in spaces()["attention_prefill"].configs(blocks, A100)}
    assert found == {False}


def test_the_columns_of_v_are_shared_where_the_accumulator_is_large() -> None:
    config = prefill.Config(64, 32, 2, True, False, 8, 2)
    assert prefill_limit(FULL, config, HOPPER) == (
        "2 parts of an accumulator of 128 registers a thread"
    )
    assert prefill_limit(FULL, dataclasses.replace(config, block_m=128), HOPPER) is None
    with pytest.raises(ValueError, match="parts is 3, wanted parts of 32 columns"):
        prefill.TEMPLATE.calls(batch([4], [2]), dataclasses.replace(config, parts=3))


def test_the_likely_are_tried_early() -> None:
    space = spaces()["attention_prefill"]
    for gpu in known_gpus():
        for problem in (FULL, dataclasses.replace(FULL, block_size=64)):
            early = space.starts(problem, gpu)
            assert all(space.infeasible(problem, config, gpu) is None for config in early)
            assert len(early) >= (2 if gpu.shared_per_block > 160_000 else 0), gpu.name
    assert any(config.descriptors for config in space.starts(problem, HOPPER))


CAPABILITIES = [
    ((16, 32, 4, 2), "same", 80, 82_944),
    ((16, 16, 4, 3), "same", 80, 82_432),
    ((16, 16, 4, 2), "float8_e4m3fn", 89, 33_280),
    ((64, 32, 4, 2), "same", 90, 196_608),
    ((64, 32, 4, 3), "float8_e4m3fn", 90, 196_608),
    ((64, 16, 8, 2), "same", 120, 100_352),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "cache", "capability", "bytes_"), CAPABILITIES)
def test_the_estimate_is_what_triton_takes(
    config: tuple[int, int, int, int], cache: str, capability: int, bytes_: int
) -> None:
    near = min(known_gpus(), key=lambda gpu: abs(gpu.target - capability))
    device = dataclasses.replace(near, capability=divmod(capability, 10))
    problem = dataclasses.replace(FULL, kv_dtype=cache)
    block_m, tile, warps, stages = config
    assert shared_memory(problem, block_m, tile, warps, stages, device)[0] == bytes_
    with CompilePool(capability, 1) as pool:
        chosen = prefill.Config(block_m, tile, 1, True, False, warps, stages)
        (found,) = pool.submit(prefill.TEMPLATE, problem, chosen).result()
    assert found.shared_bytes == bytes_
