"""Everything between the QKV projection and attention, in one kernel.

Mathematics, per token and head of width D (``n`` is RMSNorm over D, weight ``w``, no ``1 + w``)::

    y     = n(x) * w                        query and key heads
    o_1   = y_1 * cos - y_2 * sin           first half, D / 2 values (neox rotation)
    o_2   = y_2 * cos + y_1 * sin           second half
    v_out = n(x)                            value heads: no weight, no rotation

with ``qkv`` [tokens, columns q | k | v], ``positions`` [tokens], ``cos_sin`` [max position, D]
(a row: cos half, sin half), ``q_out`` [tokens, query heads * D], ``k_out, v_out`` [tokens, KV
heads * D].  Only the first ``rotary_pairs`` pairs (y_1[i], y_2[i]) rotate: the cache has cos 1 and
sin 0 for the others, which are not read.

Three kinds of layer.  ``separate``: Q, K and V.  ``k_eq_v``: V is the norm without weight of the
same raw K, which is read once; V columns, if there are any, are not read.  ``shared`` (KV shared
with an earlier layer): Q only, K and V columns are neither read nor written.

Roundings kept, as eager PyTorch in the same dtype has them: after each normalisation and after each
weight.  The rotation takes those rounded values, runs in float32 and rounds once, where eager
PyTorch rounds cos, sin and both products too.

The outputs may be views of ``qkv``, each head in its own place: a program reads its rows before it
writes them, and no other program touches them.  Any other overlap is a race.
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
    randn_rows,
    rms_norm,
    rms_normalised,
    rounded,
    scaled_randn,
    tile_grid,
    vector_range,
)

#: Parts of a row after Q that are read, by ``Problem.kv``.
SECTIONS = {"shared": 0, "k_eq_v": 1, "separate": 2}

#: Rows of the cos/sin cache that :func:`make_inputs` makes.
MAX_POSITION = 4096

#: Tokens x heads at most, so that row indices stay in int32.
MAX_TOKEN_HEADS = 2**30


@dataclass(frozen=True)
class Problem:
    """What is given: ``query_heads`` and ``kv_heads`` heads of ``head_dim`` per token in ``dtype``.

    ``kv`` is ``separate``, ``k_eq_v`` or ``shared``; ``rotary_pairs`` of the ``head_dim / 2`` pairs
    rotate.
    """

    tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    kv: str = "separate"
    rotary_pairs: int = 128
    dtype: str = "bfloat16"

    @property
    def heads(self) -> int:
        """Heads read per token: the rows that the kernel tiles."""
        return self.query_heads + SECTIONS[self.kv] * self.kv_heads


@dataclass(frozen=True)
class Config:
    """What may vary.

    ``rows`` (token, head) rows per tile; ``vector`` elements per thread and access;
    ``programs_per_sm`` 0 for one program per tile, else a persistent grid.
    """

    rows: int
    vector: int
    programs_per_sm: int
    num_warps: int


@dataclass
class QkvNormRopeInputs(Inputs):
    """Operands and outputs; rows may be strided, elements of a row are contiguous.

    ``qkv``: [tokens, at least the columns that are read]; ``positions``: [tokens] integers below
    the length of ``cos_sin`` [max position, D], which may be float32 beside any dtype; ``q_weight,
    k_weight``: [D]; ``q_out``: [tokens, query_heads * D]; ``k_out, v_out``: [tokens, kv_heads * D].
    ``k_weight, k_out, v_out`` are None when ``kv`` is ``shared``.
    """

    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor | None
    query_heads: int
    kv_heads: int
    kv: str
    rotary_pairs: int
    eps: float = 1e-6
    q_out: torch.Tensor | None = out()
    k_out: torch.Tensor | None = out()
    v_out: torch.Tensor | None = out()


@triton.jit
def _heads(
    tile,
    tokens,
    x,  # [tokens, >= (FIRST + HEADS) * HEAD_DIM], row stride x_stride
    positions,  # [tokens], integer
    cos_sin,  # [max position, HEAD_DIM], any float type
    weight,  # [HEAD_DIM]; None for V, which does not rotate either
    output,  # [tokens, HEADS * HEAD_DIM], type of x
    unweighted,  # as output, gets the norm before weight and rotation; or None
    x_stride, cos_sin_stride, output_stride, unweighted_stride,
    eps,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS (token, head) rows out of the HEADS heads that start at head FIRST."""
    HALF: tl.constexpr = HEAD_DIM // 2
    # Weights, cos and sin are loaded as whole tiles (repeats come from L1): a tile of one row
    # would get a layout of its own and reach the other rows through shared memory.
    columns = tl.broadcast_to(vector_range(0, HALF, VECTOR)[None, :], [ROWS, HALF])
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    live = row < tokens * HEADS
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    source = x + token * x_stride + (FIRST + head) * HEAD_DIM + columns  # [ROWS, HALF]
    x1 = tl.load(source, mask=live, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    squares = tl.sum(x1 * x1 + x2 * x2, axis=1, keep_dims=True)
    n1 = rms_normalised(x1, squares, HEAD_DIM, eps, x)
    n2 = rms_normalised(x2, squares, HEAD_DIM, eps, x)
    target = output + token * output_stride + head * HEAD_DIM + columns
    if weight is None:
        tl.store(target, n1.to(x.dtype.element_ty), mask=live)
        tl.store(target + HALF, n2.to(x.dtype.element_ty), mask=live)
    else:
        # Pairs that do not turn get cos 1 and sin 0, which is exact.
        position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
        table = cos_sin + position * cos_sin_stride + columns
        turns = live & (columns < PAIRS)
        cos = tl.load(table, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(table + HALF, mask=turns, other=0.0).to(tl.float32)
        y1 = rounded(n1 * tl.load(weight + columns).to(tl.float32), x)
        y2 = rounded(n2 * tl.load(weight + HALF + columns).to(tl.float32), x)
        tl.store(target, (y1 * cos - y2 * sin).to(x.dtype.element_ty), mask=live)
        tl.store(target + HALF, (y2 * cos + y1 * sin).to(x.dtype.element_ty), mask=live)
    if unweighted is not None:
        target = unweighted + token * unweighted_stride + head * HEAD_DIM + columns
        tl.store(target, n1.to(x.dtype.element_ty), mask=live)
        tl.store(target + HALF, n2.to(x.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    qkv,  # [tokens, >= heads read * HEAD_DIM], row stride qkv_stride
    positions,  # [tokens], integer
    cos_sin,  # [max position, HEAD_DIM], any float type
    q_weight, k_weight,  # [HEAD_DIM], k_weight None without K
    q_out,  # [tokens, QUERY_HEADS * HEAD_DIM], type of qkv
    k_out, v_out,  # [tokens, KV_HEADS * HEAD_DIM] or None
    tokens,
    qkv_stride, cos_sin_stride, q_stride, k_stride, v_stride,
    eps,
    HEAD_DIM: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SECTIONS: tl.constexpr,  # 0 Q only; 1 Q and K, with V from K; 2 Q, K and V
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    # Grid: (tiles of ROWS rows of Q, then of K, then of V,) or fewer programs, which stride.
    q_tiles = tl.cdiv(tokens * QUERY_HEADS, ROWS)
    k_tiles = tl.cdiv(tokens * KV_HEADS, ROWS)
    tiles = q_tiles + SECTIONS * k_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        if tile < q_tiles:
            _heads(
                tile, tokens, qkv, positions, cos_sin, q_weight, q_out, None,
                qkv_stride, cos_sin_stride, q_stride, 0, eps,
                HEAD_DIM, 0, QUERY_HEADS, PAIRS, ROWS, VECTOR,
            )  # fmt: skip
        elif SECTIONS == 1:
            _heads(
                tile - q_tiles, tokens, qkv, positions, cos_sin, k_weight, k_out, v_out,
                qkv_stride, cos_sin_stride, k_stride, v_stride, eps,
                HEAD_DIM, QUERY_HEADS, KV_HEADS, PAIRS, ROWS, VECTOR,
            )  # fmt: skip
        elif SECTIONS == 2:
            if tile < q_tiles + k_tiles:
                _heads(
                    tile - q_tiles, tokens, qkv, positions, cos_sin, k_weight, k_out, None,
                    qkv_stride, cos_sin_stride, k_stride, 0, eps,
                    HEAD_DIM, QUERY_HEADS, KV_HEADS, PAIRS, ROWS, VECTOR,
                )  # fmt: skip
            else:
                _heads(
                    tile - q_tiles - k_tiles, tokens, qkv, positions, cos_sin, None, v_out, None,
                    qkv_stride, cos_sin_stride, v_stride, 0, eps,
                    HEAD_DIM, QUERY_HEADS + KV_HEADS, KV_HEADS, PAIRS, ROWS, VECTOR,
                )  # fmt: skip


def _wrong(name: str, found: object, wanted: object) -> ValueError:
    return ValueError(f"qkv_norm_rope: {name} is {found}, wanted {wanted}")


def _check(inputs: QkvNormRopeInputs) -> None:
    """ValueError naming the first operand that does not fit the others."""
    if inputs.kv not in SECTIONS:
        raise _wrong("kv", repr(inputs.kv), f"one of {', '.join(SECTIONS)}")
    if inputs.qkv.dim() != 2 or inputs.q_weight.dim() != 1:
        raise _wrong("qkv, q_weight", "not 2-D, 1-D", "[tokens, columns], [head_dim]")
    tokens, columns = inputs.qkv.shape
    (head_dim,) = inputs.q_weight.shape
    if head_dim < 4 or head_dim & (head_dim - 1):
        raise _wrong("head_dim (length of q_weight)", head_dim, "a power of two, at least 4")
    if not 0 <= inputs.rotary_pairs <= head_dim // 2:
        raise _wrong("rotary_pairs", inputs.rotary_pairs, f"0 to {head_dim // 2}")
    sections = SECTIONS[inputs.kv]
    heads = inputs.query_heads + sections * inputs.kv_heads
    if columns < heads * head_dim:
        raise _wrong("columns of qkv", columns, f"at least {heads} heads x {head_dim}")
    q_columns, kv_columns = inputs.query_heads * head_dim, inputs.kv_heads * head_dim
    shapes: dict[str, tuple[int, ...] | None] = {
        "positions": (tokens,),
        "cos_sin": (*inputs.cos_sin.shape[:1], head_dim),
        "k_weight": (head_dim,) if sections else None,
        "q_out": (tokens, q_columns),
        "k_out": (tokens, kv_columns) if sections else None,
        "v_out": (tokens, kv_columns) if sections else None,
    }
    for name, shape in shapes.items():
        tensor = getattr(inputs, name)
        found = None if tensor is None else tuple(tensor.shape)
        if found != shape:
            raise _wrong(name, found, shape)
    for name, tensor in {**inputs.operands(), **inputs.outputs()}.items():
        if tensor.stride(-1) != 1 and tensor.numel() > 1:
            raise _wrong(f"strides of {name}", tensor.stride(), "contiguous elements in a row")
        if name == "positions":
            if tensor.dtype not in (torch.int64, torch.int32):
                raise _wrong("dtype of positions", tensor.dtype, "torch.int64")
        elif name == "cos_sin":
            if not tensor.is_floating_point():
                raise _wrong("dtype of cos_sin", tensor.dtype, "a floating-point type")
        elif tensor.dtype != inputs.qkv.dtype:
            raise _wrong(f"dtype of {name}", tensor.dtype, f"{inputs.qkv.dtype} as qkv")


def tile_count(tokens: int, query_heads: int, kv_heads: int, kv: str, rows: int) -> int:
    """Tiles of ``rows`` rows: those of Q, of K and of V are tiled apart."""
    return -(-tokens * query_heads // rows) + SECTIONS[kv] * -(-tokens * kv_heads // rows)


def calls(inputs: QkvNormRopeInputs, config: Config) -> list[KernelCall]:
    """The launch for these inputs; ValueError when the operands do not fit together."""
    _check(inputs)
    tokens = inputs.qkv.shape[0]
    sections = SECTIONS[inputs.kv]
    heads = inputs.query_heads + sections * inputs.kv_heads
    if tokens * heads > MAX_TOKEN_HEADS:
        raise _wrong("tokens x heads", f"{tokens} x {heads}", f"at most {MAX_TOKEN_HEADS}")
    args = {
        "qkv": inputs.qkv,
        "positions": inputs.positions,
        "cos_sin": inputs.cos_sin,
        "q_weight": inputs.q_weight,
        "k_weight": inputs.k_weight,
        "q_out": inputs.q_out,
        "k_out": inputs.k_out,
        "v_out": inputs.v_out,
        "tokens": tokens,
        "qkv_stride": inputs.qkv.stride(0),
        "cos_sin_stride": inputs.cos_sin.stride(0),
        "q_stride": 0 if inputs.q_out is None else inputs.q_out.stride(0),
        "k_stride": 0 if inputs.k_out is None else inputs.k_out.stride(0),
        "v_stride": 0 if inputs.v_out is None else inputs.v_out.stride(0),
        "eps": inputs.eps,
        "HEAD_DIM": inputs.q_weight.shape[0],
        "QUERY_HEADS": inputs.query_heads,
        "KV_HEADS": inputs.kv_heads if sections else 0,
        "SECTIONS": sections,
        "PAIRS": inputs.rotary_pairs,
        "ROWS": config.rows,
        "VECTOR": config.vector,
    }
    tiles = tile_count(tokens, inputs.query_heads, inputs.kv_heads, inputs.kv, config.rows)
    grid = tile_grid(tiles, config.programs_per_sm, inputs.qkv)
    return [KernelCall(_kernel, grid, args, num_warps=config.num_warps)]


def reference(inputs: QkvNormRopeInputs) -> dict[str, torch.Tensor]:
    """Plain PyTorch in the inputs' dtype: what vLLM's native layer computes.

    Source: vLLM 0.26, ``Gemma4Attention.forward`` and ``rotary_embedding/common.py``.
    """
    tokens = inputs.qkv.shape[0]
    head_dim = inputs.q_weight.shape[0]
    cos_sin = inputs.cos_sin.index_select(0, inputs.positions).to(inputs.qkv.dtype)
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)

    def part(first: int, heads: int) -> torch.Tensor:
        columns = inputs.qkv[:, first * head_dim : (first + heads) * head_dim]
        return columns.reshape(tokens, heads, head_dim)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(1)

    query_heads, kv_heads = inputs.query_heads, inputs.kv_heads
    q = part(0, query_heads)
    results = {"q_out": rotated(rms_norm(q, inputs.q_weight, inputs.eps))}
    if inputs.kv != "shared":
        k = part(query_heads, kv_heads)
        v = k if inputs.kv == "k_eq_v" else part(query_heads + kv_heads, kv_heads)
        results["k_out"] = rotated(rms_norm(k, inputs.k_weight, inputs.eps))
        results["v_out"] = rms_norm(v, None, inputs.eps).flatten(1)
    return results


def rope_cache(
    head_dim: int,
    rotary_pairs: int,
    theta: float,
    max_position: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Gemma 4's cos/sin cache [max_position, head_dim]: angle = position * theta^(-2i / head_dim).

    The exponent's denominator is ``head_dim`` also when fewer pairs rotate ("proportional"); the
    others have frequency zero.  Source: vLLM 0.26, ``rotary_embedding/gemma4_rope.py``.
    """
    pair = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    frequency = torch.where(pair < rotary_pairs, 1.0 / theta ** (2.0 * pair / head_dim), 0.0)
    angle = torch.arange(max_position, dtype=torch.float32, device=device)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), -1).to(dtype)


def make_inputs(
    problem: Problem, seed: int, device: torch.device, pad: int = 0
) -> QkvNormRopeInputs:
    """Random inputs; a row of ``qkv`` has V columns unless ``k_eq_v``, also when only Q is read."""
    dtype, draw = DTYPES[problem.dtype], generator(seed, device)
    tokens, head_dim = problem.tokens, problem.head_dim
    q_columns, kv_columns = problem.query_heads * head_dim, problem.kv_heads * head_dim
    has_kv = problem.kv != "shared"
    width = q_columns + kv_columns * (1 if problem.kv == "k_eq_v" else 2)

    def weight() -> torch.Tensor:
        return scaled_randn((head_dim,), dtype, device, draw, 0.3, 1.0)

    def output(columns: int) -> torch.Tensor:
        return empty_rows(tokens, columns, dtype, device, pad)

    if device.type == "meta":
        positions = torch.empty(tokens, dtype=torch.int64, device=device)
    else:
        positions = torch.randint(MAX_POSITION, (tokens,), generator=draw, device=device)
    theta = 1e4 if problem.rotary_pairs == head_dim // 2 else 1e6
    cos_sin = empty_rows(MAX_POSITION, head_dim, dtype, device, pad)
    if device.type != "meta":
        cos_sin.copy_(
            rope_cache(head_dim, problem.rotary_pairs, theta, MAX_POSITION, dtype, device)
        )
    return QkvNormRopeInputs(
        qkv=randn_rows(tokens, width, dtype, device, draw, pad, 2.0),
        positions=positions,
        cos_sin=cos_sin,
        q_weight=weight(),
        k_weight=weight() if has_kv else None,
        query_heads=problem.query_heads,
        kv_heads=problem.kv_heads,
        kv=problem.kv,
        rotary_pairs=problem.rotary_pairs,
        q_out=output(q_columns),
        k_out=output(kv_columns) if has_kv else None,
        v_out=output(kv_columns) if has_kv else None,
    )


def problems(model: ModelShape, tokens: Sequence[int]) -> list[Problem]:
    """One per distinct kind of attention layer."""
    kinds = dict.fromkeys(
        (
            layer.query_heads,
            layer.kv_heads,
            layer.head_dim,
            "shared" if layer.kv_shared else "k_eq_v" if layer.k_eq_v else "separate",
            layer.rotary_pairs,
        )
        for layer in model.layers
    )
    return [Problem(count, *kind, dtype=model.dtype) for kind in kinds for count in tokens]


def default(problem: Problem, device: DeviceInfo) -> Config:
    """One 16-byte access a thread and half head, 4 warps; smaller tiles where SMs would idle."""
    half = problem.head_dim // 2
    vector = min(16 // DTYPES[problem.dtype].itemsize, half)
    warps, rows = 4, max(1, 4 * 32 * vector // half)
    while rows > 1 and problem.tokens * problem.heads < rows * device.sms:
        rows //= 2
    while warps > 1 and rows * half < 32 * warps * vector:
        warps //= 2
    return Config(
        rows=rows,
        vector=min(vector, max(1, rows * half // (32 * warps))),
        programs_per_sm=0,
        num_warps=warps,
    )


def cost(problem: Problem) -> Cost:
    """Heads read and written, cos and sin once a token, weights once.

    About 4 FLOP a value for norm and weight, 3 for the rotation.
    """
    size = DTYPES[problem.dtype].itemsize
    roped = problem.query_heads + (problem.kv_heads if problem.kv != "shared" else 0)
    written = roped + (problem.kv_heads if problem.kv != "shared" else 0)
    values = (problem.heads + written) * problem.head_dim
    per_token = size * (values + 2 * problem.rotary_pairs) + torch.int64.itemsize
    weights = size * problem.head_dim * (2 if problem.kv != "shared" else 1)
    return Cost(
        bytes=problem.tokens * per_token + weights,
        flops=problem.tokens * (4 * written * problem.head_dim + 6 * roped * problem.rotary_pairs),
    )


def describe(problem: Problem) -> str:
    """Short name for tables and logs, without the token count."""
    kv = {
        "separate": f" + {problem.kv_heads} K + {problem.kv_heads} V",
        "k_eq_v": f" + {problem.kv_heads} K=V",
        "shared": " only",
    }[problem.kv]
    partial = problem.rotary_pairs != problem.head_dim // 2
    pairs = f", {problem.rotary_pairs} pairs rotate" if partial else ""
    return f"head {problem.head_dim}: {problem.query_heads} Q{kv}{pairs}"


TEMPLATE = KernelTemplate(
    name="qkv_norm_rope",
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
