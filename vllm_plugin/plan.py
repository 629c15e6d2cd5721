"""Which modules of a Gemma 4 run which of our kernels, one decision per kind, with reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.activation import GeluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.gemma4_rope import Gemma4RotaryEmbedding
from vllm.model_executor.models import gemma4

from kernel_templates import gelu_mul, moe_routing, qkv_norm_rope, residual_norm

from . import layers, ops
from .report import Report
from .tables import Choices, Decision


class NotAsExpected(Exception):
    """What about a module rules our kernel out."""


def expect(holds: bool, otherwise: str) -> None:
    """Raise NotAsExpected unless ``holds``."""
    if not holds:
        raise NotAsExpected(otherwise)


class Planner:
    """Plans the modules of one model.

    ``unknown`` maps a hot path to why vLLM's source rules it out (see ``contract.unknown``).
    """

    def __init__(
        self, choices: Choices, report: Report, vllm_config: Any, unknown: Mapping[str, str]
    ) -> None:
        self.choices = choices
        self.report = report
        self.config = vllm_config
        self.unknown = unknown
        self.dtype = vllm_config.model_config.dtype
        self.name = ops.dtype_name(self.dtype)
        self.linked: list[Any] = []
        #: The ``Gemma4Attention`` of every layer that was looked at.
        self.attention: list[Any] = []

    def plan(self, model: Any) -> None:
        """Give every module of a ``Gemma4Model`` on this rank that can have one its plan."""
        own = [
            layer
            for layer in list(model.layers)[model.start_layer : model.end_layer]
            if type(layer) is gemma4.Gemma4DecoderLayer
        ]
        for layer in own:
            self._try("gelu_mul", layer.mlp, "mlp", partial(self._mlp, layer.mlp))
            attention = layer.self_attn
            self.attention.append(attention)
            self._try("qkv_norm_rope", attention, "attention", partial(self._attention, attention))
            self._try("residual_norm", layer, "layer", partial(self._layer, layer, model))
            if getattr(layer, "enable_moe_block", False):
                self._try("moe_routing", None, "routing", partial(self._routing, layer))
        self._link(model)

    def active(self) -> dict[str, Any]:
        """What is active, for the digest: equal plans give equal values."""
        kinds = sorted(
            f"{decision.template} {decision.kind} {count}"
            for decision, count in self.report.decisions.items()
            if decision.active
        )
        linked = sum(plan.next_norm is not None for plan in self._linked_plans())
        return {"kinds": kinds, "linked": linked, "dtype": self.name}

    def unlink(self) -> bool:
        """Let every layer make its own input norm; whether that changed any."""
        linked = [plan for plan in self._linked_plans() if plan.next_norm is not None]
        for plan in linked:
            plan.next_norm = None
        return bool(linked)

    def _linked_plans(self) -> list[layers.LayerPlan]:
        # A layer may have lost its plan since: see ``attach.detach``.
        plans = (layer.__dict__.get(layers.PLAN) for layer in self.linked)
        return [plan for plan in plans if plan is not None]

    def watch_auxiliary(self, model: Any, changed: Callable[[], None]) -> None:
        """Unlink layers when someone asks for hidden states between them.

        vLLM would add what a layer returns as ``residual`` to those.
        """
        if not self.linked:
            return
        stock = model._set_aux_hidden_state_layers

        def watched(wanted: tuple[int, ...]) -> Any:
            result = stock(wanted)
            if wanted and self.unlink():
                changed()
            return result

        model.__dict__["_set_aux_hidden_state_layers"] = watched

    def _try(self, template: str, module: Any, path: str, make: Callable[[], Any]) -> None:
        try:
            expect(path not in self.unknown, self.unknown.get(path, ""))
            plan = make()
        except NotAsExpected as error:
            self.report.add(Decision(template, path, False, str(error)))
            return
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.report.add(Decision(template, path, False, reason))
            return
        if plan is not None and module is not None:
            module.__dict__[layers.PLAN] = plan

    def _decide(self, template: str, problem: Any) -> bool:
        return self.report.add(self.choices.decide(template, problem))

    def _norm(self, norm: Any, width: int, eps: float, weight: bool = True) -> None:
        expect(type(norm) is RMSNorm, f"a norm is {type(norm).__name__}, wanted RMSNorm")
        expect(norm.has_weight is weight, "a norm has or lacks a weight against expectation")
        expect(norm.variance_epsilon == eps, "norms differ in epsilon")
        expect(
            getattr(norm, "variance_size_override", None) is None, "a norm covers part of its row"
        )
        if weight:
            expect(
                norm.weight.shape == (width,) and norm.weight.dtype == self.dtype,
                f"a norm's weight is {norm.weight.dtype} {tuple(norm.weight.shape)}, "
                f"wanted {self.dtype} {(width,)}",
            )

    def _mlp(self, mlp: Any) -> layers.MlpPlan | None:
        expect(type(mlp) is gemma4.Gemma4MLP, f"the MLP is {type(mlp).__name__}")
        act = mlp.act_fn
        expect(
            type(act) is GeluAndMul and act.approximate == "tanh",
            f"the activation is {type(act).__name__}, wanted GeluAndMul(tanh)",
        )
        width = mlp.down_proj.input_size_per_partition
        problem = gelu_mul.Problem(1, width, "halves", 2 * width, self.name)
        return layers.MlpPlan() if self._decide("gelu_mul", problem) else None

    def _attention(self, attn: Any) -> layers.AttentionPlan | None:
        expect(type(attn) is gemma4.Gemma4Attention, f"attention is {type(attn).__name__}")
        eps, width = attn.q_norm.variance_epsilon, attn.head_dim
        self._norm(attn.q_norm, width, eps)
        shared = bool(attn.is_kv_shared_layer)
        q_only = not hasattr(attn, "qkv_proj")
        expect(shared or not q_only, "attention has no qkv_proj")
        expect(not q_only or hasattr(attn, "q_proj"), "attention has neither qkv_proj nor q_proj")
        k_eq_v = bool(getattr(attn.config, "attention_k_eq_v", False)) and not attn.is_sliding
        if not shared:
            self._norm(attn.k_norm, width, eps)
            self._norm(attn.v_norm, width, eps, weight=False)
        rope = attn.rotary_emb
        if type(rope) is Gemma4RotaryEmbedding:
            pairs = rope.rope_angles
        else:
            expect(type(rope) is RotaryEmbedding, f"RoPE is {type(rope).__name__}")
            pairs = rope.rotary_dim // 2
        expect(
            rope.is_neox_style and rope.rotary_dim == width == rope.head_size,
            "RoPE is not neox-style over the whole head",
        )
        kv = "shared" if shared else "k_eq_v" if k_eq_v else "separate"
        problem = qkv_norm_rope.Problem(
            1, attn.num_heads, attn.num_kv_heads, width, kv, pairs, self.name
        )
        if not self._decide("qkv_norm_rope", problem):
            return None
        return layers.AttentionPlan(kv, q_only, pairs, eps)

    def _layer(self, layer: Any, model: Any) -> layers.LayerPlan | None:
        hidden, moe = layer.hidden_size, bool(layer.enable_moe_block)
        eps = layer.input_layernorm.variance_epsilon
        names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        norms = [getattr(layer, f"{name}_layernorm") for name in names]
        experts = ""
        if moe:
            experts = "experts" if hasattr(layer, "experts") else "moe"
            expect(hasattr(layer, experts), "the layer has neither experts nor moe")
            norms += [
                layer.post_feedforward_layernorm_1,
                layer.post_feedforward_layernorm_2,
                layer.pre_feedforward_layernorm_2,
            ]
            self._norm(layer.router.norm, hidden, eps, weight=False)
            expect(layer.router.scale.dtype == self.dtype, "the router's scale has another dtype")
        ple = layer.per_layer_input_gate is not None
        if ple:
            norms.append(layer.post_per_layer_input_norm)
        for norm in norms:
            self._norm(norm, hidden, eps)
        scalar = layer.layer_scalar
        expect(scalar.numel() == 1 and scalar.dtype == self.dtype, "the layer scalar is unusual")

        branches = 2 if moe else 1
        kinds = [(1, False, 3 if moe else 1, moe)]
        kinds += [(branches, False, 0, False), (1, True, 1, False)] if ple else []
        kinds += [] if ple else [(branches, True, 1, False)]
        problems = [residual_norm.Problem(1, hidden, *kind, self.name) for kind in kinds]
        # Every kind is decided, for the report, before the answer.
        decided = [self._decide("residual_norm", problem) for problem in problems]
        if not all(decided):
            return None
        # The last layer has no following norm: the same kernel with less to do.
        last = {**vars(problems[-1]), "norms": 0}
        self.choices.borrow("residual_norm", last, {"norms": 1})
        stride = 0
        if ple:
            width = layer.hidden_size_per_layer_input
            problem = gelu_mul.Problem(
                1, width, "ple", model.config.num_hidden_layers * width, self.name
            )
            stride = problem.up_stride if self._decide("gelu_mul", problem) else 0
        return layers.LayerPlan(eps, experts, residual_norm.router_root(hidden, self.dtype), stride)

    def _routing(self, layer: Any) -> None:
        scale = getattr(layer.router, "per_expert_scale", None)
        if scale is None:
            scale = layer.moe.per_expert_scale
        proj, top_k = layer.router.proj, self.config.model_config.hf_text_config.top_k_experts
        logits = getattr(proj, "out_dtype", None) or self.dtype
        expect(logits == torch.float32, f"router logits are {logits}, wanted float32")
        problem = moe_routing.Problem(
            1, scale.shape[0], top_k, "float32", ops.dtype_name(scale.dtype)
        )
        if self._decide("moe_routing", problem):
            layers.route(scale.shape[0], top_k, scale.dtype)

    def _link(self, model: Any) -> None:
        """Let planned layers make their successor's input norm, within one run of layers.

        With fast prefill vLLM runs the KV-shared layers apart and starts them without residual.
        """
        if "next norm" in self.unknown or not hasattr(model, "_set_aux_hidden_state_layers"):
            return
        split = None
        if getattr(self.config.cache_config, "kv_sharing_fast_prefill", False):
            text = model.config
            split = text.num_hidden_layers - getattr(text, "num_kv_shared_layers", 0)
        if getattr(model, "aux_hidden_state_layers", ()):
            return
        for index in range(model.start_layer, model.end_layer - 1):
            one, following = model.layers[index], model.layers[index + 1]
            if (
                index + 1 != split
                and layers.PLAN in one.__dict__
                and layers.PLAN in following.__dict__
            ):
                one.__dict__[layers.PLAN].next_norm = following.input_layernorm
                self.linked.append(one)
