"""The model that ranks candidates for a GPU that is not here, and the limits it works with."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from kernel_templates import attention_decode, attention_prefill, attention_problem
from kernel_templates.base import (
    DeviceInfo,
    record_from_dict,
    record_to_dict,
    template,
    templates,
)
from kernel_templates.gelu_mul import Config, Problem
from search_spaces.base import shared_limit, spaces
from tuned_configs.roots import shipped_root
from tuned_configs.store import read_table, table_path
from tuner.compile import CompilePool, Resources
from tuner.device import known_gpus
from tuner.model import load_model, preset_names
from tuner.predict import LEAST_GAIN, blocks_per_sm, predict_us

A100 = next(gpu for gpu in known_gpus() if "A100-SXM4-80GB" in gpu.name)
GELU = template("gelu_mul")
PROBLEM = Problem(4096, 6144, "halves", 12288)
TILES = Config(
    rows=1,
    block=1024,
    vector=8,
    programs_per_sm=0,
    num_warps=4,
    stages=1,
    evict_first=False,
    stream_stores=False,
)
#: What the compiler makes of TILES for sm_90.
LIGHT = Resources(32, 0, 0, num_warps=4, instructions=131, access_bytes=48)


def predicted(
    problem: Problem = PROBLEM,
    usage: Resources = LIGHT,
    device: DeviceInfo = A100,
    **changes: Any,
) -> float:
    return predict_us(GELU, problem, dataclasses.replace(TILES, **changes), [usage], device)


def faked(limit: int, device: DeviceInfo = A100, **changes: Any) -> DeviceInfo:
    """A GPU like another with that much shared memory per block, under a name nobody knows."""
    values = {"name": "NVIDIA Nameless", "shared_per_block": limit, "shared_per_sm": limit + 1024}
    return dataclasses.replace(device, **{**values, **changes})


# The model


def test_more_bytes_take_more_time() -> None:
    times = [predicted(dataclasses.replace(PROBLEM, tokens=1 << n)) for n in range(0, 17, 2)]
    assert times == sorted(times)
    assert times[-1] > 100 * times[0]
    wider = dataclasses.replace(PROBLEM, width=12288, up_stride=24576)
    assert predicted(wider) > predicted()


@pytest.mark.parametrize("tokens", [1, 37, 512, 65536])
@pytest.mark.parametrize("persistent", [0, 1, 16])
def test_never_below_the_copy_floor(tokens: int, persistent: int) -> None:
    problem = dataclasses.replace(PROBLEM, tokens=tokens)
    floor = GELU.cost(problem).bytes / A100.bandwidth * 1e6
    for registers in (16, 128, 255):
        usage = dataclasses.replace(LIGHT, registers=registers)
        assert predicted(problem, usage, programs_per_sm=persistent) > floor


def test_large_problems_come_near_the_copy_floor() -> None:
    problem = dataclasses.replace(PROBLEM, tokens=65536)
    floor = GELU.cost(problem).bytes / A100.bandwidth * 1e6
    assert predicted(problem) < 1.35 * floor


def test_twice_the_bandwidth_is_faster() -> None:
    fast = dataclasses.replace(A100, bandwidth=2 * A100.bandwidth)
    assert predicted(device=fast) < predicted()


def test_spills_cost() -> None:
    spilled = dataclasses.replace(LIGHT, spill_bytes=64)
    assert predicted(usage=spilled) > (1 + LEAST_GAIN) * predicted()
    more = dataclasses.replace(LIGHT, spill_bytes=256)
    assert predicted(usage=more) > predicted(usage=spilled)


def test_low_occupancy_costs() -> None:
    hungry = dataclasses.replace(LIGHT, registers=255, shared_bytes=160_000)
    assert blocks_per_sm(hungry, A100) == 1
    assert predicted(usage=hungry) > predicted()


def test_what_does_not_fit_is_infinite() -> None:
    for usage in (
        dataclasses.replace(LIGHT, shared_bytes=A100.shared_per_sm),  # 1 KiB is reserved
        Resources(registers=255, spill_bytes=0, shared_bytes=0, num_warps=32),
    ):
        assert blocks_per_sm(usage, A100) == 0
        assert predicted(usage=usage) == math.inf


def test_a_persistent_grid_covers_the_whole_gpu_or_is_slow() -> None:
    problem = dataclasses.replace(PROBLEM, tokens=65536)
    tiled = predicted(problem)
    filled = predicted(problem, programs_per_sm=16)
    starved = predicted(problem, programs_per_sm=1)
    assert filled < 1.1 * tiled
    assert starved > 1.25 * filled
    # One program per SM on a GPU of twice the SMs is twice as many programs.
    wide = dataclasses.replace(A100, sms=2 * A100.sms)
    assert predicted(problem, device=wide, programs_per_sm=1) < starved


def test_one_program_leaves_the_gpu_idle() -> None:
    # 12 KiB are nothing for 2 TB/s but six programs' loads.
    small = dataclasses.replace(PROBLEM, tokens=1)
    assert predicted(small) > 2 * GELU.cost(small).bytes / A100.bandwidth * 1e6


def test_occupancy_by_each_limit() -> None:
    def blocks(registers: int, shared: int, warps: int) -> int:
        return blocks_per_sm(Resources(registers, 0, shared, warps), A100)

    assert blocks(16, 0, 1) == 32  # blocks
    assert blocks(16, 0, 16) == 4  # threads
    assert blocks(64, 0, 8) == 4  # 64 x 256 = 16384 of 65536 registers
    assert blocks(65, 0, 8) == 3  # 65 x 32 is rounded up to 2304
    assert blocks(16, 40_000, 1) == A100.shared_per_sm // 41_024


# Cases 16, 17, 20 to 22: limits by the device's numbers


@pytest.mark.parametrize(
    ("limit", "fits"), [(65_536, False), (101_376, False), (166_912, True), (232_448, True)]
)
def test_default_fp8_moe_row(limit: int, fits: bool) -> None:  # case 17
    m, n, k, warps, stages = 128, 256, 128, 8, 4
    needed = (stages - 1) * (m * k + k * n)
    assert needed == 147_456
    arithmetic = f"{stages - 1} stages x ({m} x {k} + {k} x {n}) x 1 B"
    device = faked(limit)
    for reason in (
        Resources(128, 0, needed, warps).infeasible(device),
        shared_limit(needed, device, arithmetic),
    ):
        if fits:
            assert reason is None
        else:
            assert reason is not None
            assert "147456 B of shared memory" in reason
            assert f"limit {limit}" in reason
    assert fits or arithmetic in str(shared_limit(needed, device, arithmetic))


@pytest.mark.parametrize(
    ("element", "limit", "fits"),
    [
        (2, 166_912, False),
        (2, 232_448, False),
        (1, 101_376, False),
        (1, 166_912, True),
        (1, 232_448, True),
    ],
)
def test_head_512_tile_64(element: int, limit: int, fits: bool) -> None:  # case 21
    needed = 2 * 2 * 64 * 512 * element  # K and V, two buffers; 131,072 B for one byte
    reason = shared_limit(needed, faked(limit), f"2 x 2 x 64 x 512 x {element} B")
    assert (reason is None) is fits
    assert (Resources(64, 0, needed, 4).infeasible(faked(limit)) is None) is fits


def test_limits_are_inclusive() -> None:
    device = faked(65_536)
    assert Resources(32, 0, 65_536, 4).infeasible(device) is None
    assert Resources(32, 0, 65_537, 4).infeasible(device) is not None
    assert Resources(64, 0, 0, 32).infeasible(device) is None
    reason = Resources(65, 0, 0, 32).infeasible(device)
    assert reason == f"{2304 * 32} registers per block, limit 65536"


def everything(tokens: Sequence[int] = (1, 255, 256, 257, 8192)) -> list[tuple[str, Any]]:
    models = [load_model(name) for name in preset_names()]
    return [
        (name, problem)
        for name, kernel in templates().items()
        for problem in dict.fromkeys(p for m in models for p in kernel.problems(m, tokens))
    ]


def test_every_default_runs_on_a_64_kib_gpu() -> None:  # cases 17, 20, 22
    turing = faked(65_536, capability=(7, 5), sms=72, threads_per_sm=1024, blocks_per_sm=16)
    for name, problem in everything():
        config = templates()[name].default(problem, turing)
        assert spaces()[name].infeasible(problem, config, turing) is None, (name, problem)


def test_choices_follow_numbers_and_not_names() -> None:  # case 20
    for device in known_gpus():
        renamed = dataclasses.replace(device, name="NVIDIA Nameless", uuid="GPU-0", driver="1")
        for name, problem in everything((1, 256)):
            space = spaces()[name]
            assert space.choices(problem, renamed) == space.choices(problem, device)
            default = space.kernel.default(problem, device)
            assert space.kernel.default(problem, renamed) == default
            assert space.infeasible(problem, default, renamed) is None


def test_less_shared_memory_prunes_by_size_and_stages() -> None:  # case 21
    space, problem = spaces()["gelu_mul"], dataclasses.replace(PROBLEM, tokens=64)
    all_of = {gpu: set(space.configs(problem, faked(gpu))) for gpu in (8_192, 65_536, 232_448)}
    assert all_of[8_192] < all_of[65_536]
    assert all_of[65_536] <= all_of[232_448]
    pruned = all_of[65_536] - all_of[8_192]
    assert all(config.stages > 1 for config in pruned)
    for config in pruned:
        reason = space.infeasible(problem, config, faked(8_192))
        assert reason is not None
        assert "limit 8192" in reason or "limit 9216" in reason
        assert f"{config.stages - 1} stages" in reason


def test_configs_of_the_space_are_json() -> None:
    for name, problem in everything((64,))[::5]:
        for config in list(spaces()[name].configs(problem, A100))[::50]:
            assert json.loads(json.dumps(record_to_dict(config))) == record_to_dict(config)


# Tiled kernels


PREFILL, DECODE = template("attention_prefill"), template("attention_decode")
SLIDING = attention_problem.Problem(8192, 1024, 0, 8, 1, 256, 512, 32)
STEP = attention_decode.Problem(32, 1, 4096, 8, 1, 512)
LARGE = attention_prefill.Config(128, 64, 1, True, False, 8, 2)


def tiled(
    problem: Any, config: Any, usage: Resources | None = None, gpu: DeviceInfo = A100
) -> float:
    kernel = PREFILL if isinstance(config, attention_prefill.Config) else DECODE
    usage = usage or Resources(255, 0, 98_304, config.num_warps)
    return predict_us(kernel, problem, config, [usage], gpu)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("context", "parts"), [(0, 1), (50, 2)])
def test_tiles_are_counted_as_the_kernel_walks_them(window: int, context: int, parts: int) -> None:
    problem = attention_problem.Problem(100, 40, context, 8, 2, 32, window)
    config = attention_prefill.Config(16, 16, parts, True, False, 4, 2)
    steps = programs = longest = 0
    for new in problem.new:
        for first in range(0, new, 4):
            seen = [
                key // 16
                for query in range(first, min(first + 4, new))
                for key in range(problem.first(context + query), context + query + 1)
            ]
            # From the first key of the first query: the kernel visits whole ranges.
            walked = max(seen) - min(seen) + 1
            steps, programs, longest = steps + walked, programs + 1, max(longest, walked)
    work = attention_prefill.tile_work(problem, config)
    assert (work.programs, work.steps, work.longest) == (
        2 * parts * programs, 2 * parts * steps, longest,
    )  # fmt: skip
    assert work.step_flops == 2 * 16 * 16 * (32 + 32 // parts)
    assert work.step_bytes == 16 * (32 + 32 // parts) * 2


def test_shares_are_counted() -> None:
    config = attention_decode.Config(32, 8, 4, 2)
    work = attention_decode.tile_work(STEP, config)
    assert (work.programs, work.steps, work.longest) == (32 * 8, 32 * 129, 17)
    assert work.scratch_bytes == 2 * 4 * 32 * 8 * 8 * 512
    assert (
        attention_decode.tile_work(STEP, dataclasses.replace(config, splits=1)).scratch_bytes == 0
    )


def test_small_tiles_read_keys_too_often() -> None:
    stock = attention_prefill.stock_config(SLIDING)
    small = tiled(SLIDING, stock, Resources(168, 0, 74_752, 4))
    assert small > 1.5 * tiled(SLIDING, LARGE)
    assert small > 2 * SLIDING.tokens * 8 * 528 * 4 * 256 / A100.bf16_flops * 1e6


def test_spills_and_no_pipeline_cost_tiles_time() -> None:
    assert tiled(SLIDING, LARGE, Resources(255, 128, 98_304, 8)) > tiled(SLIDING, LARGE)
    assert tiled(SLIDING, dataclasses.replace(LARGE, num_stages=1)) > tiled(SLIDING, LARGE)
    assert tiled(SLIDING, LARGE, Resources(255, 0, A100.shared_per_sm, 8)) == math.inf


def test_splits_fill_the_gpu_and_cost_a_second_kernel() -> None:
    one = dataclasses.replace(STEP, tokens=1)
    times = {n: tiled(one, attention_decode.Config(32, n, 4, 2)) for n in (1, 16)}
    assert times[16] < 0.5 * times[1]
    many = dataclasses.replace(STEP, tokens=2048)
    assert tiled(many, attention_decode.Config(32, 1, 4, 2)) < tiled(
        many, attention_decode.Config(32, 16, 4, 2)
    )


def test_a_warp_alone_is_slower_on_a_gpu_of_warpgroups() -> None:
    hopper = next(gpu for gpu in known_gpus() if gpu.target == 90)
    wide = dataclasses.replace(SLIDING, query_heads=64, kv_heads=8)
    group = dataclasses.replace(LARGE, block_m=64)
    warp = dataclasses.replace(LARGE, block_m=32)
    assert tiled(wide, warp, gpu=hopper) > 1.5 * tiled(wide, group, gpu=hopper)


@pytest.mark.slow
def test_the_model_agrees_with_what_was_measured() -> None:
    """The shipped tables' gains over the default are foreseen, if not their size."""
    device = next(gpu for gpu in known_gpus() if gpu.name == "NVIDIA H200")
    entries = read_table(table_path(shipped_root(), device.name, PREFILL.name)).entries
    large = [e for e in entries if e.verdict == "tuned" and e.problem["tokens"] == 8192]
    assert len(large) >= 5
    with CompilePool(device.target, 2) as pool:
        for entry in large:
            assert entry.time_us is not None
            assert entry.default_us is not None
            problem = record_from_dict(PREFILL.problem, entry.problem)
            configs = (
                record_from_dict(PREFILL.config, entry.config),
                PREFILL.default(problem, device),
            )
            ours, default = (
                predict_us(PREFILL, problem, c, pool.submit(PREFILL, problem, c).result(), device)
                for c in configs
            )
            measured = entry.default_us.median / entry.time_us.median
            assert 0.6 * measured < default / ours < 1.7 * measured, entry.problem
