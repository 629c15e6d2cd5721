"""The kernels as PyTorch operators: what a compiled graph holds, opaque to the compiler.

Each allocates its outputs, looks the config up by problem (a dict; under CUDA graphs only at
capture) and launches the template.  A kernel that cannot run (say, a config that a new Triton no
longer compiles) is replaced by the template's PyTorch reference for the rest of the process, with
one WARNING.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_templates import gelu_mul, moe_routing, qkv_norm_rope, residual_norm
from kernel_templates.base import DTYPES
from kernel_templates.launcher import Launcher

from . import settings
from .tables import Choices

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_broken: set[str] = set()
_choices: Choices | None = None
_launcher = Launcher()


def use(choices: Choices) -> None:
    """Set where configs come from; before the first call."""
    global _choices
    _choices = choices


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as problems name it; ValueError for one that no kernel takes."""
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"dtype {dtype} is not supported")
    return _DTYPE_NAMES[dtype]


def run(kernel: Any, problem: Any, inputs: Any) -> None:
    """Fill the outputs of ``inputs``."""
    topic = f"{kernel.name} {kernel.describe(problem)}"
    if topic not in _broken:
        try:
            if _choices is None:
                raise RuntimeError("no tables are loaded")
            _launcher.launch(kernel, inputs, _choices.config(kernel, problem))
            return
        except Exception as error:
            _broken.add(topic)
            settings.warn_once(
                topic,
                "gemma-tune: %s cannot run (%s: %s); plain PyTorch takes its place",
                topic,
                type(error).__name__,
                error,
            )
    for name, value in kernel.reference(inputs).items():
        getattr(inputs, name).copy_(value)


def _rows(like: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.empty((like.shape[0], columns), dtype=like.dtype, device=like.device)


def _tokens(tensor: torch.Tensor) -> int:
    return max(1, int(tensor.shape[0]))


def _residual_norm(
    branch0: torch.Tensor,
    branch0_weight: torch.Tensor,
    residual: torch.Tensor,
    branch1: torch.Tensor | None,
    branch1_weight: torch.Tensor | None,
    sum_weight: torch.Tensor | None,
    scalar: torch.Tensor | None,
    norm_weights: list[torch.Tensor],
    router: bool,
    root: float,
    eps: float,
) -> list[torch.Tensor]:
    hidden = residual.shape[1]
    outputs = [_rows(residual, hidden) for _ in range(1 + len(norm_weights))]
    inputs = residual_norm.ResidualNormInputs(
        branch0,
        branch0_weight,
        residual,
        branch1,
        branch1_weight,
        sum_weight,
        scalar,
        router=len(norm_weights) - 1 if router else -1,
        root=root,
        eps=eps,
        h_out=outputs[0],
    )
    for index, weight in enumerate(norm_weights):
        setattr(inputs, f"norm_weight{index}", weight)
        setattr(inputs, f"norm_out{index}", outputs[1 + index])
    problem = residual_norm.Problem(
        _tokens(residual),
        hidden,
        1 if branch1 is None else 2,
        scalar is not None,
        len(norm_weights),
        router,
        dtype_name(residual.dtype),
    )
    run(residual_norm.TEMPLATE, problem, inputs)
    return outputs


def _residual_norm_fake(
    branch0: torch.Tensor,
    branch0_weight: torch.Tensor,
    residual: torch.Tensor,
    branch1: torch.Tensor | None,
    branch1_weight: torch.Tensor | None,
    sum_weight: torch.Tensor | None,
    scalar: torch.Tensor | None,
    norm_weights: list[torch.Tensor],
    router: bool,
    root: float,
    eps: float,
) -> list[torch.Tensor]:
    return [_rows(residual, residual.shape[1]) for _ in range(1 + len(norm_weights))]


def _qkv_norm_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    query_heads: int,
    kv_heads: int,
    kv: str,
    rotary_pairs: int,
    eps: float,
) -> list[torch.Tensor]:
    head_dim = q_weight.shape[0]
    outputs = _qkv_outputs(qkv, query_heads, kv_heads, kv, head_dim)
    inputs = qkv_norm_rope.QkvNormRopeInputs(
        qkv, positions, cos_sin, q_weight, k_weight, query_heads, kv_heads, kv, rotary_pairs, eps
    )
    for name, output in zip(("q_out", "k_out", "v_out"), outputs, strict=False):
        setattr(inputs, name, output)
    problem = qkv_norm_rope.Problem(
        _tokens(qkv), query_heads, kv_heads, head_dim, kv, rotary_pairs, dtype_name(qkv.dtype)
    )
    run(qkv_norm_rope.TEMPLATE, problem, inputs)
    return outputs


