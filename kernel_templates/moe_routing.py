"""Which experts a token uses, and with what weights: softmax, top-k, renormalise, expert scale.

Mathematics, per row of logits ``l`` [experts] in float32::

    p   = softmax(l)                       over all experts
    ids = the top_k largest logits, in descending order
    w_i = p[ids_i] / sum_j p[ids_j] * per_expert_scale[ids_i]

which is ``exp(l[ids_i] - max l) / sum_j exp(l[ids_j] - max l)`` times the scale: the softmax's own
sum cancels, and the largest logit is always among the chosen.

Order and ties, the same in kernel and reference: equal logits go to the lower expert id first;
+0.0 equals -0.0; NaN ranks above +infinity, as in ``torch.topk``, and every NaN equals every other.
The ids of a row are always distinct and in range, whatever the logits.  The weights of a row with a
NaN, with +infinity, or with nothing but -infinity are NaN, as its softmax is; no row changes
another.

The logits, float32 or exactly widened to it, become 32-bit integer keys whose order is that of the
rule above, so the search compares integers only and finds the same ids on every device.
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
    scaled_randn,
    tile_grid,
    tile_rows,
)

METHODS = ("argmax", "packed", "topk", "sort")

LOG2_E = tl.constexpr(1.4426950408889634)
#: Key of NaN: above every other.
KEY_NAN = tl.constexpr(0x7FFFFFFF)
#: Key of padding and of experts already chosen: below -infinity.
KEY_NONE = tl.constexpr(-0x80000000)
#: The same for packed keys: no higher than padding's, whatever id stands in the low half.
PACKED_NONE = tl.constexpr(-0x80000000 << 32)


@dataclass(frozen=True)
class Problem:
    """What is given: logits [tokens, experts] in ``logits_dtype``; the scale is in ``dtype``."""

    tokens: int
    experts: int
    top_k: int
    logits_dtype: str = "float32"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Config:
    """What may vary.

    ``rows`` per program.  ``method``: ``argmax`` finds one expert a round by two 32-bit reductions
    (best key, then lowest id that has it); ``packed`` by one reduction over keys that hold the id
    in 64 bits; ``topk`` sorts such keys only as far as the chosen ones need; ``sort`` sorts them
    all, as vLLM's own kernel does.  ``programs_per_sm`` 0 for one program per tile, else a
    persistent grid.
    """

    rows: int
    method: str
    programs_per_sm: int
    num_warps: int


@dataclass
class MoeRoutingInputs(Inputs):
    """``logits``: [tokens, experts], rows may be strided; ``per_expert_scale``: [experts], any
    float dtype; ``weights``: [tokens, top_k] float32; ``ids``: [tokens, top_k] int32."""

    logits: torch.Tensor
    per_expert_scale: torch.Tensor
    top_k: int
    weights: torch.Tensor | None = out()
    ids: torch.Tensor | None = out()


@triton.jit
def _keys(logits, expert, EXPERTS: tl.constexpr):
    """int32 keys [ROWS, BLOCK] whose order is that of the float32 logits."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(logits != logits, KEY_NAN, keys)
    return tl.where(expert < EXPERTS, keys, KEY_NONE)


