"""Which attention layers of a Gemma 4 the tables serve, said when the model is built.

The cache does not exist yet: the block sizes are those that vLLM will give (see
``kernel_templates.attention_problem.problem_kinds``).  A call decides by what it really has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernel_templates import attention_decode, attention_prefill
from kernel_templates.attention_problem import Problem

from . import ops
from .report import Report
from .tables import Choices, Decision

TRITON = "TRITON_ATTN"

#: Backends that call vLLM's Triton function for some of their batches (0.33).
COMPOSITES = {
    "TRITON_FLASH_ATTN": "batches with images",
    "TRITON_FLASHINFER": "batches with images",
}


def backend(layer: Any) -> str:
    """The name of the attention backend that vLLM selected for an ``Attention`` layer."""
    return str(layer.attn_backend.get_name())


def selection(vllm_config: Any) -> tuple[str, str]:
    """The backend that the config asks for and who asked: ("auto", ...) where vLLM will choose.

    vLLM's own choice for Gemma 4 is written into the config when it is made, so the config cannot
    tell a user's choice from it afterwards.
    """
    config = vllm_config.attention_config
    kinds = getattr(config, "backend_per_kind", None) or {}
    if kinds:
        chosen = ", ".join(f"{kind}: {name_of(each)}" for kind, each in sorted(kinds.items()))
        return chosen, "asked for kind by kind"
    if config.backend is None:
        return "auto", "vLLM selects for each layer"
    return name_of(
        config.backend
    ), "asked for, or vLLM's choice for Gemma 4 without FlashAttention 4"


def name_of(backend: Any) -> str:
    return str(getattr(backend, "name", backend))


def problems(layers: Sequence[Any], vllm_config: Any) -> list[Problem | str]:
    """What each ``Gemma4Attention`` asks of a kernel, or why it asks vLLM's backend."""
    base = vllm_config.cache_config.block_size
    widest = max((layer.num_kv_heads * layer.head_dim for layer in layers), default=1)
    dtype = ops.dtype_name(vllm_config.model_config.dtype)
    return [_problem(layer, base, widest, dtype) for layer in layers]


def _problem(layer: Any, base: int, widest: int, dtype: str) -> Problem | str:
    attention = layer.attn
    name = backend(attention)
    if name != TRITON:
        served = COMPOSITES.get(name)
        return f"{name} is selected" + (f", which calls {TRITON} for {served}" if served else "")
    cache = str(attention.kv_cache_dtype)
    if attention.query_quant is not None:
        return f"vLLM quantises queries with a {cache} cache"
    # Of another type than the model's, but for fp8, is left to the first call.
    kv_dtype = "float8_e4m3fn" if cache in ("fp8", "fp8_e4m3") else "same"
    if kv_dtype == "same" and cache not in ("auto", "float16", "bfloat16"):
        return f"a {cache} cache has no kernel"
    return Problem(
        tokens=1,
        queries=1,
        context=0,
        query_heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        window=int(attention.sliding_window or 0),
        block_size=base * max(1, widest // (layer.num_kv_heads * layer.head_dim)),
        softcap=float(getattr(attention.impl, "logits_soft_cap", 0.0) or 0.0),
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


def plan(layers: Sequence[Any], vllm_config: Any, choices: Choices, report: Report) -> None:
    """Decide for every layer, prefill and decode apart, and put the wrapper in place if it serves.

    Never raises: attention is left to vLLM with the reason.
    """
    try:
        served = _decide(layers, vllm_config, choices, report)
        if served:
            from . import attention, attention_warmup

            attention.install(choices)
            attention_warmup.register(served, choices)
    except Exception as error:
        reason = (
            str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
        )
        for decision in [
            each for each in report.decisions if each.template.startswith("attention")
        ]:
            del report.decisions[decision]
        report.add(Decision("attention", "all layers", False, reason))


def _decide(
    layers: Sequence[Any], vllm_config: Any, choices: Choices, report: Report
) -> list[tuple[Any, Problem]]:
    """The templates that serve, each with the kind of layer."""
    served: dict[tuple[Any, Problem], None] = {}
    for problem in problems(layers, vllm_config):
        if isinstance(problem, str):
            report.add(Decision("attention", "backend", False, problem))
            continue
        for template in (attention_prefill, attention_decode):
            decision = choices.decide(template.TEMPLATE.name, template.asked(problem))
            if report.add(decision):
                served[template, problem] = None
    return list(served)
