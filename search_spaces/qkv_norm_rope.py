"""The candidates of ``qkv_norm_rope``."""

from __future__ import annotations

from kernel_templates.base import DTYPES, DeviceInfo
from kernel_templates.common import next_power_of_2
from kernel_templates.qkv_norm_rope import Config, Problem, tile_count

from .base import Choices, SearchSpace, thread_limits, tile_limits


def choices(problem: Problem, device: DeviceInfo) -> Choices:
    return {
        "rows": (1, 2, 4, 8, 16, 32),
        "vector": (1, 2, 4, 8),
        "programs_per_sm": (0, 2, 4, 8, 16),
        "num_warps": (1, 2, 4, 8),
    }


def infeasible(problem: Problem, config: Config, device: DeviceInfo) -> str | None:
    size = DTYPES[problem.dtype].itemsize
    rows = problem.tokens * problem.query_heads
    if config.rows > next_power_of_2(rows):
        return f"{config.rows} rows per program for {rows} rows of Q"
    if config.vector * size > 16:
        return f"{config.vector} x {size} B exceed an access of 16 B"
    tiles = tile_count(
        problem.tokens, problem.query_heads, problem.kv_heads, problem.kv, config.rows
    )
    if config.programs_per_sm and tiles <= device.sms * config.programs_per_sm:
        return f"a persistent grid of {device.sms * config.programs_per_sm} for {tiles} tiles"
    if config.programs_per_sm * config.num_warps * 32 > device.threads_per_sm:
        return (
            f"{config.programs_per_sm} programs of {config.num_warps} warps exceed "
            f"{device.threads_per_sm} threads per SM"
        )
    if reason := thread_limits(config.num_warps, device):
        return reason
    # Live, per element of a half head: both halves, both weights, cos and sin, in float32.
    elements = config.rows * problem.head_dim // 2
    return tile_limits(elements, config.vector, config.num_warps, 6, device)


SPACE = SearchSpace(template="qkv_norm_rope", choices=choices, infeasible=infeasible)
