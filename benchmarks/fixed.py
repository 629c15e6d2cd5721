"""The launch that a hand-written kernel would make: one fixed rule instead of a search.

The rule is ``calculate_settings`` of Liger-Kernel (``liger_kernel/ops/utils.py``, after Unsloth),
the one that its fused norms and GeGLU launch with: a program works on one full row, ``BLOCK`` is
the row's width rounded up to a power of two, and warps follow ``BLOCK`` alone: 4, 8 from 2048, 16
from 8192, 32 from 32768.  No persistent grid, no cache hints, no pipelining.

Here it picks a config of our own template, so what differs from the tuned config is the launch
and nothing else.  Accesses are as wide as Triton makes them by itself: 16 bytes, or what a thread
has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernel_templates import gelu_mul, moe_routing, qkv_norm_rope, residual_norm
from kernel_templates.base import DTYPES, DeviceInfo
from kernel_templates.common import next_power_of_2
from search_spaces.base import spaces

ORIGIN = "Liger-Kernel's calculate_settings"
#: The rule's own limit: it refuses wider rows.
MAX_BLOCK = 65536


class NoFixedLaunchError(Exception):
    """The rule gives no launch for a problem; the message is the reason."""


def warps_of(block: int) -> int:
    """Warps by block size alone."""
    if block > MAX_BLOCK:
        raise NoFixedLaunchError(f"a row of {block} exceeds the rule's limit of {MAX_BLOCK}")
    return 32 if block >= 32768 else 16 if block >= 8192 else 8 if block >= 2048 else 4


def _access(elements: int, warps: int, dtype: str) -> int:
    """Elements per access: 16 bytes, or what one thread has of the row."""
    return min(16 // int(DTYPES[dtype].itemsize), max(1, elements // (32 * warps)))


def _full_row(width: int, dtype: str) -> dict[str, int]:
    """The fields of a launch whose programs work on one full row each."""
    block = next_power_of_2(width)
    warps = warps_of(block)
    return {
        "rows": 1,
        "block": block,
        "vector": _access(block, warps, dtype),
        "programs_per_sm": 0,
        "num_warps": warps,
        "stages": 1,
    }


def _gelu_mul(problem: gelu_mul.Problem) -> gelu_mul.Config:
    row = _full_row(problem.width, problem.dtype)
    return gelu_mul.Config(**row, evict_first=False, stream_stores=False)


def _residual_norm(problem: residual_norm.Problem) -> residual_norm.Config:
    return residual_norm.Config(**_full_row(problem.hidden, problem.dtype))


def _qkv_norm_rope(problem: qkv_norm_rope.Problem) -> qkv_norm_rope.Config:
    # A row is one head of one token; the kernel holds it as two halves.
    warps = warps_of(next_power_of_2(problem.head_dim))
    return qkv_norm_rope.Config(
        rows=1,
        vector=_access(problem.head_dim // 2, warps, problem.dtype),
        programs_per_sm=0,
        num_warps=warps,
    )


def _moe_routing(problem: moe_routing.Problem) -> moe_routing.Config:
    warps = warps_of(next_power_of_2(problem.experts))
    return moe_routing.Config(rows=1, method="argmax", programs_per_sm=0, num_warps=warps)


_RULES: Mapping[str, Callable[[Any], Any]] = {
    "gelu_mul": _gelu_mul,
    "moe_routing": _moe_routing,
    "qkv_norm_rope": _qkv_norm_rope,
    "residual_norm": _residual_norm,
}


def fixed(template: str, problem: Any, device: DeviceInfo) -> Any:
    """The rule's config of that template; NoFixedLaunchError with the reason when there is none."""
    if template not in _RULES:
        raise NoFixedLaunchError(f"no fixed rule is written down for {template}")
    config = _RULES[template](problem)
    if reason := spaces()[template].infeasible(problem, config, device):
        raise NoFixedLaunchError(f"infeasible: {reason}")
    return config
