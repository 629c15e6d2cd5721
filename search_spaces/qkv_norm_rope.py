"""The candidates of ``qkv_norm_rope``."""

from __future__ import annotations

from kernel_templates.base import DTYPES, DeviceInfo
from kernel_templates.common import next_power_of_2
from kernel_templates.qkv_norm_rope import SECTIONS, Config, Problem

from .base import Choices, SearchSpace, shared_limit, thread_limits, tile_limits


def choices(problem: Problem, device: DeviceInfo) -> Choices:
    return {
        "rows": (1, 2, 4, 8, 16, 32),
        "heads": tuple(h for h in (1, 2, 4, 8, 16, 32) if h < 2 * problem.query_heads),
        "vector": (2, 4, 8),
        "programs_per_sm": (0, 2, 4, 8, 16),
        "num_warps": (1, 2, 4, 8),
        "stages": (1, 2, 3, 4),
    }


def infeasible(problem: Problem, config: Config, device: DeviceInfo) -> str | None:
    size = DTYPES[problem.dtype].itemsize
    if config.rows > max(1, next_power_of_2(problem.tokens)):
        return f"{config.rows} rows per program for {problem.tokens} tokens"
    if config.heads > next_power_of_2(problem.query_heads):
        return f"{config.heads} heads per program for {problem.query_heads} query heads"
    # With one head, a second stage still starts its load before those of cos and sin.
    if config.stages > max(2, config.heads):
        return f"{config.stages} stages for {config.heads} heads per program"
    if config.vector * size > 16:
        return f"{config.vector} x {size} B exceed an access of 16 B"
    groups = -(-problem.query_heads // config.heads)
    groups += SECTIONS[problem.kv] * -(-problem.kv_heads // config.heads)
    units = -(-problem.tokens // config.rows) * groups
    if config.programs_per_sm and units <= device.sms * config.programs_per_sm:
        return f"a persistent grid of {device.sms * config.programs_per_sm} for {units} units"
    if config.programs_per_sm * config.num_warps * 32 > device.threads_per_sm:
        return (
            f"{config.programs_per_sm} programs of {config.num_warps} warps exceed "
            f"{device.threads_per_sm} threads per SM"
        )
    if reason := thread_limits(config.num_warps, device):
        return reason
    # Live, per element of a half head: both halves, cos and sin (float32), the weights (half).
    elements = config.rows * problem.head_dim // 2
    if reason := tile_limits(elements, config.vector, config.num_warps, 6, device):
        return reason
    ahead = config.stages - 1 if config.stages > 2 else 0
    arithmetic = f"{ahead} heads x 2 halves x {elements} x {size} B"
    needed = ahead * 2 * elements * size
    if needed * config.programs_per_sm > device.shared_per_sm:
        return (
            f"{needed * config.programs_per_sm} B of shared memory per SM "
            f"({config.programs_per_sm} programs x {arithmetic}), limit {device.shared_per_sm}"
        )
    return shared_limit(needed, device, arithmetic)


SPACE = SearchSpace(template="qkv_norm_rope", choices=choices, infeasible=infeasible)