def _qkv_outputs(
    qkv: torch.Tensor, query_heads: int, kv_heads: int, kv: str, head_dim: int
) -> list[torch.Tensor]:
    heads = [query_heads] if kv == "shared" else [query_heads, kv_heads, kv_heads]
    return [_rows(qkv, count * head_dim) for count in heads]


def _qkv_norm_rope_fake(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    query_heads: int,
    kv_heads: int,
    kv: str,
    rotary_pairs: int,
    eps: float,
) -> list[torch.Tensor]:
    return _qkv_outputs(qkv, query_heads, kv_heads, kv, q_weight.shape[0])


def _gelu_mul(gate: torch.Tensor, up: torch.Tensor, up_stride: int) -> torch.Tensor:
    output = _rows(gate, gate.shape[1])
    operand = "halves" if up_stride == 2 * gate.shape[1] else "ple"
    problem = gelu_mul.Problem(
        _tokens(gate), gate.shape[1], operand, up_stride, dtype_name(gate.dtype)
    )
    run(gelu_mul.TEMPLATE, problem, gelu_mul.GeluMulInputs(gate, up, output))
    return output


def _gelu_mul_halves(gate_up: torch.Tensor) -> torch.Tensor:
    width = gate_up.shape[1] // 2
    return _gelu_mul(gate_up[:, :width], gate_up[:, width:], 2 * width)


def _moe_routing(
    logits: torch.Tensor, per_expert_scale: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = _moe_routing_fake(logits, per_expert_scale, top_k)
    inputs = moe_routing.MoeRoutingInputs(logits, per_expert_scale, top_k, weights, ids)
    problem = moe_routing.Problem(
        _tokens(logits),
        logits.shape[1],
        top_k,
        dtype_name(logits.dtype),
        dtype_name(per_expert_scale.dtype),
    )
    run(moe_routing.TEMPLATE, problem, inputs)
    return weights, ids


def _moe_routing_fake(
    logits: torch.Tensor, per_expert_scale: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )


_library = torch.library.Library("gemma_tune", "FRAGMENT")


def _define(schema: str, run_it: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run_it, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gemma_tune::{name}", fake, lib=_library)


_define(
    "residual_norm(Tensor branch0, Tensor branch0_weight, Tensor residual, Tensor? branch1, "
    "Tensor? branch1_weight, Tensor? sum_weight, Tensor? scalar, Tensor[] norm_weights, "
    "bool router, float root, float eps) -> Tensor[]",
    _residual_norm,
    _residual_norm_fake,
)
_define(
    "qkv_norm_rope(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor q_weight, "
    "Tensor? k_weight, int query_heads, int kv_heads, str kv, int rotary_pairs, float eps) "
    "-> Tensor[]",
    _qkv_norm_rope,
    _qkv_norm_rope_fake,
)
_define(
    "gelu_mul(Tensor gate_up) -> Tensor",
    _gelu_mul_halves,
    lambda gate_up: _rows(gate_up, gate_up.shape[1] // 2),
)
_define(
    "gelu_mul_ple(Tensor gate, Tensor up, int up_stride) -> Tensor",
    _gelu_mul,
    lambda gate, up, up_stride: _rows(gate, gate.shape[1]),
)
_define(
    "moe_routing(Tensor logits, Tensor per_expert_scale, int top_k) -> (Tensor, Tensor)",
    _moe_routing,
    _moe_routing_fake,
)
