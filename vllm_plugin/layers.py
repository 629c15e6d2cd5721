"""Gemma 4's forward passes with our kernels, in place of vLLM's.

A module without a plan (see ``plan``) runs vLLM's own forward, as does one that meets something
unforeseen.  Matrix products, attention, experts and communication stay vLLM's modules and are
called as such, so whatever wraps or quantises them still applies.

The norm across layers: vLLM hands the second value that a layer returns to the next layer as
``residual``, and Gemma 4 leaves it None.  Where the next layer is ours too, we return its normed
input there; vLLM's own layer overwrites what it gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models import gemma4

from . import ops  # noqa: F401  the operators below

#: The attribute of a module that holds its plan.
PLAN = "_gemma_tune"


@dataclass
class LayerPlan:
    """A decoder layer's.  ``experts`` names the experts' attribute ("" without any), ``root`` is
    the router's hidden ** -0.5, ``ple_stride`` the elements between tokens of the per-layer
    embedding (0: vLLM's own gelu * up), ``next_norm`` the next layer's input norm if it takes it.
    """

    eps: float
    experts: str
    root: float
    ple_stride: int
    next_norm: nn.Module | None = None


@dataclass(frozen=True)
class AttentionPlan:
    """An attention module's.  ``kv`` as in ``qkv_norm_rope``; ``q_only`` where the projection has
    no K and V columns and attention takes none (KV-shared layers of newer vLLM)."""

    kv: str
    q_only: bool
    rotary_pairs: int
    eps: float


@dataclass(frozen=True)
class MlpPlan:
    """A feed-forward block's: nothing to know but that it is ours."""


_stock: dict[type, Any] = {}


def layer_forward(
    self: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    per_layer_input: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``Gemma4DecoderLayer.forward``."""
    plan = getattr(self, PLAN, None)
    if plan is None or hidden_states.dim() != 2:
        return _stock[gemma4.Gemma4DecoderLayer](  # type: ignore[no-any-return]
            self, positions, hidden_states, residual, per_layer_input=per_layer_input, **kwargs
        )
    normed = self.input_layernorm(hidden_states) if residual is None else residual
    attended = self.self_attn(positions=positions, hidden_states=normed, **kwargs)
    second = second_weight = sum_weight = None
    if plan.experts:
        stream, mlp_in, experts_in, router_in = _fused(
            plan,
            attended,
            self.post_attention_layernorm.weight,
            hidden_states,
            norms=[
                self.pre_feedforward_layernorm.weight,
                self.pre_feedforward_layernorm_2.weight,
                self.router.scale,
            ],
            router=True,
        )
        first, first_weight = self.mlp(mlp_in), self.post_feedforward_layernorm_1.weight
        logits, _ = self.router.proj(router_in)
        second = getattr(self, plan.experts)(experts_in, logits)
        second_weight = self.post_feedforward_layernorm_2.weight
        sum_weight = self.post_feedforward_layernorm.weight
    else:
        stream, mlp_in = _fused(
            plan,
            attended,
            self.post_attention_layernorm.weight,
            hidden_states,
            norms=[self.pre_feedforward_layernorm.weight],
        )
        first, first_weight = self.mlp(mlp_in), self.post_feedforward_layernorm.weight

    if per_layer_input is not None and self.per_layer_input_gate is not None:
        (stream,) = _fused(plan, first, first_weight, stream, second, second_weight, sum_weight)
        first = self.per_layer_projection(_ple(self, plan, stream, per_layer_input))
        first_weight = self.post_per_layer_input_norm.weight
        second = second_weight = sum_weight = None
    following = [] if plan.next_norm is None else [plan.next_norm.weight]
    outputs = _fused(
        plan,
        first,
        first_weight,
        stream,
        second,
        second_weight,
        sum_weight,
        norms=following,
        scalar=self.layer_scalar,
    )
    return outputs[0], outputs[1] if following else None


def _fused(
    plan: LayerPlan,
    branch: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    branch1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    sum_weight: torch.Tensor | None = None,
    norms: list[torch.Tensor] | None = None,
    router: bool = False,
    scalar: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    return torch.ops.gemma_tune.residual_norm(  # type: ignore[no-any-return]
        branch, weight, residual, branch1, weight1, sum_weight, scalar, norms or [], router,
        plan.root, plan.eps,
    )  # fmt: skip


def _ple(
    layer: Any, plan: LayerPlan, stream: torch.Tensor, per_layer_input: torch.Tensor
) -> torch.Tensor:
    gate = layer.per_layer_input_gate(stream)
    if plan.ple_stride:
        return torch.ops.gemma_tune.gelu_mul_ple(gate, per_layer_input, plan.ple_stride)  # type: ignore[no-any-return]
    return torch.nn.functional.gelu(gate, approximate="tanh") * per_layer_input


def attention_forward(
    self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """``Gemma4Attention.forward``."""
    plan = getattr(self, PLAN, None)
    if plan is None or hidden_states.dim() != 2 or positions.dim() != 1:
        return _stock[gemma4.Gemma4Attention](self, positions, hidden_states, **kwargs)  # type: ignore[no-any-return]
    qkv, _ = (self.q_proj if plan.q_only else self.qkv_proj)(hidden_states)
    shared = plan.kv == "shared"
    heads = torch.ops.gemma_tune.qkv_norm_rope(
        qkv,
        positions,
        self.rotary_emb.cos_sin_cache,
        self.q_norm.weight,
        None if shared else self.k_norm.weight,
        self.num_heads,
        self.num_kv_heads,
        plan.kv,
        plan.rotary_pairs,
        plan.eps,
    )
    if not shared:
        attended = self.attn(heads[0], heads[1], heads[2])
    elif plan.q_only:
        attended = self.attn(heads[0], None, None)
    else:
        # Older vLLM wants K and V there; attention of a KV-shared layer reads neither.
        _, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        attended = self.attn(heads[0], key, value)
    output, _ = self.o_proj(attended)
    return output  # type: ignore[no-any-return]


def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """``Gemma4MLP.forward``."""
    if getattr(self, PLAN, None) is None or x.dim() != 2:
        return _stock[gemma4.Gemma4MLP](self, x)  # type: ignore[no-any-return]
    gate_up, _ = self.gate_up_proj(x)
    output, _ = self.down_proj(torch.ops.gemma_tune.gelu_mul(gate_up))
    return output  # type: ignore[no-any-return]


def patch() -> None:
    """Put the forward passes above in place, once; modules without a plan do not change."""
    for owner, forward in (
        (gemma4.Gemma4DecoderLayer, layer_forward),
        (gemma4.Gemma4Attention, attention_forward),
        (gemma4.Gemma4MLP, mlp_forward),
    ):
        if owner not in _stock:
            _stock[owner] = owner.forward
            owner.forward = forward


_ROUTING = ("gemma4_fused_routing_kernel_triton", "gemma4_routing_function_torch")
_routed: set[tuple[int, int, torch.dtype]] = set()
_wrapped = False


def route(experts: int, top_k: int, scale_dtype: torch.dtype) -> None:
    """Serve this kind of routing from now on, in place of vLLM's kernel and its CPU stand-in."""
    global _wrapped
    if not _wrapped:
        _wrapped = True
        for name in _ROUTING:
            setattr(gemma4, name, _routing(getattr(gemma4, name)))
    _routed.add((experts, top_k, scale_dtype))


def routed() -> list[tuple[int, int, torch.dtype]]:
    """The kinds of routing that are served: experts, experts of a token, dtype of their scale."""
    return sorted(_routed, key=str)


def unroute() -> None:
    """Serve no routing any more."""
    _routed.clear()


def _routing(stock: Any) -> Any:
    def routing(
        gating_output: torch.Tensor,
        topk: int,
        per_expert_scale: torch.Tensor,
        *args: Any,
        **kw: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = (gating_output.shape[-1], topk, per_expert_scale.dtype)
        if kind not in _routed or gating_output.dim() != 2 or gating_output.dtype != torch.float32:
            return stock(gating_output, topk, per_expert_scale, *args, **kw)  # type: ignore[no-any-return]
        return torch.ops.gemma_tune.moe_routing(gating_output, per_expert_scale, topk)  # type: ignore[no-any-return]

    return routing
