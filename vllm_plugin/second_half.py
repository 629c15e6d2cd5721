"""Fast prefill's second half, replayed from the CUDA graphs that vLLM has captured for it.

With fast prefill the layers that share another's KV cache see only the tokens whose logits someone
wants: a few of thousands.  vLLM captures graphs of those layers for every capture size, pads the
few tokens to such a size and names it in the forward context, but leaves the context's mode at what
the whole batch has: a prompt's thousands of tokens have no graph, so the few run without one, too,
some 20 layers whose launches take longer than their work.  Here the mode follows the size: where
the graphs of that size were captured, they are replayed, as they are for any small mixed batch.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.models import gemma4

#: The attribute of a model's second half that holds the sizes captured, as batch descriptors.
CAPTURED = "_gemma_tune_captured"


def serve(model: Any) -> None:
    """Let the second half of a ``Gemma4Model`` replay its graphs from now on."""
    half = model.cross_decoder
    _patch(type(half))
    half.__dict__[CAPTURED] = set()


def leave(model: Any) -> None:
    """Run it as vLLM does again."""
    half = getattr(model, "cross_decoder", None)
    if half is not None:
        half.__dict__.pop(CAPTURED, None)


_stock: dict[type, Any] = {}


def _patch(owner: type) -> None:
    if owner in _stock:
        return
    stock = _stock[owner] = owner.__call__

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        captured = self.__dict__.get(CAPTURED)
        if captured is None:
            return stock(self, *args, **kwargs)
        context = get_forward_context()
        mode = context.cudagraph_runtime_mode
        if mode == CUDAGraphMode.PIECEWISE:
            # Captures where it is the first of its size, else replays: either way it is there then.
            result = stock(self, *args, **kwargs)
            captured.add(context.batch_descriptor)
            return result
        if not replayable(context, captured):
            return stock(self, *args, **kwargs)
        context.cudagraph_runtime_mode = CUDAGraphMode.PIECEWISE
        try:
            return stock(self, *args, **kwargs)
        finally:
            context.cudagraph_runtime_mode = mode

    owner.__call__ = call  # type: ignore[method-assign]


def replayable(context: Any, captured: set[Any]) -> bool:
    """Whether the second half of this forward pass, run without graphs, has graphs all the same.

    Not in profile runs (no metadata), microbatches (a list of metadata), or where vLLM goes around
    the compiled code.
    """
    return (
        context.cudagraph_runtime_mode == CUDAGraphMode.NONE
        and isinstance(context.attn_metadata, dict)
        and not getattr(context, "skip_compiled", False)
        and getattr(context, "ubatch_slices", None) is None
        and context.batch_descriptor is not None
        and replace(context.batch_descriptor, num_reqs=None, uniform=False)
        == context.batch_descriptor
        and context.batch_descriptor in captured
    )


def reason_against(model: Any, config: Any) -> str | None:
    """Why the second half has no graphs to replay, or None."""
    if not getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "fast prefill is off"
    if type(getattr(model, "cross_decoder", None)) is not gemma4.Gemma4CrossDecoderLayers:
        return "the model has no second half as known"
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    if mode is None or mode.mixed_mode() != CUDAGraphMode.PIECEWISE:
        name = "none" if mode is None else mode.name
        return f"mixed batches have no piecewise CUDA graphs (cudagraph_mode {name})"
    return None
