"""Batches of any shape for the attention tests, with everything around the operands poisoned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from kernel_templates.attention_decode import DecodeInputs, scratch_sizes
from kernel_templates.attention_problem import NO_BLOCK, AttentionInputs
from kernel_templates.base import KernelTemplate
from tuner.check import changed_operands, compare, poison, snapshot, touched_gaps

GUARD = 64


def batch(
    new: Sequence[int],
    context: Sequence[int],
    heads: tuple[int, int] = (8, 1),
    head_dim: int = 32,
    slots: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    dtype: str = "float16",
    device: torch.device | None = None,
    separate: bool = False,
) -> AttentionInputs:
    """Inputs with ``new[i]`` queries on ``context[i]`` keys; ``separate`` K and V tensors."""
    device = device or torch.device("cpu")
    draw = torch.Generator().manual_seed(sum(new) + sum(context))
    kind = getattr(torch, dtype)
    query_heads, kv_heads = heads
    lengths = [n + c for n, c in zip(new, context, strict=True)]
    blocks = [-(-length // slots) for length in lengths]
    cache = torch.full((sum(blocks) + 2, kv_heads, slots, 2 * head_dim), torch.nan, dtype=kind)
    table = torch.full((len(new), max(blocks) + 1), NO_BLOCK, dtype=torch.int32)
    order = torch.randperm(sum(blocks) + 2, generator=draw).int().tolist()
    for row, (count, old, length) in enumerate(zip(new, context, lengths, strict=True)):
        first = max(0, old - window + 1) if window else 0
        for block in range(first // slots, blocks[row]) if count else ():
            table[row, block] = mine = order.pop()
            at = range(max(first, block * slots), min(length, (block + 1) * slots))
            drawn = torch.randn(kv_heads, len(at), 2 * head_dim, generator=draw)
            cache[mine, :, at.start % slots : at.start % slots + len(at)] = drawn.to(kind)
    spread = head_dim**-0.5 * max(1.0, softcap / 3)
    q = torch.randn(sum(new), query_heads, head_dim + 8, generator=draw).mul(spread).to(kind)
    keys, values = cache.transpose(1, 2).to(device).split(head_dim, -1)
    if separate:
        keys, values = keys.contiguous(), values.permute(0, 2, 1, 3).contiguous().transpose(1, 2)
    out = torch.empty(sum(new) + 2, query_heads, head_dim + 4, dtype=kind, device=device)
    return AttentionInputs(
        q=q[..., :head_dim].to(device),
        keys=keys,
        values=values,
        block_table=table.to(device),
        starts=torch.tensor([0, *new]).cumsum(0).int().to(device),
        lengths=torch.tensor(lengths).int().to(device),
        max_new=max(new),
        window=window,
        softcap=softcap,
        attended=out[1:-1, :, :head_dim],
    )


def decode_inputs(inputs: AttentionInputs, splits: int) -> tuple[DecodeInputs, list[torch.Tensor]]:
    """The same with scratch for exactly so many splits, and the guards behind each part."""
    heads, head_dim = inputs.q.shape[1:]
    sizes = scratch_sizes(len(inputs.lengths), heads, inputs.max_new, head_dim, splits)
    whole = [torch.empty(n + GUARD, device=inputs.q.device) for n in (*sizes, sizes[1])]
    parts = [tensor[:-GUARD] for tensor in whole]
    fields = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    made = DecodeInputs(**fields, part_sum=parts[0], part_maximum=parts[1], part_total=parts[2])
    return made, [tensor[-GUARD:] for tensor in whole]


def assert_right(template: KernelTemplate[Any, Any], inputs: Any, config: Any) -> torch.Tensor:
    """The output right, nothing written beside it, no operand changed."""
    same, exact = template.reference(inputs), template.reference(inputs.upcast())
    poison(inputs)
    before = snapshot(inputs)
    template.launch(inputs, config)
    verdict = compare(inputs.outputs(), exact, same)
    assert verdict.ok, f"{config}: {verdict.reason}"
    assert touched_gaps(inputs) == {}
    assert changed_operands(inputs, before) == []
    assert inputs.attended is not None
    return inputs.attended
