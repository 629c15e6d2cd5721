"""A kernel template whose candidates can be told to misbehave, for tests of the tuner.

Doubles a matrix.  ``fault`` is what a candidate does when it is launched on real tensors; "static"
and "shared" already fail in the compiler and in the binary's resources.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_templates.base import (
    Cost,
    DeviceInfo,
    Inputs,
    KernelCall,
    KernelTemplate,
    ModelShape,
    out,
)
from search_spaces.base import SearchSpace

WIDTH = 32


@dataclass(frozen=True)
class Problem:
    tokens: int
    width: int = WIDTH
    dtype: str = "float16"


@dataclass(frozen=True)
class Config:
    fault: str
    num_warps: int


@dataclass
class DoubleInputs(Inputs):
    x: torch.Tensor
    y: torch.Tensor | None = out()


@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    x, y, tokens, x_stride, y_stride,
    WIDTH: tl.constexpr, STATIC_FAULT: tl.constexpr, SHARED: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    tl.static_assert(not STATIC_FAULT, "told to fail")
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    value = tl.load(x + row * x_stride + columns)
    if SHARED > 0:
        # Seven stages ahead of two float16 tiles: 7 * 2 * SHARED^2 * 2 B, 448 KiB for 128.
        at = tl.arange(0, SHARED)[:, None] * SHARED + tl.arange(0, SHARED)[None, :]
        total = tl.zeros([SHARED, SHARED], tl.float32)
        for step in tl.range(0, tokens, num_stages=8):
            total = tl.dot(tl.load(x + at + step * 8), tl.load(y + at + step * 8), total)
        tl.store(y + at, total)
    tl.store(y + row * y_stride + columns, value * FACTOR)


class OutOfResources(Exception):
    """Named as Triton's own."""


def misbehave(fault: str) -> None:
    if fault == "hang":
        time.sleep(1e6)
    elif fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "sticky":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif fault == "resources":
        raise OutOfResources("out of resource: shared memory, Required: 262144, limit: 232448")
    elif fault == "raise":
        raise RuntimeError("PassManager::run failed")


def calls(inputs: DoubleInputs, config: Config) -> Sequence[KernelCall]:
    assert inputs.y is not None
    if inputs.x.device.type != "meta":
        misbehave(config.fault)
    args = {
        "x": inputs.x,
        "y": inputs.y,
        "tokens": inputs.x.shape[0],
        "x_stride": inputs.x.stride(0),
        "y_stride": inputs.y.stride(0),
        "WIDTH": inputs.x.shape[1],
        "STATIC_FAULT": config.fault == "static",
        "SHARED": 128 if config.fault == "shared" else 0,
        "FACTOR": 3 if config.fault == "wrong" else 2,
    }
    return [KernelCall(_kernel, (inputs.x.shape[0],), args, num_warps=config.num_warps)]


def reference(inputs: DoubleInputs) -> dict[str, torch.Tensor]:
    return {"y": inputs.x * 2}


def make_inputs(problem: Problem, seed: int, device: torch.device, pad: int) -> DoubleInputs:
    def rows() -> torch.Tensor:
        shape = (problem.tokens, problem.width + pad)
        return torch.empty(shape, dtype=torch.float16, device=device)[:, : problem.width]

    x = rows()
    if device.type != "meta":
        draw = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(problem.tokens, problem.width, generator=draw))
    return DoubleInputs(x, rows())


def problems(model: ModelShape, tokens: Sequence[int]) -> list[Problem]:
    return [Problem(count) for count in tokens]


TEMPLATE = KernelTemplate(
    name="double",
    problem=Problem,
    config=Config,
    calls=calls,
    reference=reference,
    make_inputs=make_inputs,
    problems=problems,
    default=lambda problem, device: Config("fine", 4),
    cost=lambda problem: Cost(4 * problem.tokens * problem.width, problem.tokens),
    describe=lambda problem: f"width {problem.width}",
)


class DoubleSpace(SearchSpace):
    """The space of this template, which no package registers."""

    @property
    def kernel(self) -> KernelTemplate[Any, Any]:
        return TEMPLATE


def space(faults: Sequence[str], warps: Sequence[int] = (1, 2, 4)) -> DoubleSpace:
    """Candidates with these faults ("fine" among them) and warps; 16 warps are infeasible."""
    return DoubleSpace(
        "double",
        lambda problem, device: {"fault": tuple(faults), "num_warps": tuple(warps)},
        lambda problem, config, device: (
            "16 warps of 32 threads for 1 row" if config.num_warps == 16 else None
        ),
    )


def all_problems(tokens: Sequence[int]) -> list[Problem]:
    return [dataclasses.replace(Problem(1), tokens=count) for count in tokens]


A100 = DeviceInfo(
    "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 167936, 40 << 20, 80 << 30, 2.04e12, 312e12
)
