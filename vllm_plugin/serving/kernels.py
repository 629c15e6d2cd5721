"""Which hot path a kernel of a profile belongs to, by its name, and how busy the GPU was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

#: Hot path and what names of its kernels match, the first that matches; compiled code last, whose
#: names list the operations that it fused.
PATHS: tuple[tuple[str, str], ...] = (
    ("copies", r"^(memcpy|memset)"),
    ("KV write", r"reshape_and_cache"),
    (
        "attention",
        r"unified_attention|reduce_segments|flash|fmha|_split_kernel|_combine_kernel|"
        r"attention_prefill|cutlass_?dsl|FlashAttention",
    ),
    ("experts", r"fused_moe|moe_align|moe_sum|count_and_sort|topk_?gating"),
    ("routing", r"routing"),
    ("norms", r"_one_pass_kernel|_looped_kernel"),
    ("gelu * up", r"gelu|act_and_mul"),
    ("sampling", r"arg_?max|softmax|sample|topk|logits|penalt"),
    (
        "GEMM",
        r"gemm|gemv|nvjet|cutlass|xmma|ampere_.*(s16816|h16816)|splitK|cublas|dot_kernel|"
        r"reduce_1Block",
    ),
    ("norms", r"^triton_(red|per).*(rsqrt|mean|pow|rms)"),
    ("QKV norm and RoPE", r"qkv_norm_rope|rotary|rope"),
    ("compiled pointwise", r"^triton_"),
    ("other", r""),
)
_COMPILED = [(path, re.compile(pattern, re.IGNORECASE)) for path, pattern in PATHS]


class Busy(NamedTuple):
    """A kernel's name, and when it ran, in microseconds."""

    name: str
    start: float
    end: float


def path_of(name: str) -> str:
    """The hot path of a kernel."""
    return next(path for path, pattern in _COMPILED if pattern.search(name))


def summarise(spans: Sequence[Busy]) -> dict[str, Any]:
    """Time and launches by hot path, the longest kernels, and the time that no kernel ran."""
    paths: dict[str, dict[str, float]] = {}
    names: dict[str, dict[str, float]] = {}
    for span in spans:
        for table, key in ((paths, path_of(span.name)), (names, span.name)):
            row = table.setdefault(key, {"us": 0.0, "launches": 0})
            row["us"] += span.end - span.start
            row["launches"] += 1
    longest = sorted(names.items(), key=lambda item: -item[1]["us"])[:40]
    begin = min((span.start for span in spans), default=0.0)
    end = max((span.end for span in spans), default=0.0)
    return {
        "wall_us": end - begin,
        "busy_us": covered((span.start, span.end) for span in spans),
        "launches": len(spans),
        "paths": paths,
        "longest": [{"name": name[:160], "path": path_of(name), **row} for name, row in longest],
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
