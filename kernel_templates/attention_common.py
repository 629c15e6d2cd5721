"""What attention's prefill and decode kernels share on the device: the walk over a range of keys.

Mathematics, for query row i of a sequence with ``new`` queries and ``length`` keys, head h, its KV
head g = h // (query heads / KV heads)::

    p     = length - new + i                          the query's position
    s_j   = scale * q_i . k_j                         keys j with max(0, p - window + 1) <= j <= p
    s_j   = softcap * tanh(s_j / softcap)             if there is a softcap
    o_i   = sum_j softmax(s)_j v_j

``window`` counts the query's own position; 0 means none (full attention).  K and V of position j of
a sequence lie in slot ``j % block size`` of block ``block_table[sequence, j // block size]``.

Scores, softmax and sums are float32; probabilities are rounded to the type of Q before they meet V,
as in every flash kernel.  An fp8 cache holds ``k / k_scale`` and ``v / v_scale``; K and V are
widened to the type of Q, and the scales are applied to scores and outputs.

The problem, the operands and the reference are in ``attention_problem``.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(q, k, qk_scale, SOFTCAP: tl.constexpr):
    """Scores, [BLOCK_M, TILE], and the factor that takes them to units of log2.

    ``qk_scale`` is the scale times log2(e).
    """
    s = tl.dot(q, tl.trans(k))
    unit = qk_scale
    if SOFTCAP > 0:
        # tanh by exp2: for large arguments e is inf and the quotient 0, so tanh is 1.
        s = s * qk_scale
        e = tl.math.exp2(tl.abs(s) * (2.0 / SOFTCAP))
        t = (1.0 - 2.0 / (e + 1.0)) * (SOFTCAP * LOG2_E)
        s = tl.where(s < 0, -t, t)
        unit = 1.0
    return s, unit


@triton.jit
def _blocks(table, start, steps, low, high, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Ids of the blocks of the keys start + steps: [TILE], or one where they share it.

    Outside [low, high) the table may hold anything, or end.
    """
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < high, other=0)
    else:
        j = start + steps
        block = tl.load(table + j // BLOCK_SIZE, mask=(j >= low) & (j < high), other=0)
    return block


@triton.jit
def _walk(
    accumulator, maximum, total,  # [BLOCK_M, VALUE_DIM], [BLOCK_M], [BLOCK_M], float32
    q, position,  # [BLOCK_M, HEAD_DIM], [BLOCK_M]
    keys, values,  # [blocks, BLOCK_SIZE, HEAD_DIM or VALUE_DIM] of one KV head
    table,  # [blocks of the sequence]
    key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
    key_rows, value_rows,  # descriptors of the same memory as rows of slots, or None
    block_rows, head_row, key_column, value_column,  # where the block, this head's slots, K, V are
    low, high,  # multiples of TILE
    first, length,  # keys outside [first, length) are never read by pointers
    qk_scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # whether some row may not see some of the keys
):  # fmt: skip
    """Let a tile of queries see the keys [low, high).

    A masked walk goes by pointers: a freed block of a sliding layer and a slot not written yet may
    hold NaN, which a probability of 0 keeps.
    """
    DESCRIBED: tl.constexpr = key_rows is not None and not MASKED
    columns = tl.arange(0, HEAD_DIM)[None, :]
    value_columns = tl.arange(0, VALUE_DIM)[None, :]
    steps = tl.arange(0, TILE)
    # The ids of the next tile's blocks are loaded a step ahead: a pipeline whose loads of K and V
    # wait for a load of the same step spends half its stages on the ids (Triton 3.9).
    end = tl.minimum(high, length)
    block = _blocks(table, low, steps, first, end, BLOCK_SIZE, TILE)
    # Pipelined by the launch's num_stages.
    for start in tl.range(low, high, TILE):
        next_block = _blocks(table, start + TILE, steps, first, end, BLOCK_SIZE, TILE)
        j = start + steps
        if DESCRIBED:
            row = block * block_rows + head_row + start % BLOCK_SIZE
            k = key_rows.load([row, key_column])
            v = value_rows.load([row, value_column])
        else:
            slot = j % BLOCK_SIZE
            present = (j >= first) & (j < length)
            # Widened here and not in the loop's state, where it would take registers.
            far = block.to(tl.int64)
            k_at = keys + (far * key_block_stride + slot * key_slot_stride)[:, None] + columns
            v_at = values + (far * value_block_stride + slot * value_slot_stride)[:, None]
            v_at += value_columns
            if MASKED:
                k = tl.load(k_at, mask=present[:, None], other=0.0).to(q.dtype)
                v = tl.load(v_at, mask=present[:, None], other=0.0).to(q.dtype)
            else:
                k = tl.load(k_at).to(q.dtype)
                v = tl.load(v_at).to(q.dtype)
        s, unit = _scores(q, k, qk_scale, SOFTCAP)
        if MASKED:
            seen = j[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (j[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(s, 1) * unit)
        # A row that has seen no key yet: inf - inf would be NaN.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = tl.math.exp2(s * unit - base[:, None])
        shrink = tl.math.exp2(maximum - base)
        total = total * shrink + tl.sum(p, 1)
        accumulator = tl.dot(p.to(v.dtype), v, accumulator * shrink[:, None])
        maximum = new_maximum
        block = next_block
    return accumulator, maximum, total


@triton.jit
def first_key(lowest, WINDOW: tl.constexpr):
    """The first key that a query at position ``lowest`` sees."""
    first = lowest * 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0)
    return first


@triton.jit
def attend(
    q,  # [BLOCK_M, HEAD_DIM]
    position,  # [BLOCK_M], from lowest to highest in rows that count
    lowest, highest,
    keys, values,  # [blocks, BLOCK_SIZE, HEAD_DIM or VALUE_DIM] of one KV head
    table,  # [blocks of the sequence]
    key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
    key_rows, value_rows,  # descriptors of tiles of slots, or None
    block_rows, head_row, key_column, value_column,
    low, high,  # multiples of TILE, high may be below low
    length,
    qk_scale,  # the scale times log2(e), positive
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    EDGES_APART: tl.constexpr,
):  # fmt: skip
    """Sum of p v, maximum and sum of p over the keys in [low, high) that each row sees.

    With ``EDGES_APART`` only the tiles at the edges, where some row may not see some key, pay for a
    mask, in walks of their own; without, every tile does, in one walk of less code and registers.
    """
    first = first_key(lowest, WINDOW)
    high = tl.maximum(high, low)
    accumulator = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    all_high = low
    if EDGES_APART:
        # Keys [all_low, all_high) are seen by every row.
        all_low = low
        if WINDOW > 0:
            all_low = tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), TILE) * TILE
            all_low = tl.minimum(tl.maximum(all_low, low), high)
        all_high = tl.maximum(tl.minimum((lowest + 1) // TILE * TILE, high), all_low)
        if WINDOW > 0:
            accumulator, maximum, total = _walk(
                accumulator, maximum, total, q, position, keys, values, table,
                key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
                key_rows, value_rows, block_rows, head_row, key_column, value_column,
                low, all_low, first, length, qk_scale,
                HEAD_DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, TILE, True,
            )  # fmt: skip
        accumulator, maximum, total = _walk(
            accumulator, maximum, total, q, position, keys, values, table,
            key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
            key_rows, value_rows, block_rows, head_row, key_column, value_column,
            all_low, all_high, first, length, qk_scale,
            HEAD_DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, TILE, False,
        )  # fmt: skip
    return _walk(
        accumulator, maximum, total, q, position, keys, values, table,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        key_rows, value_rows, block_rows, head_row, key_column, value_column,
        all_high, high, first, length, qk_scale,
        HEAD_DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, TILE, True,
    )  # fmt: skip
