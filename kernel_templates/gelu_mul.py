"""The gated activation of every feed-forward block: ``gelu_tanh(gate) * up``.

Mathematics, elementwise over [tokens, width]::

    gelu_tanh(x) = 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)),   u = sqrt(2 / pi) (x + 0.044715 x^3)
    out          = gelu_tanh(gate) * up

The second form needs one exponential, loses nothing by cancellation, and is right at the ends:
``exp`` overflows to infinity where gelu is -0, and vanishes where gelu is ``x``.  It gives NaN for
-infinity, as PyTorch does.

``gate`` and ``up`` are [tokens, width] views with rows of any stride: the two halves of one
[tokens, 2 width] matrix product (MLP, MoE experts: one row per token and chosen expert), or the
per-layer embedding (PLE): ``gate`` contiguous and ``up`` one layer's slice of [tokens, layers,
width].

Roundings kept, as eager PyTorch in the same dtype has them: after gelu and after the product.
Everything in between is float32.  ``output`` must not overlap the operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .base import DTYPES, Cost, DeviceInfo, Inputs, KernelCall, KernelTemplate, ModelShape, out
from .common import (
    empty_rows,
    generator,
    next_power_of_2,
    randn_rows,
    rounded,
    tile_grid,
    tile_rows,
    vector_range,
)

#: -2 u = x (LINEAR + CUBIC x^2) ln 2: the constants of gelu_tanh for a base-2 exponential.
LINEAR = tl.constexpr(-2.0 * math.sqrt(2.0 / math.pi) / math.log(2.0))
CUBIC = tl.constexpr(-2.0 * math.sqrt(2.0 / math.pi) / math.log(2.0) * 0.044715)

OPERANDS = ("halves", "ple")


@dataclass(frozen=True)
class Problem:
    """What is given: [tokens, width] in ``dtype``.

    ``operand`` is ``halves`` (gate and up lie side by side in one row) or ``ple`` (gate contiguous,
    up a slice); ``up_stride`` is the number of elements between rows of ``up``: ``2 width`` for
    halves, ``layers * width`` for PLE.  For MoE experts ``tokens`` counts rows: tokens x top_k.
    """

    tokens: int
    width: int
    operand: str
    up_stride: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Config:
    """What may vary.

    A tile is ``rows`` x ``block`` columns; ``vector`` elements per thread and access;
    ``programs_per_sm`` 0 for one program per tile, else a persistent grid whose loads ``stages``
    pipelines.  ``evict_first`` lets the operands, which nobody reads again, leave L2 first;
    ``stream_stores`` does so for the result, which the next matrix product reads only if it fits.
    """

    rows: int
    block: int
    vector: int
    programs_per_sm: int
    num_warps: int
    stages: int
    evict_first: bool
    stream_stores: bool


@dataclass
class GeluMulInputs(Inputs):
    """``gate, up, output``: [tokens, width]; rows may be strided, elements are contiguous."""

    gate: torch.Tensor
    up: torch.Tensor
    output: torch.Tensor | None = out()


@triton.jit
def _gelu_tanh(x):
    """gelu_tanh of float32 ``x``, without libdevice."""
    return x / (1.0 + tl.exp2(x * (LINEAR + CUBIC * x * x)))


@triton.jit(do_not_specialize=["tokens"])
def _gelu_mul_kernel(
    gate,  # [tokens, WIDTH], row stride gate_stride
    up,  # [tokens, WIDTH]
    output,  # [tokens, WIDTH]
    tokens,
    gate_stride, up_stride, output_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    EVICTION: tl.constexpr,
    STORE_CACHE: tl.constexpr,
):  # fmt: skip
    # Grid: (tiles of ROWS x BLOCK, columns fastest,) or fewer programs that stride over the tiles.
    COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    for tile in tl.range(
        tl.program_id(0),
        tl.cdiv(tokens, ROWS) * COLUMN_TILES,
        tl.num_programs(0),
        num_stages=STAGES,
    ):
        row = tile_rows(tile // COLUMN_TILES, ROWS)[:, None]  # [ROWS, 1]
        columns = (tile % COLUMN_TILES) * BLOCK + vector_range(0, BLOCK, VECTOR)[None, :]
        mask = (row < tokens) & (columns < WIDTH)  # [ROWS, BLOCK]
        g = tl.load(gate + row * gate_stride + columns, mask=mask, eviction_policy=EVICTION)
        u = tl.load(up + row * up_stride + columns, mask=mask, eviction_policy=EVICTION)
        y = rounded(_gelu_tanh(g.to(tl.float32)), output) * u.to(tl.float32)
        tl.store(
            output + row * output_stride + columns,
            y.to(output.dtype.element_ty),
            mask=mask,
            cache_modifier=STORE_CACHE,
        )


def calls(inputs: GeluMulInputs, config: Config) -> list[KernelCall]:
    """The launch for these inputs; ValueError when the operands do not fit together."""
    tokens, width = inputs.gate.shape
    output = inputs.output
    if output is None:
        raise ValueError("gelu_mul: output is missing")
    for name, tensor in {**inputs.operands(), **inputs.outputs()}.items():
        if tensor.shape != (tokens, width):
            raise ValueError(
                f"gelu_mul: {name} has shape {tuple(tensor.shape)}, wanted {(tokens, width)}"
            )
        if tensor.stride(1) != 1 and width > 1:
            raise ValueError(f"gelu_mul: {name} has strided columns {tensor.stride()}")
    args = {
        "gate": inputs.gate,
        "up": inputs.up,
        "output": output,
        "tokens": tokens,
        "gate_stride": inputs.gate.stride(0),
        "up_stride": inputs.up.stride(0),
        "output_stride": output.stride(0),
        "WIDTH": width,
        "ROWS": config.rows,
        "BLOCK": config.block,
        "VECTOR": config.vector,
        "STAGES": config.stages,
        "EVICTION": "evict_first" if config.evict_first else "",
        "STORE_CACHE": ".cs" if config.stream_stores else "",
    }
    tiles = -(-tokens // config.rows) * -(-width // config.block)
    grid = tile_grid(tiles, config.programs_per_sm, output)
    return [KernelCall(_gelu_mul_kernel, grid, args, num_warps=config.num_warps)]


def reference(inputs: GeluMulInputs) -> dict[str, torch.Tensor]:
    """Plain PyTorch in the inputs' dtype: vLLM's ``GeluAndMul`` and the PLE gate."""
    gated = torch.nn.functional.gelu(inputs.gate, approximate="tanh")
    return {"output": gated * inputs.up}


def make_inputs(problem: Problem, seed: int, device: torch.device, pad: int = 0) -> GeluMulInputs:
    """Random inputs; the gate reaches both flat ends of gelu and its curved middle."""
    tokens, width = problem.tokens, problem.width
    dtype, draw = DTYPES[problem.dtype], generator(seed, device)
    if problem.operand == "halves":
        if problem.up_stride != 2 * width:
            raise ValueError(f"up_stride is {problem.up_stride}, wanted {2 * width} for halves")
        both = randn_rows(tokens, 2 * width, dtype, device, draw, pad, 2.0)
        gate, up = both[:, :width], both[:, width:]
    elif problem.operand == "ple":
        gate = randn_rows(tokens, width, dtype, device, draw, pad, 2.0)
        # A layer from the middle, so that its neighbours lie on both sides.
        start = problem.up_stride // (2 * width) * width
        every = randn_rows(tokens, problem.up_stride, dtype, device, draw, pad)
        up = every[:, start : start + width]
    else:
        raise ValueError(f"operand is {problem.operand!r}, wanted one of {', '.join(OPERANDS)}")
    return GeluMulInputs(gate, up, output=empty_rows(tokens, width, dtype, device, pad))


def problems(model: ModelShape, tokens: Sequence[int]) -> list[Problem]:
    """The MLPs of the layers, the PLE gate, and the experts' rows in MoE layers."""
    found: dict[Problem, None] = {}

    def add(rows_per_token: int, width: int, operand: str, up_stride: int) -> None:
        for count in tokens:
            rows = count * rows_per_token
            found[Problem(rows, width, operand, up_stride, dtype=model.dtype)] = None

    for layer in model.layers:
        add(1, layer.intermediate_size, "halves", 2 * layer.intermediate_size)
    if model.ple_width:
        add(1, model.ple_width, "ple", len(model.layers) * model.ple_width)
    if any(layer.moe for layer in model.layers):
        width = model.moe_intermediate_size
        add(model.top_k_experts, width, "halves", 2 * width)
    return list(found)


