"""What attention's prefill and decode templates share on the host: problem, operands, reference.

The mathematics stands in ``attention_common``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .base import DTYPES, Cost, Inputs, ModelShape, out
from .common import empty_rows, generator, randn_rows, scaled_randn

#: What a cache may hold beside the type of Q.
KV_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn}

#: Slots of a block where pages are largest: vLLM's default.
BLOCK_SIZE = 16

#: Those that models have problems for: the default, and one whose blocks hold whole tiles.
BLOCK_SIZES = (BLOCK_SIZE, 64)

#: An id in the block table that no cache has: to follow it is to read out of bounds.
NO_BLOCK = 2**30

#: Blocks of a cache that no table names.
GUARD_BLOCKS = 2

#: Elements drawn, or scores held, at once by the reference and the builder of inputs.
CHUNK = 2**26


@dataclass(frozen=True)
class Problem:
    """What is given.

    ``tokens`` queries in all, ``queries`` of each sequence (the last one has what remains), after
    ``context`` keys that are in the cache already.  ``window`` 0 is full attention, ``softcap`` 0
    none.  ``kv_dtype`` is ``same`` (as ``dtype``) or a key of :data:`KV_DTYPES`.
    """

    tokens: int
    queries: int
    context: int
    query_heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    block_size: int = BLOCK_SIZE
    softcap: float = 0.0
    dtype: str = "bfloat16"
    kv_dtype: str = "same"

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def sequences(self) -> int:
        return max(1, -(-self.tokens // self.queries))

    @property
    def new(self) -> list[int]:
        """Queries of each sequence."""
        whole = self.sequences - 1
        return [*[self.queries] * whole, self.tokens - whole * self.queries]

    @property
    def cache_dtype(self) -> torch.dtype:
        return KV_DTYPES.get(self.kv_dtype, DTYPES[self.dtype])

    def first(self, position: int) -> int:
        """The first key that a query at ``position`` sees."""
        return max(0, position - self.window + 1) if self.window else 0


@dataclass
class AttentionInputs(Inputs):
    """Operands and output of both kernels.

    ``q``: [tokens, query heads, head dim]; ``keys, values``: [blocks, slots, KV heads, head dim]
    views of the cache with any strides whose last is 1, in the type of ``q`` or fp8;
    ``block_table``: [sequences, blocks] int32; ``starts``: [sequences + 1] int32, where each
    sequence's queries begin in ``q``; ``lengths``: [sequences] int32, keys of each sequence, its
    new ones included; ``k_scale, v_scale``: one float32 element, above 0, for an fp8 cache or
    None; ``attended``: [tokens, query heads, head dim].  ``max_new`` bounds the queries of any
    sequence; ``window`` 0 is full attention, ``softcap`` 0 none.  Of a sliding layer the table
    need not name blocks that no query sees.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    max_new: int
    window: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    attended: torch.Tensor | None = out()

    def upcast(self) -> AttentionInputs:
        """A copy with ``q`` in float32: the reference takes K and V to the type of ``q`` itself,
        block by block, where copies of a whole cache would not fit the device."""
        return dataclasses.replace(self, q=self.q.float())

    def reference_bytes(self) -> int:
        """The cache of the smaller case, no larger than this one's, copies of queries and results,
        and, of one sequence at a time, its keys and values in float32 and pieces of its scores."""
        heads = self.keys.shape[2] * self.keys.shape[3]
        longest = self.block_table.shape[1] * self.keys.shape[1]
        rows = self.q.numel() * 4 * 8
        return self.nbytes() + rows + longest * heads * 4 * 6 + CHUNK * 4 * 5


def wrong(name: str, found: object, wanted: object) -> ValueError:
    return ValueError(f"attention: {name} is {found}, wanted {wanted}")


