"""Everything between two matrix products of the residual stream, in one kernel.

Mathematics (``n`` is RMSNorm over the hidden size, weight ``w``, no ``1 + w``)::

    m   = n_0(b_0)                           one branch
    m   = n_2(n_0(b_0) + n_1(b_1))           two branches (MoE epilogue)
    h   = m + r            [* layer scalar]  the new residual stream
    o_i = n_i'(h)                            zero to three following norms

with ``b_*, r, h, o_i`` of shape [tokens, hidden].  One problem kind covers what a decoder layer
needs: post-attention norm + add + pre-FF norm (dense: one following norm; MoE: pre-FF, pre-MoE and
router input), post-FF norm + add [+ scalar + next layer's input norm], post-PLE norm + add + scalar
+ next layer's input norm, and the MoE epilogue.  The router's input is a following norm whose
result is first scaled by ``hidden ** -0.5`` (rounded to the dtype) and then by the learned scale.

Roundings kept, as eager PyTorch in the same dtype has them: after each normalisation, after each
weight (and router scale), after each sum, after the layer scalar.  Everything in between is
float32.  ``h_out`` may be the same tensor as ``residual``: a program reads its rows before it
writes them.
"""

from __future__ import annotations

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
    rms_norm,
    rms_normalised,
    rounded,
    scaled_randn,
    tile_grid,
    tile_rows,
    vector_range,
)

MAX_NORMS = 3


@dataclass(frozen=True)
class Problem:
    """What is given: [tokens, hidden] in ``dtype``.

    ``branches`` is 1 or 2; ``scalar`` says whether the layer scalar applies; ``norms`` counts the
    following norms (0 to 3), of which the last is the router's when ``router`` is set.
    """

    tokens: int
    hidden: int
    branches: int = 1
    scalar: bool = False
    norms: int = 1
    router: bool = False
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Config:
    """What may vary.

    ``rows`` per program; ``block`` columns at a time (at least ``hidden``: one pass, the row stays
    in registers; less: looped reduction that reads the row again); ``vector`` elements per thread
    and access; ``programs_per_sm`` 0 for one program per tile, else a persistent grid; ``stages``
    software-pipelines the persistent loop's loads.
    """

    rows: int
    block: int
    vector: int
    programs_per_sm: int
    num_warps: int
    stages: int


