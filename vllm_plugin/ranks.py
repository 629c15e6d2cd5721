"""Tensor-parallel ranks agree on what is active, or none of them is.

Ranks that compute one layer with different kernels still give a result, only a slightly wrong one
that no test of one rank shows.  So each compares the digest of its tables and active paths with
the others' before anything is traced.
"""

from __future__ import annotations

import datetime
from typing import Any

#: How long a rank waits for the others; one that never comes (``GEMMA_TUNE=0`` there) is a
#: disagreement.
SECONDS = 300.0


def disagreement(digest: str | None, vllm_config: Any) -> str:
    """Why this rank must not use the plugin; empty where all ranks of its group agree.

    ``digest`` is None on a rank that failed.  Every rank must call this exactly once.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    if getattr(parallel, "tensor_parallel_size", 1) <= 1:
        return ""
    try:
        from vllm.distributed.parallel_state import get_tp_group

        coordinator = get_tp_group()
        group, size = coordinator.cpu_group, coordinator.world_size
    except Exception as error:
        return f"the tensor-parallel group is out of reach ({type(error).__name__}: {error})"
    return compare(digest, group) if size > 1 else ""


def compare(digest: str | None, group: Any) -> str:
    """:func:`disagreement` within a group of ``torch.distributed``."""
    import torch.distributed as dist

    digests: list[str | None] = [None] * dist.get_world_size(group)
    try:
        if dist.get_backend(group) == "gloo":
            # The gather itself would wait for half an hour.
            dist.monitored_barrier(group, timeout=datetime.timedelta(seconds=SECONDS))
        dist.all_gather_object(digests, digest, group=group)
    except Exception as error:
        text = str(error).partition("\n")[0]
        return f"tensor-parallel ranks could not compare their tables: {text}"
    if len(set(digests)) == 1:
        return ""
    shown = ", ".join(f"rank {rank}: {each or 'failed'}" for rank, each in enumerate(digests))
    return f"tensor-parallel ranks differ in tables or active paths ({shown})"