def tile_width(problem: Problem) -> int:
    """The widest tile worth having: a power of two, and work for every lane of a warp."""
    return max(128, next_power_of_2(problem.width))


def default(problem: Problem, device: DeviceInfo) -> Config:
    """One 16-byte access per thread and operand; smaller tiles while they do not fill the GPU."""
    block = min(1024, tile_width(problem))
    rows = max(1, min(1024 // block, next_power_of_2(problem.tokens)))
    while rows > 1 and -(-problem.tokens // rows) * -(-problem.width // block) < 4 * device.sms:
        rows //= 2
    while block > 256 and -(-problem.tokens // rows) * -(-problem.width // block) < device.sms:
        block //= 2
    warps = max(1, rows * block // 256)
    return Config(
        rows=rows,
        block=block,
        vector=min(8, rows * block // (32 * warps)),
        programs_per_sm=0,
        num_warps=warps,
        stages=1,
        evict_first=False,
        stream_stores=False,
    )


def cost(problem: Problem) -> Cost:
    """Two values in and one out; about 12 FLOP a value."""
    elements = problem.tokens * problem.width
    return Cost(bytes=3 * elements * DTYPES[problem.dtype].itemsize, flops=12 * elements)


def describe(problem: Problem) -> str:
    """Short name for tables and logs, without the token count."""
    place = f" (PLE, rows of {problem.up_stride})" if problem.operand == "ple" else ""
    return f"width {problem.width}: gelu * up{place}"


TEMPLATE = KernelTemplate(
    name="gelu_mul",
    problem=Problem,
    config=Config,
    calls=calls,
    reference=reference,
    make_inputs=make_inputs,
    problems=problems,
    default=default,
    cost=cost,
    describe=describe,
)
