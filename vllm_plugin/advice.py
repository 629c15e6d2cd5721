"""Settings that vLLM fails on later, said in plain words at the start.

Nothing here changes a setting or stops a server: each is one WARNING, before vLLM builds anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import settings


def change(vllm_config: Any) -> None:
    """Log what is wrong with a config; changes nothing."""
    for text in warnings(vllm_config):
        settings.warn_once(text, "gemma-tune: %s", text)


def warnings(vllm_config: Any) -> list[str]:
    """One text for each setting that will fail."""
    return [text for find in (_pipeline, _draft_backend) if (text := find(vllm_config)) is not None]


def _pipeline(config: Any) -> str | None:
    ranks = config.parallel_config.pipeline_parallel_size
    text = config.model_config.hf_text_config
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if ranks <= 1 or not shared:
        return None
    count = text.num_hidden_layers
    starts = _first_layers(count, ranks)
    found = separated(text.layer_types, shared, starts)
    if not found:
        return None
    most = min(sources(text.layer_types, shared).values())
    layer, source = found[0]
    way = (
        f"VLLM_PP_LAYER_PARTITION={_partition(most, count, ranks)} does that"
        if ranks <= most + 1
        else f"{most + 1} ranks are the most"
    )
    return (
        f"pipeline ranks begin at layers {', '.join(map(str, starts))}, which separates "
        f"{len(found)} layers from those whose K and V they share (layer {layer} from {source}), "
        f"so vLLM will refuse to build the model. The layers from {most} on must be on one rank: "
        f"{way}"
    )


def _first_layers(count: int, ranks: int) -> list[int]:
    from vllm.distributed.utils import get_pp_indices

    return [get_pp_indices(count, rank, ranks)[0] for rank in range(ranks)]


def sources(layer_types: Sequence[str], shared: int) -> dict[int, int]:
    """The layer whose K and V each sharing layer reads: the last of its type that has its own.

    ValueError where there is none.
    """
    own = len(layer_types) - shared
    last = {kind: index for index, kind in enumerate(layer_types[:own])}
    missing = set(layer_types[own:]) - set(last)
    if missing:
        raise ValueError(f"no layer of type {', '.join(sorted(missing))} has K and V to share")
    return {index: last[layer_types[index]] for index in range(own, len(layer_types))}


def separated(
    layer_types: Sequence[str], shared: int, starts: Sequence[int]
) -> list[tuple[int, int]]:
    """Sharing layers and their sources that pipeline ranks beginning at ``starts`` keep apart."""

    def rank(layer: int) -> int:
        return sum(layer >= start for start in starts)

    pairs = sources(layer_types, shared).items()
    return [(layer, source) for layer, source in pairs if rank(layer) != rank(source)]


def _partition(most: int, count: int, ranks: int) -> str:
    """Layers per rank, as even as the last rank's share allows."""
    share, more = divmod(most, ranks - 1)
    sizes = [share + (rank < more) for rank in range(ranks - 1)]
    return ",".join(map(str, [*sizes, count - most]))


def _draft_backend(config: Any) -> str | None:
    speculative = config.speculative_config
    own = getattr(speculative, "use_gemma4_mtp", None)
    if own is None or not own():
        return None
    target, draft = (
        getattr(backend, "name", backend)
        for backend in (config.attention_config.backend, speculative.attention_backend)
    )
    if draft is None or draft == target:
        return None
    return (
        f"the draft's attention backend is {draft}, the target's is {target or 'chosen by vLLM'}: "
        "Gemma 4's drafter reads the target's KV cache, so both must be the same. Leave "
        "attention_backend out of --speculative-config, or give --attention-backend the same one"
    )