def check(inputs: AttentionInputs) -> None:
    """ValueError naming the first operand that does not fit the others."""
    if inputs.q.dim() != 3 or inputs.keys.dim() != 4 or inputs.lengths.dim() != 1:
        raise wrong("q, keys, lengths", "not 3-D, 4-D, 1-D", "[tokens, heads, head dim], ...")
    tokens, heads, head_dim = inputs.q.shape
    _, slots, kv_heads, _ = inputs.keys.shape
    sequences = inputs.lengths.shape[0]
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise wrong("head_dim", head_dim, "a power of two, at least 16")
    if kv_heads < 1 or heads % kv_heads:
        raise wrong("query heads", heads, f"a multiple of {kv_heads} KV heads")
    if not inputs.scale > 0:
        # Scores are compared before they are scaled; scales of an fp8 cache must be positive, too.
        raise wrong("scale", inputs.scale, "above 0")
    if inputs.window < 0 or inputs.softcap < 0:
        raise wrong("window, softcap", f"{inputs.window}, {inputs.softcap}", "at least 0")
    shapes = {
        "keys": (inputs.keys.shape[0], slots, kv_heads, head_dim),
        "values": tuple(inputs.keys.shape),
        "block_table": (sequences, *inputs.block_table.shape[1:2]),
        "starts": (sequences + 1,),
        "attended": (tokens, heads, head_dim),
    }
    for name, shape in shapes.items():
        found = None if getattr(inputs, name) is None else tuple(getattr(inputs, name).shape)
        if found != shape:
            raise wrong(name, found, shape)
    for name in ("q", "keys", "values", "block_table", "attended"):
        tensor = getattr(inputs, name)
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
            raise wrong(f"strides of {name}", tensor.stride(), "contiguous elements in a row")
    for name in ("block_table", "starts", "lengths"):
        if getattr(inputs, name).dtype != torch.int32:
            raise wrong(f"dtype of {name}", getattr(inputs, name).dtype, "torch.int32")
    allowed = (inputs.q.dtype, *KV_DTYPES.values())
    if inputs.keys.dtype not in allowed or inputs.values.dtype != inputs.keys.dtype:
        pair = f"{inputs.keys.dtype}, {inputs.values.dtype}"
        raise wrong("dtype of keys, values", pair, f"both one of {', '.join(map(str, allowed))}")
    if inputs.attended is not None and inputs.attended.dtype != inputs.q.dtype:
        raise wrong("dtype of attended", inputs.attended.dtype, f"{inputs.q.dtype} as q")


def stride(tensor: torch.Tensor, dimension: int) -> int:
    """A stride that counts: of a dimension of one element it may be anything, and an odd value
    would make Triton expect misaligned rows."""
    return tensor.stride(dimension) if tensor.shape[dimension] > 1 else 0


def operand_args(inputs: AttentionInputs) -> dict[str, object]:
    """The kernel arguments that prefill and decode have in common."""
    assert inputs.attended is not None
    return {
        "q": inputs.q,
        "keys": inputs.keys,
        "values": inputs.values,
        "block_table": inputs.block_table,
        "starts": inputs.starts,
        "lengths": inputs.lengths,
        "k_scale": inputs.k_scale,
        "v_scale": inputs.v_scale,
        "attended": inputs.attended,
        "q_stride": stride(inputs.q, 0),
        "q_head_stride": stride(inputs.q, 1),
        "key_block_stride": stride(inputs.keys, 0),
        "key_slot_stride": stride(inputs.keys, 1),
        "key_head_stride": stride(inputs.keys, 2),
        "value_block_stride": stride(inputs.values, 0),
        "value_slot_stride": stride(inputs.values, 1),
        "value_head_stride": stride(inputs.values, 2),
        "table_stride": stride(inputs.block_table, 0),
        "out_stride": stride(inputs.attended, 0),
        "out_head_stride": stride(inputs.attended, 1),
        "scale": inputs.scale,
        "HEAD_DIM": inputs.q.shape[2],
        "GROUP": inputs.q.shape[1] // inputs.keys.shape[2],
        "BLOCK_SIZE": inputs.keys.shape[1],
        "WINDOW": inputs.window,
        "SOFTCAP": inputs.softcap,
    }


