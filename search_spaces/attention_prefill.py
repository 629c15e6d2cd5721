"""The candidates of ``attention_prefill``."""

from __future__ import annotations

from kernel_templates.attention_limits import (
    accumulator_limit,
    accumulator_registers,
    descriptor_limit,
    fp8_limit,
    shared_memory,
)
from kernel_templates.attention_prefill import Config, least_block_m
from kernel_templates.attention_problem import Problem
from kernel_templates.base import DeviceInfo
from kernel_templates.common import next_power_of_2

from .base import Choices, SearchSpace, shared_limit, thread_limits

#: The stock tile: never too large, however few the keys.
LEAST_KEYS = 32


#: Registers of a thread that the accumulator of a program may fill before V's columns are shared.
SHARED_REGISTERS = 128

#: Fast for some layer of E2B or 26B on an H200; which of them depends on the head and the blocks.
LIKELY = (
    Config(128, 64, 1, True, True, 8, 2),
    Config(128, 64, 1, False, False, 8, 2),
    Config(128, 32, 2, True, True, 8, 2),
    Config(128, 32, 2, True, False, 8, 2),
    Config(64, 32, 1, False, False, 4, 2),
    Config(64, 32, 1, True, True, 4, 2),
    Config(64, 32, 1, False, False, 8, 2),
    Config(64, 32, 1, True, False, 8, 2),
)


def choices(problem: Problem, device: DeviceInfo) -> Choices:
    return {
        "block_m": (16, 32, 64, 128, 256),
        "tile": (16, 32, 64, 128),
        "parts": (1, 2),
        "edges_apart": (True, False),
        "descriptors": (False, True),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    }


def infeasible(problem: Problem, config: Config, device: DeviceInfo) -> str | None:
    least = least_block_m(problem.group)
    if config.block_m < least:
        return f"{config.block_m} rows, at least {least} for {problem.group} heads per KV head"
    longest = max(problem.new)
    rows = next_power_of_2(longest * problem.group)
    if config.block_m > max(least, rows):
        return f"{config.block_m} rows for {longest} queries x {problem.group} heads per KV head"
    keys = problem.context + longest
    if config.tile > max(LEAST_KEYS, next_power_of_2(keys)):
        return f"a tile of {config.tile} for {keys} keys"
    if reason := fp8_limit(problem, device):
        return reason
    if reason := thread_limits(config.num_warps, device):
        return reason
    value_dim = problem.head_dim // config.parts
    if reason := accumulator_limit(config.block_m, value_dim, config.num_warps):
        return reason
    if config.parts > 1:
        whole = accumulator_registers(config.block_m, problem.head_dim, config.num_warps)
        if whole <= SHARED_REGISTERS:
            return f"{config.parts} parts of an accumulator of {whole:g} registers a thread"
    if config.descriptors:
        if not config.edges_apart:
            return f"descriptors of {config.tile} keys, which may all be masked"
        if reason := descriptor_limit(problem, config.tile, device):
            return reason
    needed, arithmetic = shared_memory(
        problem,
        config.block_m,
        config.tile,
        config.num_warps,
        config.num_stages,
        device,
        config.parts,
        config.descriptors,
    )
    return shared_limit(needed, device, arithmetic)


SPACE = SearchSpace(
    template="attention_prefill", choices=choices, infeasible=infeasible, likely=LIKELY
)