@dataclass
class ResidualNormInputs(Inputs):
    """Operands and outputs; rows may be strided, elements of a row are contiguous.

    ``branch0/1, residual, h_out, norm_out*``: [tokens, hidden]; ``branch*_weight, sum_weight,
    norm_weight*``: [hidden] (``norm_weight2`` may be the router scale).  ``scalar`` is None, a
    Python float, or a tensor of one element of any float dtype.  ``router`` is the index of the
    router's following norm, -1 for none; ``root`` is :func:`router_root` of the hidden size.
    """

    branch0: torch.Tensor
    branch0_weight: torch.Tensor
    residual: torch.Tensor
    branch1: torch.Tensor | None = None
    branch1_weight: torch.Tensor | None = None
    sum_weight: torch.Tensor | None = None
    scalar: torch.Tensor | float | None = None
    norm_weight0: torch.Tensor | None = None
    norm_weight1: torch.Tensor | None = None
    norm_weight2: torch.Tensor | None = None
    router: int = -1
    root: float = 1.0
    eps: float = 1e-6
    h_out: torch.Tensor | None = out()
    norm_out0: torch.Tensor | None = out()
    norm_out1: torch.Tensor | None = out()
    norm_out2: torch.Tensor | None = out()

    def norms(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """(weight, output) of each following norm, in order."""
        pairs = [
            (self.norm_weight0, self.norm_out0),
            (self.norm_weight1, self.norm_out1),
            (self.norm_weight2, self.norm_out2),
        ]
        return [(weight, output) for weight, output in pairs if weight is not None]


@triton.jit
def _weighted(normal, weight, like):
    return rounded(normal * weight.to(tl.float32), like)


@triton.jit
def _following(
    h, sum_of_squares, weight, like, hidden: tl.constexpr, eps, root, IS_ROUTER: tl.constexpr
):
    normal = rms_normalised(h, sum_of_squares, hidden, eps, like)
    if IS_ROUTER:
        normal = rounded(normal * root, like)
    return _weighted(normal, weight, like)


@triton.jit(do_not_specialize=["tokens"])
def _one_pass_kernel(
    branch0,  # [tokens, HIDDEN], row stride branch0_stride
    branch1,  # [tokens, HIDDEN] or None
    residual,  # [tokens, HIDDEN]
    h_out,  # [tokens, HIDDEN]
    out0, out1, out2,  # [tokens, HIDDEN] or None
    weight0, weight1, sum_weight,  # [HIDDEN] or None
    norm0, norm1, norm2,  # [HIDDEN] or None
    scalar,  # pointer to one element, float, or None
    tokens,
    branch0_stride, branch1_stride, residual_stride, h_stride,
    out0_stride, out1_stride, out2_stride,
    eps, root,
    HIDDEN: tl.constexpr,
    BRANCHES: tl.constexpr,
    SCALAR: tl.constexpr,  # 0 none, 1 pointer, 2 value
    NORMS: tl.constexpr,
    ROUTER: tl.constexpr,  # index of the router's norm, -1 for none
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # Grid: (tiles of ROWS rows,) or fewer programs that stride over the tiles.
    columns = vector_range(0, BLOCK, VECTOR)[None, :]  # [1, BLOCK]
    inside = columns < HIDDEN
    # Loaded once per program: a persistent program reuses them for all its rows.
    w0 = tl.load(weight0 + columns, mask=inside, other=0.0)
    if BRANCHES == 2:
        w1 = tl.load(weight1 + columns, mask=inside, other=0.0)
        ws = tl.load(sum_weight + columns, mask=inside, other=0.0)
    if NORMS >= 1:
        n0 = tl.load(norm0 + columns, mask=inside, other=0.0)
    if NORMS >= 2:
        n1 = tl.load(norm1 + columns, mask=inside, other=0.0)
    if NORMS >= 3:
        n2 = tl.load(norm2 + columns, mask=inside, other=0.0)
    if SCALAR == 1:
        factor = tl.load(scalar).to(tl.float32)
    if SCALAR == 2:
        factor = scalar

    for tile in tl.range(
        tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tile_rows(tile, ROWS)[:, None]  # [ROWS, 1]
        mask = (row < tokens) & inside  # [ROWS, BLOCK]
        b = tl.load(branch0 + row * branch0_stride + columns, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if BRANCHES == 2:
            # Before the first reduction, whose barrier no load is moved across.
            b1 = tl.load(branch1 + row * branch1_stride + columns, mask=mask, other=0.0)
            b1 = b1.to(tl.float32)
        m = _weighted(
            rms_normalised(b, tl.sum(b * b, axis=1, keep_dims=True), HIDDEN, eps, h_out), w0, h_out
        )
        if BRANCHES == 2:
            b1 = rms_normalised(b1, tl.sum(b1 * b1, axis=1, keep_dims=True), HIDDEN, eps, h_out)
            m = rounded(m + _weighted(b1, w1, h_out), h_out)
            m = _weighted(
                rms_normalised(m, tl.sum(m * m, axis=1, keep_dims=True), HIDDEN, eps, h_out),
                ws,
                h_out,
            )
        h = rounded(m + r, h_out)
        if SCALAR != 0:
            h = rounded(h * factor, h_out)
        tl.store(h_out + row * h_stride + columns, h.to(h_out.dtype.element_ty), mask=mask)
        if NORMS >= 1:
            squares = tl.sum(h * h, axis=1, keep_dims=True)
            o = _following(h, squares, n0, h_out, HIDDEN, eps, root, ROUTER == 0)
            tl.store(out0 + row * out0_stride + columns, o.to(out0.dtype.element_ty), mask=mask)
        if NORMS >= 2:
            o = _following(h, squares, n1, h_out, HIDDEN, eps, root, ROUTER == 1)
            tl.store(out1 + row * out1_stride + columns, o.to(out1.dtype.element_ty), mask=mask)
        if NORMS >= 3:
            o = _following(h, squares, n2, h_out, HIDDEN, eps, root, ROUTER == 2)
            tl.store(out2 + row * out2_stride + columns, o.to(out2.dtype.element_ty), mask=mask)


@triton.jit
def _branch_sum(
    branch0, branch1, weight0, weight1, at0, at1, columns, mask, inside, squares0, squares1, like,
    eps, HIDDEN: tl.constexpr, BRANCHES: tl.constexpr,
):  # fmt: skip
    """One block of ``n_0(b_0) [+ n_1(b_1)]``."""
    b = tl.load(branch0 + at0, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight0 + columns, mask=inside, other=0.0)
    m = _weighted(rms_normalised(b, squares0, HIDDEN, eps, like), w, like)
    if BRANCHES == 2:
        b = tl.load(branch1 + at1, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight1 + columns, mask=inside, other=0.0)
        m = rounded(m + _weighted(rms_normalised(b, squares1, HIDDEN, eps, like), w, like), like)
    return m


@triton.jit(do_not_specialize=["tokens"])
def _looped_kernel(
    branch0, branch1, residual, h_out, out0, out1, out2,
    weight0, weight1, sum_weight, norm0, norm1, norm2, scalar,
    tokens,
    branch0_stride, branch1_stride, residual_stride, h_stride,
    out0_stride, out1_stride, out2_stride,
    eps, root,
    HIDDEN: tl.constexpr,
    BRANCHES: tl.constexpr,
    SCALAR: tl.constexpr,
    NORMS: tl.constexpr,
    ROUTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # As _one_pass_kernel, but BLOCK columns at a time: rows are read again, from L1 or L2.
    if SCALAR == 1:
        factor = tl.load(scalar).to(tl.float32)
    if SCALAR == 2:
        factor = scalar
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row = tile_rows(tile, ROWS)[:, None]  # [ROWS, 1]
        squares0 = tl.zeros([ROWS, BLOCK], tl.float32)
        squares1 = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.range(0, HIDDEN, BLOCK, num_stages=STAGES):
            columns = start + vector_range(0, BLOCK, VECTOR)[None, :]
            mask = (row < tokens) & (columns < HIDDEN)
            b = tl.load(branch0 + row * branch0_stride + columns, mask=mask, other=0.0)
            squares0 += b.to(tl.float32) * b.to(tl.float32)
            if BRANCHES == 2:
                b = tl.load(branch1 + row * branch1_stride + columns, mask=mask, other=0.0)
                squares1 += b.to(tl.float32) * b.to(tl.float32)
        total0 = tl.sum(squares0, axis=1, keep_dims=True)
        total1 = tl.sum(squares1, axis=1, keep_dims=True)

        if BRANCHES == 2:
            squares0 = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in tl.range(0, HIDDEN, BLOCK, num_stages=STAGES):
                columns = start + vector_range(0, BLOCK, VECTOR)[None, :]
                inside = columns < HIDDEN
                mask = (row < tokens) & inside
                m = _branch_sum(
                    branch0, branch1, weight0, weight1,
                    row * branch0_stride + columns, row * branch1_stride + columns, columns,
                    mask, inside, total0, total1, h_out, eps, HIDDEN, BRANCHES,
                )  # fmt: skip
                squares0 += m * m
            total_sum = tl.sum(squares0, axis=1, keep_dims=True)

        squares0 = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.range(0, HIDDEN, BLOCK, num_stages=STAGES):
            columns = start + vector_range(0, BLOCK, VECTOR)[None, :]
            inside = columns < HIDDEN
            mask = (row < tokens) & inside
            m = _branch_sum(
                branch0, branch1, weight0, weight1,
                row * branch0_stride + columns, row * branch1_stride + columns, columns,
                mask, inside, total0, total1, h_out, eps, HIDDEN, BRANCHES,
            )  # fmt: skip
            if BRANCHES == 2:
                w = tl.load(sum_weight + columns, mask=inside, other=0.0)
                m = _weighted(rms_normalised(m, total_sum, HIDDEN, eps, h_out), w, h_out)
            r = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
            h = rounded(m + r.to(tl.float32), h_out)
            if SCALAR != 0:
                h = rounded(h * factor, h_out)
            squares0 += h * h
            tl.store(h_out + row * h_stride + columns, h.to(h_out.dtype.element_ty), mask=mask)

        if NORMS >= 1:
            total_h = tl.sum(squares0, axis=1, keep_dims=True)
            # The stores above and the loads below may lie in other threads of the block.
            tl.debug_barrier()
            for start in tl.range(0, HIDDEN, BLOCK, num_stages=1):
                columns = start + vector_range(0, BLOCK, VECTOR)[None, :]
                inside = columns < HIDDEN
                mask = (row < tokens) & inside
                h = tl.load(h_out + row * h_stride + columns, mask=mask, other=0.0).to(tl.float32)
                w = tl.load(norm0 + columns, mask=inside, other=0.0)
                o = _following(h, total_h, w, h_out, HIDDEN, eps, root, ROUTER == 0)
                tl.store(out0 + row * out0_stride + columns, o.to(out0.dtype.element_ty), mask=mask)
                if NORMS >= 2:
                    w = tl.load(norm1 + columns, mask=inside, other=0.0)
                    o = _following(h, total_h, w, h_out, HIDDEN, eps, root, ROUTER == 1)
                    o = o.to(out1.dtype.element_ty)
                    tl.store(out1 + row * out1_stride + columns, o, mask=mask)
                if NORMS >= 3:
                    w = tl.load(norm2 + columns, mask=inside, other=0.0)
                    o = _following(h, total_h, w, h_out, HIDDEN, eps, root, ROUTER == 2)
                    o = o.to(out2.dtype.element_ty)
                    tl.store(out2 + row * out2_stride + columns, o, mask=mask)


def fits(inputs: ResidualNormInputs) -> None:
    """ValueError naming the first operand that is missing or does not fit the residual stream."""

    def wrong(name: str, found: object, wanted: object) -> ValueError:
        return ValueError(f"residual_norm: {name} is {found}, wanted {wanted}")

    stream = inputs.residual
    if stream.dim() != 2 or not stream.is_floating_point():
        found = f"{stream.dtype} {tuple(stream.shape)}"
        raise wrong("residual", found, "floating-point [tokens, hidden]")
    rows, row = tuple(stream.shape), tuple(stream.shape[1:])
    second = inputs.branch1 is not None
    wanted: dict[str, tuple[int, ...] | None] = {
        "branch0": rows,
        "branch1": rows if second else None,
        "h_out": rows,
        "branch0_weight": row,
        "branch1_weight": row if second else None,
        "sum_weight": row if second else None,
    }
    ended = False
    for index in range(MAX_NORMS):
        weight = getattr(inputs, f"norm_weight{index}")
        if weight is not None and ended:
            raise wrong(f"norm_weight{index - 1}", None, "the norms to be given from 0 on")
        ended = weight is None
        wanted[f"norm_weight{index}"] = None if ended else row
        wanted[f"norm_out{index}"] = None if ended else rows
    for name, shape in wanted.items():
        tensor = getattr(inputs, name)
        given = None if tensor is None else tuple(tensor.shape)
        if given != shape:
            raise wrong(name, given, shape)
        if tensor is not None and tensor.dtype != stream.dtype:
            raise wrong(f"dtype of {name}", tensor.dtype, f"{stream.dtype} as residual")
    scalar = inputs.scalar
    if isinstance(scalar, torch.Tensor):
        if scalar.numel() != 1 or not scalar.is_floating_point():
            found = f"{scalar.dtype} {tuple(scalar.shape)}"
            raise wrong("scalar", found, "one floating-point element")
    elif scalar is not None and not isinstance(scalar, (int, float)):
        raise wrong("scalar", type(scalar).__name__, "a number or a tensor of one element")
    if not -1 <= inputs.router < MAX_NORMS:
        raise wrong("router", inputs.router, f"-1 to {MAX_NORMS - 1}")


def calls(inputs: ResidualNormInputs, config: Config) -> list[KernelCall]:
    """The launch for these inputs; ValueError when the operands do not fit together."""
    tokens, hidden = inputs.residual.shape
    norms = inputs.norms()
    h_out = inputs.h_out
    if h_out is None:
        raise ValueError("residual_norm: h_out is missing")
    for name, tensor in {**inputs.operands(), **inputs.outputs()}.items():
        if tensor.shape[-1:] != (hidden,) and name != "scalar":
            raise ValueError(
                f"residual_norm: {name} has shape {tuple(tensor.shape)}, wanted {hidden} columns"
            )
        if tensor.dim() > 0 and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"residual_norm: {name} has strided columns {tensor.stride()}")
    outs = [output for _, output in norms] + [None] * (MAX_NORMS - len(norms))
    weights = [weight for weight, _ in norms] + [None] * (MAX_NORMS - len(norms))
    scalar_kind = (
        0 if inputs.scalar is None else 1 if isinstance(inputs.scalar, torch.Tensor) else 2
    )
    kernel = _one_pass_kernel if config.block >= hidden else _looped_kernel
    args = {
        "branch0": inputs.branch0,
        "branch1": inputs.branch1,
        "residual": inputs.residual,
        "h_out": h_out,
        "out0": outs[0],
        "out1": outs[1],
        "out2": outs[2],
        "weight0": inputs.branch0_weight,
        "weight1": inputs.branch1_weight,
        "sum_weight": inputs.sum_weight,
        "norm0": weights[0],
        "norm1": weights[1],
        "norm2": weights[2],
        "scalar": inputs.scalar,
        "tokens": tokens,
        "branch0_stride": inputs.branch0.stride(0),
        "branch1_stride": 0 if inputs.branch1 is None else inputs.branch1.stride(0),
        "residual_stride": inputs.residual.stride(0),
        "h_stride": h_out.stride(0),
        "out0_stride": 0 if outs[0] is None else outs[0].stride(0),
        "out1_stride": 0 if outs[1] is None else outs[1].stride(0),
        "out2_stride": 0 if outs[2] is None else outs[2].stride(0),
        "eps": inputs.eps,
        "root": inputs.root,
        "HIDDEN": hidden,
        "BRANCHES": 1 if inputs.branch1 is None else 2,
        "SCALAR": scalar_kind,
        "NORMS": len(norms),
        "ROUTER": inputs.router,
        "ROWS": config.rows,
        "BLOCK": config.block,
        "VECTOR": config.vector,
        "STAGES": config.stages,
    }
    grid = tile_grid(-(-tokens // config.rows), config.programs_per_sm, h_out)
    return [KernelCall(kernel, grid, args, num_warps=config.num_warps)]


def router_root(hidden: int, dtype: torch.dtype) -> float:
    """``hidden ** -0.5`` rounded to ``dtype``, as the router multiplies by it.

    A constant of the model, hence rounded in the exact reference too.
    """
    return torch.tensor(hidden**-0.5, dtype=dtype).item()


def reference(inputs: ResidualNormInputs) -> dict[str, torch.Tensor]:
    """Plain PyTorch in the inputs' dtype: what vLLM's native layer computes."""
    m = rms_norm(inputs.branch0, inputs.branch0_weight, inputs.eps)
    if inputs.branch1 is not None:
        m = m + rms_norm(inputs.branch1, inputs.branch1_weight, inputs.eps)
        m = rms_norm(m, inputs.sum_weight, inputs.eps)
    h = m + inputs.residual
    if inputs.scalar is not None:
        # In the stream's dtype, whatever the scalar's own: a float32 one must not leak (case 35).
        h = h * (
            inputs.scalar.to(h.dtype) if isinstance(inputs.scalar, torch.Tensor) else inputs.scalar
        )
    results = {"h_out": h}
    for index, (weight, _) in enumerate(inputs.norms()):
        if index == inputs.router:
            normal = rms_norm(h, None, inputs.eps) * inputs.root
            results[f"norm_out{index}"] = normal * weight.to(h.dtype)
        else:
            results[f"norm_out{index}"] = rms_norm(h, weight, inputs.eps)
    return results


def make_inputs(
    problem: Problem, seed: int, device: torch.device, pad: int = 0
) -> ResidualNormInputs:
    """Random inputs; branches and residual differ in magnitude, as they do in a trained model."""
    dtype, draw = DTYPES[problem.dtype], generator(seed, device)

    def rows(scale: float = 1.0) -> torch.Tensor:
        return randn_rows(problem.tokens, problem.hidden, dtype, device, draw, pad, scale)

    def weight() -> torch.Tensor:
        return scaled_randn((problem.hidden,), dtype, device, draw, 0.3, 1.0)

    def output() -> torch.Tensor:
        return empty_rows(problem.tokens, problem.hidden, dtype, device, pad)

    two = problem.branches == 2
    inputs = ResidualNormInputs(
        branch0=rows(0.5),
        branch0_weight=weight(),
        residual=rows(4.0),
        branch1=rows(3.0) if two else None,
        branch1_weight=weight() if two else None,
        sum_weight=weight() if two else None,
        scalar=scaled_randn((1,), dtype, device, draw, 0.1, 0.7) if problem.scalar else None,
        router=problem.norms - 1 if problem.router else -1,
        root=router_root(problem.hidden, dtype),
        h_out=output(),
    )
    for index in range(problem.norms):
        setattr(inputs, f"norm_weight{index}", weight())
        setattr(inputs, f"norm_out{index}", output())
    return inputs


def problems(model: ModelShape, tokens: Sequence[int]) -> list[Problem]:
    """What the model's layers need between their matrix products."""
    kinds: dict[tuple[int, bool, int, bool], None] = {}
    for layer in model.layers:
        kinds[(1, False, 3 if layer.moe else 1, layer.moe)] = None
        branches = 2 if layer.moe else 1
        if model.ple_width:
            kinds[(branches, False, 0, False)] = None  # post-FF norm + add, before the PLE gate
            kinds[(1, True, 1, False)] = None  # post-PLE norm + add + scalar + next input norm
        else:
            kinds[(branches, True, 1, False)] = None
    return [
        Problem(count, model.hidden_size, *kind, dtype=model.dtype)
        for kind in kinds
        for count in tokens
    ]


def default(problem: Problem, device: DeviceInfo) -> Config:
    """One row per program in one pass, 16-byte accesses, 16 or 32 elements a thread.

    Four warps up to 4096 columns: on an H200 (2026-12-01) 2816 columns took up to 1.3x longer with
    eight, 1536 columns a little longer with two or eight at few tokens.
    """
    block = next_power_of_2(problem.hidden)
    warps = max(1, block // 1024, min(4, block // 512))
    return Config(rows=1, block=block, vector=8, programs_per_sm=0, num_warps=warps, stages=1)


def cost(problem: Problem) -> Cost:
    """Rows in (branches + residual) and out (h + norms), weights once; about 8 FLOP a value."""
    rows_in, rows_out = problem.branches + 1, 1 + problem.norms
    weights = (3 if problem.branches == 2 else 1) + problem.norms
    size = DTYPES[problem.dtype].itemsize
    elements = problem.tokens * problem.hidden
    return Cost(
        bytes=size * (elements * (rows_in + rows_out) + weights * problem.hidden),
        flops=8 * elements * (rows_in + problem.norms),
    )


def describe(problem: Problem) -> str:
    """Short name for tables and logs, without the token count."""
    parts = ["2 branches + add" if problem.branches == 2 else "norm + add"]
    parts += ["scalar"] if problem.scalar else []
    parts += [f"{problem.norms} norm{'s' * (problem.norms > 1)}"] if problem.norms else []
    parts += ["router"] if problem.router else []
    return f"hidden {problem.hidden}: {' + '.join(parts)}"


TEMPLATE = KernelTemplate(
    name="residual_norm",
    problem=Problem,
    config=Config,
    calls=calls,
    reference=reference,
    make_inputs=make_inputs,
    problems=problems,
    default=default,
    cost=cost,
    describe=describe,
    fits=fits,
)
