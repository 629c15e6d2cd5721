"""Causal grouped-query attention over a paged KV cache, for prefill and mixed batches.

The mathematics is that of ``attention_common``, the operands are those of ``attention_problem``.

A tile is ``block_m`` rows: the query heads of one KV head beside each other, for ``block_m`` /
(query heads per KV head) consecutive queries, so that one K and V tile serves them all.  Keys
outside the windows of all rows are not visited.  Programs begin with the last queries, which see
most keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

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
    stride,
    work,
    wrong,
)
from .base import DTYPES, Cost, DeviceInfo, KernelCall, KernelTemplate, ModelShape, TileWork
from .common import next_power_of_2

#: Batches of fewer tokens are decode's.
LEAST_TOKENS = 64

#: New tokens of a sequence in the problems of a model.
QUERIES = 1024


@dataclass(frozen=True)
class Config:
    """What may vary.

    ``block_m`` rows and ``tile`` keys at a time.  ``parts`` programs share the columns of V, each
    with all of the scores: more arithmetic for a smaller accumulator.  ``edges_apart`` masks only
    the tiles at the edges of what the rows see, in loops of their own.  ``descriptors`` lets the
    GPU's copy engine (TMA) fetch the other tiles of K and V, where a block holds whole tiles.
    ``num_stages`` of the loops over keys, as Triton counts them.
    """

    block_m: int
    tile: int
    parts: int
    edges_apart: bool
    descriptors: bool
    num_warps: int
    num_stages: int


@triton.jit
def find_sequence(starts, tile, sequences, BLOCK_Q: tl.constexpr):
    """The sequence of a tile, where sequence s begins at tile ``starts[s] // BLOCK_Q + s``."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def _kernel(
    q,  # [tokens, QUERY_HEADS, HEAD_DIM]
    keys, values,  # [blocks, BLOCK_SIZE, KV heads, HEAD_DIM], type of q or fp8
    block_table,  # [sequences, blocks of a sequence], int32
    starts,  # [sequences + 1], int32
    lengths,  # [sequences], int32
    k_scale, v_scale,  # one float32 element, or None
    attended,  # [tokens, QUERY_HEADS, HEAD_DIM], type of q
    key_rows, value_rows,  # descriptors of K and V as rows of slots, tiles of TILE rows, or None
    sequences,
    q_stride, q_head_stride,
    key_block_stride, key_slot_stride, key_head_stride,
    value_block_stride, value_slot_stride, value_head_stride,
    table_stride,
    out_stride, out_head_stride,
    block_rows, head_rows, head_columns,  # steps from block to block and head to head of key_rows
    scale,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    EDGES_APART: tl.constexpr,
):  # fmt: skip
    # Grid: (at most tokens // BLOCK_Q + sequences tiles of queries, KV heads x PARTS).
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    VALUE_DIM: tl.constexpr = HEAD_DIM // PARTS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    value_column = tl.program_id(1) % PARTS * VALUE_DIM
    sequence = find_sequence(starts, tile, sequences, BLOCK_Q)
    begin = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - begin
    first = (tile - (begin // BLOCK_Q + sequence)) * BLOCK_Q
    if first >= new:
        return
    length = tl.load(lengths + sequence)
    context = length - new

    rows = tl.arange(0, BLOCK_M)
    query = first + rows // GROUP
    head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    live = (query < new) & (rows < BLOCK_Q * GROUP)
    columns = tl.arange(0, HEAD_DIM)[None, :]
    token = (begin + query).to(tl.int64)
    q_at = q + (token * q_stride + head * q_head_stride)[:, None] + columns
    tile_q = tl.load(q_at, mask=live[:, None], other=0.0)  # [BLOCK_M, HEAD_DIM]

    lowest = context + first  # positions of the first and the last query
    highest = context + tl.minimum(first + BLOCK_Q, new) - 1
    low = first_key(lowest, WINDOW) // TILE * TILE
    high = tl.cdiv(highest + 1, TILE) * TILE
    qk_scale = scale * LOG2_E
    if k_scale is not None:
        qk_scale = qk_scale * tl.load(k_scale)
    accumulator, _, total = attend(
        tile_q, context + query, lowest, highest,
        keys + kv_head.to(tl.int64) * key_head_stride,
        values + kv_head.to(tl.int64) * value_head_stride + value_column,
        block_table + sequence.to(tl.int64) * table_stride,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        key_rows, value_rows, block_rows, kv_head * head_rows,
        kv_head * head_columns, kv_head * head_columns + value_column,
        low, high, length, qk_scale,
        HEAD_DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_M, TILE, EDGES_APART,
    )  # fmt: skip
    if v_scale is not None:
        accumulator = accumulator * tl.load(v_scale)
    accumulator = accumulator / total[:, None]
    out_at = attended + (token * out_stride + head * out_head_stride)[:, None]
    out_at += value_column + tl.arange(0, VALUE_DIM)[None, :]
    tl.store(out_at, accumulator.to(attended.dtype.element_ty), mask=live[:, None])


def calls(inputs: AttentionInputs, config: Config) -> list[KernelCall]:
    """The launch for these inputs; ValueError when the operands do not fit together.

    A cache that descriptors cannot describe is read by pointers.
    """
    check(inputs)
    tokens, heads, head_dim = inputs.q.shape
    sequences, kv_heads = inputs.lengths.shape[0], inputs.keys.shape[2]
    group = heads // kv_heads
    if config.block_m < group:
        raise wrong("block_m", config.block_m, f"at least {group} query heads per KV head")
    if config.parts < 1 or head_dim % (16 * config.parts):
        raise wrong("parts", config.parts, f"parts of {head_dim} columns, of 16 at least")
    rows = None
    if config.descriptors and config.edges_apart:
        rows = described(inputs, config.tile, head_dim // config.parts)
    args = {
        **operand_args(inputs),
        **(rows or dict.fromkeys(("key_rows", "value_rows"))),
        **({} if rows else dict.fromkeys(("block_rows", "head_rows", "head_columns"), 0)),
        "sequences": sequences,
        "BLOCK_M": config.block_m,
        "TILE": config.tile,
        "PARTS": config.parts,
        "EDGES_APART": config.edges_apart,
    }
    tiles = tokens // (config.block_m // group) + sequences if tokens else 0
    grid = (tiles, kv_heads * config.parts)
    return [KernelCall(_kernel, grid, args, config.num_warps, config.num_stages)]


def described(inputs: AttentionInputs, tile: int, value_dim: int) -> dict[str, object] | None:
    """Descriptors of K and V as rows of slots, and how rows follow from block, head and slot.

    None where the memory is no such matrix: a block holds no whole number of tiles, K and V differ
    in strides or from q in type, a stride is no multiple of the slots' or of 16 bytes.
    """
    keys, values = inputs.keys, inputs.values
    blocks, slots, kv_heads, head_dim = keys.shape
    steps = [stride(keys, dimension) for dimension in range(3)]
    block_step, row, head_step = steps
    size = keys.element_size()
    if (
        slots % tile
        or keys.dtype != inputs.q.dtype
        or steps != [stride(values, dimension) for dimension in range(3)]
        or row < head_dim
        or block_step % row
        or any(step * size % 16 for step in (row, head_step))
        or any(tensor.data_ptr() % 16 for tensor in (keys, values))
    ):
        return None
    in_columns = head_step * (kv_heads - 1) + head_dim <= row
    if not in_columns and head_step % row:
        return None
    block_rows = block_step // row
    head_rows, head_columns = (0, head_step) if in_columns else (head_step // row, 0)
    height = (blocks - 1) * block_rows + (kv_heads - 1) * head_rows + slots
    width = (kv_heads - 1) * head_columns + head_dim
    if not keys.numel() or max(height, width) >= 2**31:
        return None
    return {
        "key_rows": TensorDescriptor(keys, [height, width], [row, 1], [tile, head_dim]),
        "value_rows": TensorDescriptor(values, [height, width], [row, 1], [tile, value_dim]),
        "block_rows": block_rows,
        "head_rows": head_rows,
        "head_columns": head_columns,
    }


def least_block_m(group: int) -> int:
    """The smallest tile of rows: one query's heads, and 16 at least, for matrix instructions."""
    return max(16, next_power_of_2(group))


def make_inputs(problem: Problem, seed: int, device: torch.device, pad: int = 0) -> AttentionInputs:
    """Random inputs, see :func:`draw_inputs`."""
    return draw_inputs(problem, seed, device, pad)


def problems(model: ModelShape, tokens: Sequence[int]) -> list[Problem]:
    """One per kind of attention layer and count of at least 64 tokens, in prompts of 1024.

    Smaller counts are decode's, unless only such are asked for.
    """
    counts = [count for count in tokens if count >= LEAST_TOKENS] or tokens
    return [
        Problem(count, QUERIES, 0, **kind)  # type: ignore[arg-type]
        for kind in problem_kinds(model)
        for count in counts
    ]


def asked(problem: Problem) -> Problem:
    """The problem whose entry a server looks up: it does not know lengths when it captures a graph,
    so the tables have one kind of batch for every count of tokens."""
    return dataclasses.replace(problem, queries=QUERIES, context=0)


def stock_config(problem: Problem) -> Config:
    """The constants of vLLM's ``kernel_unified_attention`` (0.26 to 0.33, all head sizes): BLOCK_M
    16, or the group's next power of two; tile 32; Triton's own 4 warps and 3 stages."""
    return Config(least_block_m(problem.group), 32, 1, True, False, 4, 3)


def default(problem: Problem, device: DeviceInfo) -> Config:
    """vLLM's constants; fewer stages, then a smaller tile, where shared memory is short."""
    stock = stock_config(problem)
    tile, warps, stages = fitting(
        problem, stock.block_m, stock.tile, stock.num_warps, stock.num_stages, device
    )
    return dataclasses.replace(stock, tile=tile, num_warps=warps, num_stages=stages)


def cost(problem: Problem) -> Cost:
    """See :func:`work`."""
    return work(problem)


def tile_work(problem: Problem, config: Config) -> TileWork:
    """The tiles of keys that each tile of queries walks through; scores once for each part."""
    block_q, tile = config.block_m // problem.group, config.tile
    programs = steps = longest = 0
    for new in set(problem.new):
        sequences = problem.new.count(new)
        for first in range(0, new, block_q):
            lowest = problem.context + first
            highest = problem.context + min(first + block_q, new) - 1
            walked = -(-(highest + 1) // tile) - problem.first(lowest) // tile
            programs, steps = programs + sequences, steps + sequences * walked
            longest = max(longest, walked)
    copies, value_dim = problem.kv_heads * config.parts, problem.head_dim // config.parts
    columns = problem.head_dim + value_dim
    return TileWork(
        programs=programs * copies,
        steps=steps * copies,
        longest=longest,
        step_bytes=tile * columns * problem.cache_dtype.itemsize,
        step_flops=2 * config.block_m * tile * columns,
        program_bytes=config.block_m * columns * DTYPES[problem.dtype].itemsize,
        rows=config.block_m,
        pipelined=config.num_stages > 1,
    )


TEMPLATE = KernelTemplate(
    name="attention_prefill",
    problem=Problem,
    config=Config,
    calls=calls,
    reference=attention,
    make_inputs=make_inputs,
    problems=problems,
    default=default,
    cost=cost,
    describe=describe,
    same_kernel=("tokens", "queries", "context"),
    stock_config=stock_config,
    most_spill=MOST_SPILL,
    tile_work=tile_work,
    served=(LEAST_TOKENS, None),
    preview=True,
)
