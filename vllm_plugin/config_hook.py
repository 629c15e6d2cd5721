"""What the plugin changes in vLLM's config, when the config is made and before anything reads it.

vLLM lets each architecture change the config (``MODELS_CONFIG_MAP``) at the very start of
``VllmConfig.__post_init__``: before it chooses its runner, checks one setting against another,
sizes CUDA graphs or hashes anything.  That hook is wrapped: first vLLM's own, then ours.  It runs
where the config is made, the front end; the engine and its workers get the result.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from . import settings
from .contract import ARCHITECTURES, CONFIG_MAP

MODULE = "vllm.model_executor.models.config"
#: Attribute of our classes in the map: the class of vLLM's that each stands for.
STANDS_FOR = "_gemma_tune_stands_for"


def install() -> None:
    """Wrap the entries of all Gemma 4 architectures; harmless when done again."""
    known = getattr(importlib.import_module(MODULE), CONFIG_MAP)
    for architecture in ARCHITECTURES:
        stock = known.get(architecture)
        if stock is not None and not hasattr(stock, STANDS_FOR):
            known[architecture] = _wrapped(stock)


def remove() -> None:
    """Put vLLM's own entries back."""
    known = getattr(importlib.import_module(MODULE), CONFIG_MAP)
    for architecture in ARCHITECTURES:
        stock = getattr(known.get(architecture), STANDS_FOR, None)
        if stock is not None:
            known[architecture] = stock


@functools.cache
def _wrapped(stock: type) -> type:
    def verify_and_update_config(vllm_config: Any) -> None:
        stock.verify_and_update_config(vllm_config)  # type: ignore[attr-defined]
        change(vllm_config)

    members = {
        "verify_and_update_config": staticmethod(verify_and_update_config),
        STANDS_FOR: stock,
        "__module__": stock.__module__,
        "__doc__": stock.__doc__,
    }
    return type(stock.__name__, (stock,), members)


def change(vllm_config: Any) -> None:
    """Advice, fast prefill and block size; each for itself, never raises."""
    from . import advice, block_size, fast_prefill

    for part in (advice, fast_prefill, block_size):
        try:
            part.change(vllm_config)
        except Exception as error:
            settings.log.warning(
                "gemma-tune: %s is left as it was: %s: %s",
                part.__name__.rpartition(".")[2].replace("_", " "),
                type(error).__name__,
                error,
            )
