"""The candidates of ``moe_routing``."""

from __future__ import annotations

from kernel_templates.base import DeviceInfo
from kernel_templates.common import next_power_of_2
from kernel_templates.moe_routing import METHODS, Config, Problem

from .base import Choices, SearchSpace, thread_limits, tile_limits


def choices(problem: Problem, device: DeviceInfo) -> Choices:
    return {
        "rows": (1, 2, 4, 8, 16, 32),
        "method": METHODS,
        "programs_per_sm": (0, 4, 8, 16),
        "num_warps": (1, 2, 4, 8),
    }


def infeasible(problem: Problem, config: Config, device: DeviceInfo) -> str | None:
    if config.rows > max(1, next_power_of_2(problem.tokens)):
        return f"{config.rows} rows per program for {problem.tokens} tokens"
    tiles = -(-problem.tokens // config.rows)
    if config.programs_per_sm and tiles <= device.sms * config.programs_per_sm:
        return f"a persistent grid of {device.sms * config.programs_per_sm} for {tiles} tiles"
    if config.programs_per_sm * config.num_warps * 32 > device.threads_per_sm:
        return (
            f"{config.programs_per_sm} programs of {config.num_warps} warps exceed "
            f"{device.threads_per_sm} threads per SM"
        )
    if reason := thread_limits(config.num_warps, device):
        return reason
    # More than one warp a row would only add traffic through shared memory.
    if config.num_warps > max(1, config.rows):
        return f"{config.num_warps} warps for {config.rows} rows"
    elements = config.rows * next_power_of_2(problem.experts)
    # Live: a 64-bit key and its partner in the comparison.
    return tile_limits(elements, 0, config.num_warps, 4, device)


SPACE = SearchSpace(template="moe_routing", choices=choices, infeasible=infeasible)
