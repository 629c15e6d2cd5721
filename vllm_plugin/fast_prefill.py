"""vLLM's fast prefill for models whose last layers share K and V, on where it is legal and wins.

Layers that share another's KV cache add nothing to it.  So of a prompt they need only the tokens
whose logits someone wants: the last.  vLLM has that as ``kv_sharing_fast_prefill``, off by default.
Measured on an H200 with vLLM 0.26 and the E2B (20 of 35 layers share): prompts 2.2 to 2.7 times as
fast; decode from 13 % slower to 3 % faster, because 0.26 to 0.29 fall back to an older runner with
it.  A server that only decodes may want it off.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import Any

from . import settings

OFF_OPTION = "--no-kv-sharing-fast-prefill"

#: Backends that it was measured with; None and "auto" are vLLM's choice for Gemma 4, one of them.
BACKENDS = (None, "auto", "TRITON_ATTN", "FLASH_ATTN")


def change(vllm_config: Any) -> None:
    """Switch it on, or log why not."""
    cache = vllm_config.cache_config
    if cache.kv_sharing_fast_prefill:
        return
    reason = reason_against(vllm_config)
    if reason is not None:
        settings.log.info("gemma-tune: fast prefill stays off: %s", reason)
        return
    refuse_prompt_logprobs()
    cache.kv_sharing_fast_prefill = True
    text = vllm_config.model_config.hf_text_config
    settings.log.info(
        "gemma-tune: fast prefill is on: of a prompt, the %d of %d layers that share K and V see "
        "only the tokens whose logits are wanted%s. Prompt log-probabilities are not available "
        "with it; %s=0 turns it off.",
        text.num_kv_shared_layers,
        text.num_hidden_layers,
        "; this vLLM runs it in its older runner" if _older_runner(vllm_config) else "",
        settings.FAST_PREFILL_VARIABLE,
    )


def refuse_prompt_logprobs() -> None:
    """Let vLLM's front end refuse requests for log-probabilities of the prompt's tokens.

    Most of those tokens never reach the last layers.  The server refuses by itself, but an offline
    ``LLM`` stops with an assertion (0.26 to 0.29) or returns wrong values (0.30 to 0.33).
    """
    from vllm.v1.engine.input_processor import InputProcessor

    stock = InputProcessor.process_inputs
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kw: Any
    ) -> Any:
        wanted = getattr(params, "prompt_logprobs", None)
        if wanted is not None and self.vllm_config.cache_config.kv_sharing_fast_prefill:
            raise ValueError(
                f"prompt_logprobs={wanted}: not available with fast prefill, which gemma-tune has "
                f"switched on; {settings.FAST_PREFILL_VARIABLE}=0 leaves it off"
            )
        return stock(self, request_id, prompt, params, *args, **kw)

    InputProcessor.process_inputs = process_inputs


def reason_against(config: Any) -> str | None:
    """Why fast prefill is not switched on for a server with this config, or None."""
    if not settings.fast_prefill_allowed():
        return f"{settings.FAST_PREFILL_VARIABLE}=0"
    if OFF_OPTION in sys.argv:
        return f"{OFF_OPTION} is given"
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    backend = getattr(config.attention_config.backend, "name", config.attention_config.backend)
    reasons = (
        (shared <= 0, "the model has no layers that share K and V"),
        (shared >= text.num_hidden_layers, "all layers share K and V"),
        (
            getattr(model, "runner_type", "generate") != "generate",
            "the server does not generate: pooling needs every token's hidden state",
        ),
        (
            config.speculative_config is not None,
            "speculative decoding is on: drafters need every token's hidden state",
        ),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism is on"),
        (
            max(
                getattr(parallel, f"{kind}_context_parallel_size", 1) or 1
                for kind in ("prefill", "decode")
            )
            > 1,
            "context parallelism is on",
        ),
        (bool(getattr(parallel, "enable_dbo", False)), "batches are split in two (DBO)"),
        (config.kv_transfer_config is not None, "the KV cache goes to other servers"),
        (config.lora_config is not None, "LoRA is on: adapters are assigned by token"),
        (getattr(model, "quantization", None) is not None, "quantised weights: not measured"),
        (_batch_invariant(), "batch invariance is asked for"),
        (
            backend not in BACKENDS
            or bool(getattr(config.attention_config, "backend_per_kind", {})),
            "the attention backend is not one that it was measured with",
        ),
        (
            bool(getattr(model, "is_mm_prefix_lm", False)) and _takes_images(model),
            "images are attended to in both directions, which the layers that share K and V would "
            "miss; --language-model-only or a limit of 0 images and videos allows it",
        ),
        (
            _newer_runner_forced() and _older_runner(config),
            "VLLM_USE_V2_MODEL_RUNNER asks for a runner that does not have it in this vLLM",
        ),
        (not _platform_has_triton(), "no GPU that runs Triton"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _takes_images(model: Any) -> bool:
    limits = getattr(model, "multimodal_config", None)
    if limits is None or limits.language_model_only:
        return False
    return any(limits.get_limit_per_prompt(kind) > 0 for kind in ("image", "video"))


def _batch_invariant() -> bool:
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def _newer_runner_forced() -> bool:
    from vllm import envs

    return bool(getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", None))


def _older_runner(config: Any) -> bool:
    """Whether this vLLM's newer runner lacks fast prefill (0.26 to 0.29), by its own list."""
    lacks = getattr(type(config), "_get_v2_model_runner_unsupported_features", None)
    return lacks is not None and "KV sharing fast prefill" in inspect.getsource(lacks)


def _platform_has_triton() -> bool:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return bool(HAS_TRITON and (current_platform.is_cuda() or interpreted))
