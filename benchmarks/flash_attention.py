"""FlashAttention 4 as a peer, called as vLLM's backend calls it for Gemma 4 on Hopper.

The arguments are those of ``FlashAttentionImpl.forward``
(``vllm/v1/attention/backends/flash_attn.py``, 0.26): no scheduler metadata, which only version 3
takes, and as many splits as its own heuristic wants for the batch.  A server that replays decode
from a captured graph keeps the splits chosen for its longest context, which differ where the grid
does not fill the GPU.

Its kernels take seconds each to compile, so :class:`Warmer` runs in worker processes ahead of
measuring and leaves them in FlashAttention's own cache on the disk.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernel_templates.attention_problem import AttentionInputs
from kernel_templates.base import DTYPES, record_from_dict

from .unified_attention import Problem, window

VERSION = 4
PACKAGE = "vllm.vllm_flash_attn"
#: FlashAttention's own switch of its cache on the disk.
CACHE_VARIABLE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def unavailable() -> str | None:
    """Why version 4 cannot run on the current device, or None."""
    package = importlib.import_module(PACKAGE)
    if not package.is_fa_version_supported(VERSION):
        return str(package.fa_version_unsupported_reason(VERSION))
    importlib.import_module(f"{PACKAGE}.cute.interface")
    return None


def launch(problem: Problem, inputs: AttentionInputs) -> Callable[[], Any]:
    """A call that writes ``inputs.attended``."""
    function = importlib.import_module(PACKAGE).flash_attn_varlen_func
    # Strides of dimensions of size 1 may be anything, and TMA wants multiples of 16 bytes.
    canonical = importlib.import_module("vllm.utils.torch_utils").canonicalize_singleton_dim_strides
    keys, values = canonical(inputs.keys), canonical(inputs.values)

    def call() -> Any:
        return function(
            q=inputs.q,
            k=keys,
            v=values,
            out=inputs.attended,
            cu_seqlens_q=inputs.starts,
            max_seqlen_q=inputs.max_new,
            seqused_k=inputs.lengths,
            max_seqlen_k=problem.longest,
            softmax_scale=inputs.scale,
            causal=True,
            alibi_slopes=None,
            window_size=list(window(problem)),
            block_table=inputs.block_table,
            softcap=problem.softcap or 0,
            scheduler_metadata=None,
            fa_version=VERSION,
            num_splits=0,
        )

    return call


def forget_disk() -> None:
    """Compile in this process from now on: for a cache on the disk that cannot be read."""
    interface = importlib.import_module(f"{PACKAGE}.cute.interface")
    cache = importlib.import_module(f"{PACKAGE}.cute.cache_utils").JITCache
    for name in ("_flash_attn_fwd", "_flash_attn_fwd_combine"):
        getattr(interface, name).compile_cache = cache()


def kind(problem: Problem) -> tuple[object, ...]:
    """Problems of one kind share kernels, but for whether keys are split."""
    return (problem.head_dim, problem.group, bool(problem.window), problem.dtype)


class Warmer:
    """The handler of a worker process that compiles ahead."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        torch.cuda.set_device(self.device)

    def warm(self, problems: Sequence[Mapping[str, Any]]) -> None:
        """Launch on a cache of two blocks, with the sizes that decide between kernels."""
        for values in problems:
            launch(found := record_from_dict(Problem, values), _small(found, self.device))()
        torch.cuda.synchronize(self.device)


def _small(problem: Problem, device: torch.device) -> AttentionInputs:
    dtype, heads = DTYPES[problem.dtype], (problem.query_heads, problem.head_dim)
    # Two, because strides of a dimension of size 1 do not survive the way into its compiler.
    shape = (2, problem.kv_heads, problem.block_size, 2 * problem.head_dim)
    by_slot = torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)
    width = -(-problem.longest // problem.block_size)
    integers = {"dtype": torch.int32, "device": device}
    return AttentionInputs(
        q=torch.zeros(problem.tokens, *heads, dtype=dtype, device=device),
        keys=by_slot[..., : problem.head_dim],
        values=by_slot[..., problem.head_dim :],
        block_table=torch.zeros(problem.sequences, width, **integers),  # type: ignore[arg-type]
        starts=torch.tensor([0, *problem.new]).cumsum(0).int().to(device),
        lengths=torch.tensor(problem.new).int().to(device),
        max_new=problem.queries,
        window=problem.window,
        attended=torch.empty(problem.tokens, *heads, dtype=dtype, device=device),
    )
