"""The candidates of ``gelu_mul``."""

from __future__ import annotations

from kernel_templates.base import DTYPES, DeviceInfo
from kernel_templates.common import next_power_of_2
from kernel_templates.gelu_mul import Config, Problem, tile_width

from .base import Choices, SearchSpace, shared_limit, thread_limits, tile_limits


def choices(problem: Problem, device: DeviceInfo) -> Choices:
    return {
        "rows": (1, 2, 4, 8, 16),
        "block": tuple(b for b in (128, 256, 512, 1024, 2048, 4096) if b <= tile_width(problem)),
        "vector": (2, 4, 8),
        "programs_per_sm": (0, 1, 2, 4, 8, 16),
        "num_warps": (1, 2, 4, 8, 16),
        "stages": (1, 2, 3, 4),
        "evict_first": (False, True),
        "stream_stores": (False, True),
    }


def infeasible(problem: Problem, config: Config, device: DeviceInfo) -> str | None:
    if config.rows > max(1, next_power_of_2(problem.tokens)):
        return f"{config.rows} rows per program for {problem.tokens} tokens"
    if config.block > tile_width(problem):
        return f"{config.block} columns per program for a width of {problem.width}"
    tiles = -(-problem.tokens // config.rows) * -(-problem.width // config.block)
    if config.programs_per_sm and tiles <= device.sms * config.programs_per_sm:
        return f"a persistent grid of {device.sms * config.programs_per_sm} for {tiles} tiles"
    if config.stages > 1 and not config.programs_per_sm:
        return f"{config.stages} stages without a loop to pipeline"
    if config.programs_per_sm * config.num_warps * 32 > device.threads_per_sm:
        return (
            f"{config.programs_per_sm} programs of {config.num_warps} warps exceed "
            f"{device.threads_per_sm} threads per SM"
        )
    if reason := thread_limits(config.num_warps, device):
        return reason
    elements = config.rows * config.block
    # Live: gate and up as loaded (half each), one float32 intermediate, addresses.
    if reason := tile_limits(elements, config.vector, config.num_warps, 3, device):
        return reason
    size = DTYPES[problem.dtype].itemsize
    buffers = (config.stages - 1) * 2 * elements * size * max(1, config.programs_per_sm)
    if buffers > device.shared_per_sm:
        return (
            f"{buffers} B of shared memory per SM ({config.programs_per_sm} programs x "
            f"{config.stages - 1} stages x 2 operands x {elements} x {size} B), "
            f"limit {device.shared_per_sm}"
        )
    return shared_limit(
        buffers // max(1, config.programs_per_sm),
        device,
        f"{config.stages - 1} stages x 2 operands x {elements} x {size} B",
    )


SPACE = SearchSpace(template="gelu_mul", choices=choices, infeasible=infeasible)