@triton.jit
def _logits_of(keys):
    """The float32 logits (-0.0 as +0.0) of int32 keys."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _packed_keys(logits, expert, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """int64 keys [ROWS, BLOCK] with the id in their low half, lower ids above."""
    keys = _keys(logits, expert, EXPERTS)
    return (keys.to(tl.int64) << 32) | (BLOCK - 1 - expert).to(tl.int64)


@triton.jit(do_not_specialize=["tokens"])
def _routing_kernel(
    logits,  # [tokens, EXPERTS], row stride logits_stride
    per_expert_scale,  # [EXPERTS]
    weights,  # [tokens, TOP_K] float32
    ids,  # [tokens, TOP_K] int32
    tokens,
    logits_stride, weights_stride, ids_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= EXPERTS
    SLOTS: tl.constexpr,  # columns of the result tile: a power of two >= TOP_K
    ROWS: tl.constexpr,
    METHOD: tl.constexpr,
):  # fmt: skip
    # Grid: (tiles of ROWS rows,) or fewer programs that stride over the tiles.
    expert = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    slot = tl.arange(0, SLOTS)[None, :]  # [1, SLOTS]
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row = tile_rows(tile, ROWS)[:, None]  # [ROWS, 1]
        mask = (row < tokens) & (expert < EXPERTS)  # [ROWS, BLOCK]
        given = tl.load(logits + row * logits_stride + expert, mask=mask, other=0.0).to(tl.float32)

        if METHOD == "argmax":
            keys = _keys(given, expert, EXPERTS)
            best_keys = tl.zeros([ROWS, SLOTS], tl.int32)
            chosen = tl.zeros([ROWS, SLOTS], tl.int32)
            for k in tl.static_range(TOP_K):
                best = tl.max(keys, axis=1, keep_dims=True)  # [ROWS, 1]
                # An expert that is taken has no key left, so the ids stay distinct.
                first = tl.min(tl.where(keys == best, expert, BLOCK), axis=1, keep_dims=True)
                keys = tl.where(expert == first, KEY_NONE, keys)
                best_keys = tl.where(slot == k, best, best_keys)
                chosen = tl.where(slot == k, first, chosen)
        else:
            packed = _packed_keys(given, expert, EXPERTS, BLOCK)
            if METHOD == "packed":
                best_packed = tl.zeros([ROWS, SLOTS], tl.int64)
                for k in tl.static_range(TOP_K):
                    best = tl.max(packed, axis=1, keep_dims=True)
                    packed = tl.where(packed == best, PACKED_NONE, packed)
                    best_packed = tl.where(slot == k, best, best_packed)
            elif METHOD == "topk":
                best_packed = tl.topk(packed, SLOTS)
            else:
                best_packed = tl.sort(packed, descending=True)
            best_keys = (best_packed >> 32).to(tl.int32)
            chosen = BLOCK - 1 - (best_packed & 0x7FFFFFFF).to(tl.int32)
        top = _logits_of(best_keys)

        used = (slot < TOP_K) & (row < tokens)  # [ROWS, SLOTS]
        # The first slot holds the largest logit.  NaN and infinities go through the same
        # arithmetic as in a softmax and make the whole row NaN.
        largest = tl.sum(tl.where(slot == 0, top, 0.0), axis=1, keep_dims=True)
        powers = tl.where(slot < TOP_K, tl.exp2((top - largest) * LOG2_E), 0.0)
        total = tl.sum(powers, axis=1, keep_dims=True)
        scale = tl.load(per_expert_scale + chosen, mask=used, other=0.0).to(tl.float32)
        tl.store(weights + row * weights_stride + slot, powers / total * scale, mask=used)
        tl.store(ids + row * ids_stride + slot, chosen, mask=used)


def calls(inputs: MoeRoutingInputs, config: Config) -> list[KernelCall]:
    """The launch for these inputs; ValueError when the operands do not fit together."""
    tokens, experts = inputs.logits.shape
    weights, ids, top_k = inputs.weights, inputs.ids, inputs.top_k
    if weights is None or ids is None:
        raise ValueError("moe_routing: weights or ids are missing")
    if not 1 <= top_k <= experts <= 65536:
        raise ValueError(f"moe_routing: top_k {top_k} of {experts} experts")
    if inputs.per_expert_scale.shape != (experts,) or inputs.per_expert_scale.stride(0) != 1:
        raise ValueError(
            f"moe_routing: per_expert_scale has shape {tuple(inputs.per_expert_scale.shape)}, "
            f"wanted contiguous {(experts,)}"
        )
    for name, tensor, wanted in (
        ("weights", weights, torch.float32),
        ("ids", ids, torch.int32),
    ):
        if tensor.shape != (tokens, top_k) or tensor.dtype != wanted:
            raise ValueError(
                f"moe_routing: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"wanted {wanted} {(tokens, top_k)}"
            )
    for name, tensor in (("logits", inputs.logits), ("weights", weights), ("ids", ids)):
        if tensor.stride(1) != 1 and tensor.shape[1] > 1:
            raise ValueError(f"moe_routing: {name} has strided columns {tensor.stride()}")
    block = next_power_of_2(experts)
    args = {
        "logits": inputs.logits,
        "per_expert_scale": inputs.per_expert_scale,
        "weights": weights,
        "ids": ids,
        "tokens": tokens,
        "logits_stride": inputs.logits.stride(0),
        "weights_stride": weights.stride(0),
        "ids_stride": ids.stride(0),
        "EXPERTS": experts,
        "TOP_K": top_k,
        "BLOCK": block,
        "SLOTS": block if config.method == "sort" else next_power_of_2(top_k),
        "ROWS": config.rows,
        "METHOD": config.method,
    }
    grid = tile_grid(-(-tokens // config.rows), config.programs_per_sm, inputs.logits)
    return [KernelCall(_routing_kernel, grid, args, num_warps=config.num_warps)]


def reference(inputs: MoeRoutingInputs) -> dict[str, torch.Tensor]:
    """Plain PyTorch with the tie rule above; softmax in float32 whatever the logits' dtype.

    The mathematics is that of ``gemma4_routing_function_torch`` in vLLM 0.26.  Its guard against a
    sum of zero is left out: the largest probability is at least ``1 / experts``, or NaN.
    """
    # Adding 0.0 turns -0.0 into +0.0; a stable sort keeps the order of ids among equals.
    logits = inputs.logits.float() + 0.0
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ids = order[:, : inputs.top_k]
    probabilities = torch.softmax(logits, dim=-1).gather(1, ids)
    weights = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return {
        "weights": weights * inputs.per_expert_scale.float()[ids],
        "ids": ids.to(torch.int32),
    }


def make_inputs(
    problem: Problem, seed: int, device: torch.device, pad: int = 0
) -> MoeRoutingInputs:
    """Random logits with a few ties; scales around one."""
    draw = generator(seed, device)
    shape = (problem.tokens, problem.top_k)
    logits = randn_rows(
        problem.tokens, problem.experts, DTYPES[problem.logits_dtype], device, draw, pad, 2.0
    )
    if device.type != "meta":
        # Every third row on a coarse grid, as quantised activations give: ties are the rule there.
        logits[::3] = (logits[::3] * 4.0).round() / 4.0
    return MoeRoutingInputs(
        logits=logits,
        per_expert_scale=scaled_randn(
            (problem.experts,), DTYPES[problem.dtype], device, draw, 0.3, 1.0
        ),
        top_k=problem.top_k,
        weights=empty_rows(*shape, torch.float32, device, pad),
        ids=empty_rows(*shape, torch.int32, device, pad),
    )


def problems(model: ModelShape, tokens: Sequence[int]) -> list[Problem]:
    """One kind per MoE model: vLLM's gate emits float32 logits."""
    if not any(layer.moe for layer in model.layers):
        return []
    return [
        Problem(count, model.num_experts, model.top_k_experts, dtype=model.dtype)
        for count in tokens
    ]


