"""The class that vLLM builds for Gemma 4's text model: its own, and afterwards ours looks at it."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models import gemma4

from . import settings


class Gemma4ForCausalLM(gemma4.Gemma4ForCausalLM):  # type: ignore[misc]
    """vLLM's model, whose modules get plans once they exist (see ``attach``)."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if settings.confirm_asked():
            # Before the parameters take their memory.
            from .confirming import once

            once(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        try:
            from .attach import attach

            attach(self, vllm_config)
        except Exception as error:
            settings.log.warning(
                "gemma-tune: inactive, vLLM runs stock: %s: %s", type(error).__name__, error
            )
