"""Decode: causal grouped-query attention of a few queries a sequence, keys split over programs.

The mathematics is that of ``attention_common``, the operands are those of ``attention_problem``.

A program takes the queries of one sequence and one KV head and one of ``splits`` even shares of the
keys that they see.  With one split it writes the result; with more it writes the share's
unnormalised sum, maximum and total to scratch, and a second kernel combines the shares::

    o = sum_i w_i sum_i' / sum_i w_i total_i        w_i = 2^(maximum_i - max_i maximum_i)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .attention_common import LOG2_E, attend, first_key
from .attention_limits import MOST_SPILL, fitting
from .attention_problem import (
    AttentionInputs,
    Problem,
    attention,
    check,
    describe,
    draw_inputs,
    operand_args,
    problem_kinds,
    work,
    wrong,
)
from .base import (
    DTYPES,
    Cost,
    DeviceInfo,
    KernelCall,
    KernelTemplate,
    ModelShape,
    TileWork,
    scratch,
)
from .common import next_power_of_2

#: Batches of more tokens are prefill's.
MOST_TOKENS = 256

#: Old keys of a sequence in the problems of a model.
CONTEXTS = (4096,)

SPLITS = (1, 2, 4, 8, 16, 32, 64)

#: Shares of all sequences together: beyond it every GPU is full, and scratch only grows.
MOST_SHARES = 2048

#: vLLM splits where sequences x KV heads are at most this (``MIN_LAUNCH_GRID_SIZE_2D``), into
#: ``NUM_PAR_SOFTMAX_SEGMENTS`` shares.
STOCK_PROGRAMS, STOCK_SPLITS = 128, 16


@dataclass(frozen=True)
class Config:
    """What may vary.

    ``tile`` keys at a time; ``splits`` shares of a sequence's keys; ``num_stages`` of the loop over
    keys, as Triton counts them.
    """

    tile: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass
class DecodeInputs(AttentionInputs):
    """As :class:`AttentionInputs`, and scratch of at least :func:`scratch_sizes` float32 elements:
    ``part_sum`` holds a row of head dim, ``part_maximum, part_total`` one value per sequence, KV
    head, share and row.  None where every launch has one split."""

    part_sum: torch.Tensor | None = scratch()
    part_maximum: torch.Tensor | None = scratch()
    part_total: torch.Tensor | None = scratch()


@triton.jit(do_not_specialize=["table_stride"])
def _split_kernel(
    q,  # [tokens, QUERY_HEADS, HEAD_DIM]
    keys, values,  # [blocks, BLOCK_SIZE, KV heads, HEAD_DIM], type of q or fp8
    block_table,  # [sequences, blocks of a sequence], int32
    starts,  # [sequences + 1], int32
    lengths,  # [sequences], int32
    k_scale, v_scale,  # one float32 element, or None
    attended,  # [tokens, QUERY_HEADS, HEAD_DIM], type of q
    part_sum,  # [sequences, KV heads, SPLITS, ROWS, HEAD_DIM] float32, or None with one split
    part_maximum, part_total,  # [sequences, KV heads, SPLITS, ROWS] float32, or None
    q_stride, q_head_stride,
    key_block_stride, key_slot_stride, key_head_stride,
    value_block_stride, value_slot_stride, value_head_stride,
    table_stride,
    out_stride, out_head_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,  # (query, query head) pairs of a KV head, at most
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    # Grid: (sequences, KV heads x tiles of BLOCK_M rows, SPLITS).
    ROW_TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    sequence, split = tl.program_id(0), tl.program_id(2)
    kv_head = tl.program_id(1) // ROW_TILES
    kv_heads = tl.num_programs(1) // ROW_TILES
    begin = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - begin
    if new <= 0:
        return
    length = tl.load(lengths + sequence)
    context = length - new
    rows = tl.program_id(1) % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    live = query < new
    low = first_key(context, WINDOW) // TILE * TILE
    # Even shares of whole tiles; late ones may be empty.
    share = tl.cdiv(tl.cdiv(length - low, TILE), SPLITS) * TILE
    low += split * share
    high = tl.minimum(low + share, tl.cdiv(length, TILE) * TILE)
    part = ((sequence.to(tl.int64) * kv_heads + kv_head) * SPLITS + split) * ROWS + rows
    if SPLITS > 1:  # noqa: SIM102 (a constant, and a value of the device)
        if low >= high:
            # All that the second kernel asks of an empty share.
            tl.store(part_maximum + part, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=live)
            return
    head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    columns = tl.arange(0, HEAD_DIM)[None, :]
    token = (begin + query).to(tl.int64)
    q_at = q + (token * q_stride + head * q_head_stride)[:, None] + columns
    tile_q = tl.load(q_at, mask=live[:, None], other=0.0)  # [BLOCK_M, HEAD_DIM]
    qk_scale = scale * LOG2_E
    if k_scale is not None:
        qk_scale = qk_scale * tl.load(k_scale)
    accumulator, maximum, total = attend(
        tile_q, context + query, context, length - 1,
        keys + kv_head.to(tl.int64) * key_head_stride,
        values + kv_head.to(tl.int64) * value_head_stride,
        block_table + sequence.to(tl.int64) * table_stride,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        None, None, 0, 0, 0, 0,
        low, high, length, qk_scale,
        HEAD_DIM, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_M, TILE, True,
    )  # fmt: skip
    if SPLITS == 1:
        accumulator = accumulator / total[:, None]
        if v_scale is not None:
            accumulator = accumulator * tl.load(v_scale)
        out_at = attended + (token * out_stride + head * out_head_stride)[:, None] + columns
        tl.store(out_at, accumulator.to(attended.dtype.element_ty), mask=live[:, None])
    else:
        tl.store(part_sum + part[:, None] * HEAD_DIM + columns, accumulator, mask=live[:, None])
        tl.store(part_maximum + part, maximum, mask=live)
        tl.store(part_total + part, total, mask=live)


@triton.jit
def _combine_kernel(
    part_sum,  # [sequences, KV heads, SPLITS, ROWS, HEAD_DIM] float32
    part_maximum, part_total,  # [sequences, KV heads, SPLITS, ROWS] float32
    starts,  # [sequences + 1], int32
    v_scale,  # one float32 element, or None
    attended,  # [tokens, QUERY_HEADS, HEAD_DIM]
    out_stride, out_head_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    # Grid: (sequences, KV heads, ROWS): one row of one sequence and KV head each.
    sequence, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + sequence)
    query = row // GROUP
    if query >= tl.load(starts + sequence + 1) - begin:
        return
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, HEAD_DIM)
    share = (sequence.to(tl.int64) * tl.num_programs(1) + kv_head) * SPLITS + splits
    part = share * ROWS + row
    maximum = tl.load(part_maximum + part)
    # Of a share that saw no key nothing else was written.  The newest key is seen, so one share at
    # least has a finite maximum.
    used = maximum > float("-inf")
    weight = tl.math.exp2(maximum - tl.max(maximum, 0))
    total = tl.sum(tl.load(part_total + part, mask=used, other=0.0) * weight, 0)
    at = part_sum + part[:, None] * HEAD_DIM + columns[None, :]
    sums = tl.load(at, mask=used[:, None], other=0.0)  # [SPLITS, HEAD_DIM]
    result = tl.sum(sums * weight[:, None], 0) / total
    if v_scale is not None:
        result = result * tl.load(v_scale)
    token = (begin + query).to(tl.int64)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    out_at = attended + token * out_stride + head * out_head_stride + columns
    tl.store(out_at, result.to(attended.dtype.element_ty))


def rows_per_program(rows: int, head_dim: int) -> int:
    """Rows of a program's tile: all of a KV head's, up to what registers hold; 16 at least, as
    matrix instructions want it."""
    return max(16, min(next_power_of_2(rows), 64 if head_dim > 256 else 128))


def scratch_sizes(
    sequences: int, query_heads: int, max_new: int, head_dim: int, splits: int
) -> tuple[int, int]:
    """Elements of ``part_sum``, and of ``part_maximum`` and ``part_total`` each."""
    rows = sequences * query_heads * max_new * splits if splits > 1 else 0
    return rows * head_dim, rows


def most_splits(sequences: int) -> int:
    """The largest number of splits for so many sequences: a power of two."""
    shares = max(1, MOST_SHARES // sequences)
    return min(SPLITS[-1], 1 << (shares.bit_length() - 1))


def calls(inputs: DecodeInputs, config: Config) -> list[KernelCall]:
    """The launches for these inputs; ValueError when the operands do not fit together."""
    check(inputs)
    tokens, heads, head_dim = inputs.q.shape
    sequences, kv_heads = inputs.lengths.shape[0], inputs.keys.shape[2]
    rows = heads // kv_heads * inputs.max_new
    parts: dict[str, torch.Tensor | None] = inputs.scratches() if config.splits > 1 else {}
    sizes = scratch_sizes(sequences, heads, inputs.max_new, head_dim, config.splits)
    for name, size in (
        ("part_sum", sizes[0]),
        ("part_maximum", sizes[1]),
        ("part_total", sizes[1]),
    ):
        tensor = parts.setdefault(name, None)
        found = 0 if tensor is None else tensor.numel() * tensor.is_contiguous()
        if found < size:
            raise wrong(f"elements of {name}", found, f"{size} for {config.splits} splits")
    block_m = rows_per_program(rows, head_dim)
    args = {
        **operand_args(inputs),
        **parts,
        "ROWS": rows,
        "BLOCK_M": block_m,
        "TILE": config.tile,
        "SPLITS": config.splits,
    }
    grid = (sequences if tokens else 0, kv_heads * -(-rows // block_m), config.splits)
    launches = [KernelCall(_split_kernel, grid, args, config.num_warps, config.num_stages)]
    if config.splits > 1:
        taken = (*parts, "starts", "v_scale", "attended", "out_stride", "out_head_stride")
        combine = {name: args[name] for name in (*taken, "HEAD_DIM", "GROUP", "ROWS", "SPLITS")}
        launches.append(KernelCall(_combine_kernel, (grid[0], kv_heads, rows), combine, 4))
    return launches


def make_inputs(problem: Problem, seed: int, device: torch.device, pad: int = 0) -> DecodeInputs:
    """Random inputs, see :func:`draw_inputs`; scratch for the most splits of the space."""
    drawn = draw_inputs(problem, seed, device, pad)
    fields = {f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn)}
    splits = most_splits(problem.sequences)
    shape = (problem.sequences, problem.query_heads, problem.queries, problem.head_dim)
    sums, rows = scratch_sizes(*shape, splits)
    parts = [torch.empty(size, device=device).fill_(torch.nan) for size in (sums, rows, rows)]
    return DecodeInputs(**fields, part_sum=parts[0], part_maximum=parts[1], part_total=parts[2])


def problems(model: ModelShape, tokens: Sequence[int]) -> list[Problem]:
    """One per kind of attention layer, count of at most 256 tokens and context, a token a sequence.

    Larger counts are prefill's, unless only such are asked for.
    """
    counts = [count for count in tokens if count <= MOST_TOKENS] or tokens
    return [
        Problem(count, 1, context, **kind)  # type: ignore[arg-type]
        for kind in problem_kinds(model)
        for context in CONTEXTS
        for count in counts
    ]


def asked(problem: Problem) -> Problem:
    """The problem whose entry a server looks up: it does not know contexts when it captures a
    graph, so the tables have one for every count of sequences."""
    return dataclasses.replace(problem, queries=1, tokens=problem.sequences, context=CONTEXTS[0])


def stock_config(problem: Problem) -> Config:
    """The constants of vLLM's ``kernel_unified_attention``: few sequences split into 16 shares with
    tiles of 16 keys (32 of one byte), many unsplit with tiles of 32; Triton's own 4 warps and 3
    stages.  From 0.33 on drafts split too, as here."""
    if problem.sequences * problem.kv_heads > STOCK_PROGRAMS:
        return Config(tile=32, splits=1, num_warps=4, num_stages=3)
    tile = 16 if problem.cache_dtype.itemsize > 1 else 32
    return Config(tile, STOCK_SPLITS, num_warps=4, num_stages=3)


def default(problem: Problem, device: DeviceInfo) -> Config:
    """vLLM's constants; fewer stages, then a smaller tile, where shared memory is short."""
    stock = stock_config(problem)
    block_m = rows_per_program(problem.group * problem.queries, problem.head_dim)
    tile, warps, stages = fitting(
        problem, block_m, stock.tile, stock.num_warps, stock.num_stages, device
    )
    return Config(tile, stock.splits, warps, stages)