def default(problem: Problem, device: DeviceInfo) -> Config:
    """One warp per row, in blocks of up to four rows once there are rows for every SM."""
    rows = 4 if problem.tokens >= 4 * device.sms else 1
    return Config(rows=rows, method="argmax", programs_per_sm=0, num_warps=rows)


def stock_config(problem: Problem) -> Config:
    """vLLM's routing kernel for Gemma 4: a full sort, one row and one warp per program.

    Source: vLLM 0.26, ``_gemma4_routing_kernel`` (one program per token, num_warps=1).
    """
    return Config(rows=1, method="sort", programs_per_sm=0, num_warps=1)


def cost(problem: Problem) -> Cost:
    """Logits in, weights and ids out, scales once; about 4 operations per logit and round."""
    logits = problem.tokens * problem.experts
    return Cost(
        bytes=logits * DTYPES[problem.logits_dtype].itemsize
        + problem.tokens * problem.top_k * 8
        + problem.experts * DTYPES[problem.dtype].itemsize,
        flops=4 * logits * problem.top_k,
    )


def describe(problem: Problem) -> str:
    """Short name for tables and logs, without the token count."""
    return f"top-{problem.top_k} of {problem.experts} experts, {problem.logits_dtype} logits"


TEMPLATE = KernelTemplate(
    name="moe_routing",
    problem=Problem,
    config=Config,
    calls=calls,
    reference=reference,
    make_inputs=make_inputs,
    problems=problems,
    default=default,
    cost=cost,
    describe=describe,
    stock_config=stock_config,
    exact_outputs=("ids",),
)