def attention(inputs: AttentionInputs) -> dict[str, torch.Tensor]:
    """Plain PyTorch, sequence by sequence; float32 inside, probabilities rounded to q's type."""
    q, wide = inputs.q, torch.float32
    tokens, heads, head_dim = q.shape
    slots, kv_heads = inputs.keys.shape[1], inputs.keys.shape[2]
    k_scale = 1.0 if inputs.k_scale is None else inputs.k_scale.to(wide)
    v_scale = 1.0 if inputs.v_scale is None else inputs.v_scale.to(wide)
    result = torch.zeros(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
    starts = inputs.starts.tolist()

    def gathered(cache: torch.Tensor, sequence: int, low: int, high: int) -> torch.Tensor:
        """K or V of the keys [low, high): [keys, KV heads, head dim]."""
        blocks = inputs.block_table[sequence, low // slots : -(-high // slots)].long()
        # Bytes, because not every device can index fp8.
        bytes_ = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        found = bytes_[blocks].view(cache.dtype).flatten(0, 1)
        return found[low % slots : low % slots + high - low].to(q.dtype).to(wide)

    for sequence, length in enumerate(inputs.lengths.tolist()):
        new = starts[sequence + 1] - starts[sequence]
        step = max(1, CHUNK // max(1, heads * length))
        for begin in range(0, new, step):
            end = min(begin + step, new)
            low, high = length - new + begin, length - new + end  # positions of these queries
            first = max(0, low - inputs.window + 1) if inputs.window else 0
            k = gathered(inputs.keys, sequence, first, high) * k_scale
            v = gathered(inputs.values, sequence, first, high)
            rows = slice(starts[sequence] + begin, starts[sequence] + end)
            mine = q[rows].to(wide).unflatten(1, (kv_heads, heads // kv_heads))
            scores = torch.einsum("qghd,kgd->ghqk", mine, k) * inputs.scale
            if inputs.softcap:
                scores = torch.tanh(scores / inputs.softcap) * inputs.softcap
            position = torch.arange(low, high, device=q.device)[:, None]
            j = torch.arange(first, high, device=q.device)[None, :]
            seen = j <= position
            if inputs.window:
                seen &= j > position - inputs.window
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            o = torch.einsum("ghqk,kgd->qghd", p.to(q.dtype).to(wide), v) * v_scale
            result[rows] = o.flatten(1, 2).to(q.dtype)
    return {"attended": result}


def draw_inputs(problem: Problem, seed: int, device: torch.device, pad: int = 0) -> AttentionInputs:
    """Random inputs over a cache as vLLM lays it out: [blocks, KV heads, slots, 2 x head dim].

    Blocks are in random order.  What a kernel must not touch would show: slots that no query sees
    and the guard blocks hold NaN, the table names no block for them.
    """
    dtype, draw = DTYPES[problem.dtype], generator(seed, device)
    heads, head_dim, slots = problem.query_heads, problem.head_dim, problem.block_size
    new = problem.new
    lengths = [problem.context + count for count in new]
    spans = [
        range(problem.first(length - count) // slots, -(-length // slots))
        for count, length in zip(new, lengths, strict=True)
    ]
    blocks = sum(map(len, spans)) + GUARD_BLOCKS
    # Scores of deviation 1, or, under a softcap, large enough to feel it.
    spread = head_dim**-0.5 * max(1.0, problem.softcap / 3)
    q = randn_rows(problem.tokens, heads * head_dim, dtype, device, draw, pad, spread)
    output = empty_rows(problem.tokens, heads * head_dim, dtype, device, pad)
    shape = (blocks, problem.kv_heads, slots, 2 * head_dim)
    cache = torch.empty(shape, dtype=problem.cache_dtype, device=device)
    width = max(span.stop for span in spans) + 1
    table = torch.full((len(new), width), NO_BLOCK, dtype=torch.int32)
    if device.type != "meta":
        order = torch.randperm(blocks, generator=generator(seed, torch.device("cpu"))).int()
        cache.view(torch.uint8).fill_(0xFF)  # NaN in every type
        used = 0
        for row, span in enumerate(spans):
            table[row, span.start : span.stop] = order[used : used + len(span)]
            used += len(span)
        for block, slot in _visible(problem, lengths, table):
            drawn = (len(block), problem.kv_heads, 2 * head_dim)
            values = scaled_randn(drawn, dtype, device, draw).to(cache.dtype)
            at = (block.to(device), slice(None), slot.to(device))
            cache.view(torch.uint8)[at] = values.view(torch.uint8)
    scales: list[torch.Tensor | None] = [None, None]
    if problem.kv_dtype != "same":
        scales = [torch.full((1,), scale, device=device) for scale in (0.75, 1.5)]
    by_slot = cache.transpose(1, 2)
    starts = torch.tensor([0, *new]).cumsum(0)
    return AttentionInputs(
        q=q.unflatten(1, (heads, head_dim)),
        keys=by_slot[..., :head_dim],
        values=by_slot[..., head_dim:],
        block_table=table.to(device),
        starts=starts.int().to(device),
        lengths=torch.tensor(lengths).int().to(device),
        max_new=problem.queries,
        window=problem.window,
        softcap=problem.softcap,
        k_scale=scales[0],
        v_scale=scales[1],
        attended=output.unflatten(1, (heads, head_dim)),
    )


def _visible(
    problem: Problem, lengths: Sequence[int], table: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(blocks, slots) of all positions that some query sees, in pieces of bounded size."""
    step = max(1, CHUNK // (2 * problem.kv_heads * problem.head_dim))
    for row, (count, length) in enumerate(zip(problem.new, lengths, strict=True)):
        for low in range(problem.first(length - count), length, step):
            position = torch.arange(low, min(low + step, length))
            yield table[row, position // problem.block_size].long(), position % problem.block_size


def work(problem: Problem) -> Cost:
    """Q and the output once; K and V of each position that some query sees, once per KV head.

    FLOP: two products of 2 x head dim per visible (query, key) pair and query head.
    """
    pairs = positions = 0
    for count in set(problem.new):
        sequences = problem.new.count(count)
        last = problem.context + count
        pairs += sequences * (_pairs(problem, last) - _pairs(problem, problem.context))
        positions += sequences * (last - problem.first(problem.context) if count else 0)
    size, kv_size = DTYPES[problem.dtype].itemsize, problem.cache_dtype.itemsize
    rows = 2 * problem.tokens * problem.query_heads * size
    return Cost(
        bytes=problem.head_dim * (rows + 2 * positions * problem.kv_heads * kv_size),
        flops=4 * pairs * problem.query_heads * problem.head_dim,
    )


def _pairs(problem: Problem, queries: int) -> int:
    """Visible (query, key) pairs of the first ``queries`` positions of a sequence."""
    ramp = min(queries, problem.window) if problem.window else queries
    return ramp * (ramp + 1) // 2 + (queries - ramp) * problem.window


def problem_kinds(
    model: ModelShape, blocks: Sequence[int] = BLOCK_SIZES
) -> list[dict[str, int | str]]:
    """The distinct attention layers of a model, as fields of :class:`Problem`.

    Layers that share another's KV cache have its shapes, so they merge with it.  vLLM gives all
    groups of layers pages of equal size (``unify_kv_cache_spec_page_size`` in its
    ``kv_cache_utils``): the widest have one of ``blocks`` slots, the others more.
    """
    widest = max(layer.kv_heads * layer.head_dim for layer in model.layers)
    kinds = dict.fromkeys(
        (layer.query_heads, layer.kv_heads, layer.head_dim, layer.window or 0)
        for layer in model.layers
    )
    return [
        {
            "query_heads": query_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "window": window,
            "block_size": slots * max(1, widest // (kv_heads * head_dim)),
            "dtype": model.dtype,
        }
        for slots in blocks
        for query_heads, kv_heads, head_dim, window in kinds
    ]


def describe(problem: Problem) -> str:
    """Short name for tables and logs, without the token count."""
    window = f", window {problem.window}" if problem.window else ""
    softcap = f", softcap {problem.softcap:g}" if problem.softcap else ""
    cache = f"blocks of {problem.block_size}"
    cache += "" if problem.kv_dtype == "same" else f" {problem.kv_dtype}"
    return (
        f"head {problem.head_dim}: {problem.query_heads} Q on {problem.kv_heads} KV{window}"
        f"{softcap}, {problem.queries} new on {problem.context}, {cache}"
    )