def cost(problem: Problem) -> Cost:
    """See :func:`work`; what splits write and read back is not counted."""
    return work(problem)


def tile_work(problem: Problem, config: Config) -> TileWork:
    """The tiles of keys of each share; what shares write and the second kernel reads."""
    rows, head_dim, tile = problem.group * problem.queries, problem.head_dim, config.tile
    block_m = rows_per_program(rows, head_dim)
    walkers = problem.sequences * problem.kv_heads * -(-rows // block_m)
    keys = problem.context + max(problem.new)
    tiles = -(-keys // tile) - problem.first(problem.context) // tile
    sums, _ = scratch_sizes(
        problem.sequences, problem.query_heads, problem.queries, head_dim, config.splits
    )
    return TileWork(
        programs=walkers * config.splits,
        steps=walkers * tiles,
        longest=-(-tiles // config.splits),
        step_bytes=2 * tile * head_dim * problem.cache_dtype.itemsize,
        step_flops=4 * block_m * tile * head_dim,
        program_bytes=2 * block_m * head_dim * DTYPES[problem.dtype].itemsize,
        rows=block_m,
        pipelined=config.num_stages > 1,
        scratch_bytes=8 * sums if config.splits > 1 else 0,
    )


TEMPLATE = KernelTemplate(
    name="attention_decode",
    problem=Problem,
    config=Config,
    calls=calls,
    reference=attention,
    make_inputs=make_inputs,
    problems=problems,
    default=default,
    cost=cost,
    describe=describe,
    same_kernel=("tokens", "context"),
    stock_config=stock_config,
    most_spill=MOST_SPILL,
    tile_work=tile_work,
    served=(1, MOST_TOKENS),
    preview=True,
)
