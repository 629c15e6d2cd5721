"""The candidates of ``residual_norm``."""

from __future__ import annotations

from kernel_templates.base import DTYPES, DeviceInfo
from kernel_templates.common import next_power_of_2
from kernel_templates.residual_norm import Config, Problem

from .base import Choices, SearchSpace, shared_limit, thread_limits, tile_limits


def choices(problem: Problem, device: DeviceInfo) -> Choices:
    whole = next_power_of_2(problem.hidden)
    return {
        "rows": (1, 2, 4, 8),
        "block": (*(b for b in (512, 1024, 2048) if b < problem.hidden), whole),
        "vector": (2, 4, 8),
        "programs_per_sm": (0, 1, 2, 4, 8, 16),
        "num_warps": (1, 2, 4, 8, 16),
        "stages": (1, 2, 3),
    }


def infeasible(problem: Problem, config: Config, device: DeviceInfo) -> str | None:
    one_pass = config.block >= problem.hidden
    if config.rows > max(1, next_power_of_2(problem.tokens)):
        return f"{config.rows} rows per program for {problem.tokens} tokens"
    tiles = -(-problem.tokens // config.rows)
    if config.programs_per_sm and tiles <= device.sms * config.programs_per_sm:
        return f"a persistent grid of {device.sms * config.programs_per_sm} for {tiles} tiles"
    if one_pass and config.stages > 1 and not config.programs_per_sm:
        return f"{config.stages} stages without a loop to pipeline"
    if config.programs_per_sm * config.num_warps * 32 > device.threads_per_sm:
        return (
            f"{config.programs_per_sm} programs of {config.num_warps} warps exceed "
            f"{device.threads_per_sm} threads per SM"
        )
    if reason := thread_limits(config.num_warps, device):
        return reason
    # Live in one pass: branch (float32) and residual (half), then the sum; packed weights.
    live = (3 + problem.norms) if one_pass else 3
    elements = config.rows * config.block
    if reason := tile_limits(elements, config.vector, config.num_warps, live, device):
        return reason
    operands = problem.branches + 1 if one_pass else problem.branches
    size = DTYPES[problem.dtype].itemsize
    buffers = (config.stages - 1) * operands * elements * size
    return shared_limit(
        buffers, device, f"{config.stages - 1} stages x {operands} operands x {elements} x {size} B"
    )


SPACE = SearchSpace(template="residual_norm", choices=choices, infeasible=infeasible)
