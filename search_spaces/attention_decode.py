"""The candidates of ``attention_decode``."""

from __future__ import annotations

from kernel_templates.attention_decode import (
    SPLITS,
    STOCK_SPLITS,
    Config,
    most_splits,
    rows_per_program,
)
from kernel_templates.attention_limits import accumulator_limit, fp8_limit, shared_memory
from kernel_templates.attention_problem import Problem
from kernel_templates.base import DeviceInfo
from kernel_templates.common import next_power_of_2

from .base import Choices, SearchSpace, shared_limit, thread_limits

#: The stock tile: never too large, however few the keys.
LEAST_KEYS = 32

#: Tried first: what number of splits fills the GPU depends on the sequences and the window, which
#: a search of few trials would not find out.
LIKELY = (
    *(Config(32, splits, 4, 3) for splits in (64, 32, 8, 4, 2, 1)),
    *(Config(64, splits, 4, 2) for splits in (64, 16, 4, 1)),
)


def choices(problem: Problem, device: DeviceInfo) -> Choices:
    return {
        "tile": (16, 32, 64, 128),
        "splits": SPLITS,
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3, 4),
    }


def infeasible(problem: Problem, config: Config, device: DeviceInfo) -> str | None:
    if config.splits > (most := most_splits(problem.sequences)):
        return f"{config.splits} splits of {problem.sequences} sequences, at most {most}"
    keys = problem.context + max(problem.new) - problem.first(problem.context)
    if config.tile > max(LEAST_KEYS, next_power_of_2(keys)):
        return f"a tile of {config.tile} for {keys} keys"
    tiles = -(-keys // config.tile)
    if config.splits > max(STOCK_SPLITS, tiles):
        return f"{config.splits} splits of {tiles} tiles"
    if reason := fp8_limit(problem, device):
        return reason
    if reason := thread_limits(config.num_warps, device):
        return reason
    block_m = rows_per_program(problem.group * problem.queries, problem.head_dim)
    if reason := accumulator_limit(block_m, problem.head_dim, config.num_warps):
        return reason
    needed, arithmetic = shared_memory(
        problem, block_m, config.tile, config.num_warps, config.num_stages, device
    )
    return shared_limit(needed, device, arithmetic)


SPACE = SearchSpace(
    template="attention_decode", choices=choices, infeasible=infeasible, likely=LIKELY
)
