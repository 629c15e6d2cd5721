"""Gemma 4 text shapes of one rank, from a preset or from any Gemma 4 ``config.json``.

Splitting over tensor-parallel ranks follows vLLM 0.26 to 0.32
(``model_executor/models/gemma4.py``).  A checkpoint's own file is the authority; the presets are
read by the same parser.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernel_templates.base import LayerShape, ModelShape

from .model_config import ModelConfig, ModelConfigError, dtype_name, read_config_file

__all__ = [
    "ModelConfig",
    "ModelConfigError",
    "RankRow",
    "load_model",
    "per_rank_table",
    "preset_names",
    "read_config",
    "split",
]

PRESET_FOLDER = Path(__file__).with_name("presets")

_GEMMA4_ID = re.compile(r"gemma-?4-(?P<variant>.+)")


def preset_names() -> list[str]:
    """The names of the shipped presets."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.json"))


def load_model(spec: str, tp: int = 1, dtype: str | None = None) -> ModelShape:
    """The shapes of a Gemma 4 model on one of ``tp`` tensor-parallel ranks.

    ``spec`` is as for :func:`read_config`.  ``dtype`` (``bfloat16``, ``float16``, ``float32``)
    replaces the config's.  ModelConfigError when there is no such model, when it is not Gemma 4,
    or when it cannot be split.
    """
    return split(read_config(spec), tp, dtype)


def read_config(spec: str) -> ModelConfig:
    """Read and check the config that ``spec`` names.

    ``spec`` is a path of a ``config.json``, a folder that holds one, a preset (``e2b``), or a model
    id that contains a preset's name after ``gemma-4-`` (``google/gemma-4-E2B-it``); case does not
    matter in the latter two.  A file that exists wins over a preset of the same name: it is the
    authority.
    """
    # os.path rather than Path: it calls an overlong or malformed name absent instead of raising.
    path = os.path.expanduser(spec)
    folder = os.path.isdir(path)
    if folder and os.path.isfile(os.path.join(path, "config.json")):
        path = os.path.join(path, "config.json")
    if os.path.isfile(path):
        absolute = Path(path).resolve()
        name = absolute.parent.name if absolute.name == "config.json" else absolute.stem
        return read_config_file(Path(path), name)
    preset = _preset_of(spec)
    if preset is not None:
        return read_config_file(PRESET_FOLDER / f"{preset}.json", preset)
    found = "no config.json in this folder" if folder else "no such model"
    raise ModelConfigError(
        f"{spec or repr(spec)}: {found}; wanted a preset ({', '.join(preset_names())}), "
        "a config.json, or a folder that holds one"
    )


def split(config: ModelConfig, tp: int = 1, dtype: str | None = None) -> ModelShape:
    """The shapes of one of ``tp`` tensor-parallel ranks; ModelConfigError when it cannot be.

    Heads, MLP and expert widths are divided; where there are fewer KV heads than ranks, each rank
    holds a copy of one.  Hidden size, vocabulary, PLE width and number of experts are never split.
    """
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ModelConfigError(f"tensor-parallel size is {tp!r}, wanted an integer of 1 or more")
    text = config.text
    layers = tuple(
        dataclasses.replace(
            layer,
            query_heads=_divide(config, "num_attention_heads", layer.query_heads, tp),
            kv_heads=_divide_kv(config, index, layer.kv_heads, tp),
            intermediate_size=_divide(config, "intermediate_size", layer.intermediate_size, tp),
        )
        for index, layer in enumerate(config.layers())
    )
    expert_width = (config.has_moe and text.moe_intermediate_size) or 0
    return ModelShape(
        name=config.name,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        layers=layers,
        ple_width=text.hidden_size_per_layer_input or 0,
        num_experts=(config.has_moe and text.num_experts) or 0,
        top_k_experts=(config.has_moe and text.top_k_experts) or 0,
        moe_intermediate_size=_divide(config, "moe_intermediate_size", expert_width, tp),
        rms_eps=text.rms_norm_eps,
        final_softcap=text.final_logit_softcapping,
        dtype=config.dtype if dtype is None else dtype_name(dtype, "dtype argument"),
        tp=tp,
    )


@dataclass(frozen=True)
class RankRow:
    """One row of :func:`per_rank_table`: equal layers of one rank.

    ``kv_replicas`` ranks hold the same KV head.  ``refusal`` is the reason why the model cannot be
    split over ``tp`` ranks; the numbers are then 0.
    """

    tp: int
    kind: str = ""
    layers: int = 0
    head_dim: int = 0
    query_heads: int = 0
    kv_heads: int = 0
    kv_replicas: int = 0
    kv_shared: bool = False
    intermediate_size: int = 0
    moe_intermediate_size: int = 0
    refusal: str | None = None


def per_rank_table(spec: str, tps: Iterable[int]) -> list[RankRow]:
    """The shapes of one rank for every tensor-parallel size, equal layers in one row.

    A size that the model cannot be split over gives one row with its ``refusal``.
    """
    config = read_config(spec)
    rows: list[RankRow] = []
    for tp in tps:
        try:
            shape = split(config, tp)
        except ModelConfigError as error:
            rows.append(RankRow(tp=tp, refusal=str(error)))
            continue
        counts: dict[tuple[LayerShape, int], int] = {}
        for whole, layer in zip(config.layers(), shape.layers, strict=True):
            key = (layer, layer.kv_heads * tp // whole.kv_heads)
            counts[key] = counts.get(key, 0) + 1
        rows.extend(
            RankRow(
                tp=tp,
                kind=layer.kind,
                layers=count,
                head_dim=layer.head_dim,
                query_heads=layer.query_heads,
                kv_heads=layer.kv_heads,
                kv_replicas=replicas,
                kv_shared=layer.kv_shared,
                intermediate_size=layer.intermediate_size,
                moe_intermediate_size=shape.moe_intermediate_size,
            )
            for (layer, replicas), count in counts.items()
        )
    return rows


def _preset_of(spec: str) -> str | None:
    """The preset that a bare name or a model id means, by rule; a path that is absent means none.

    An assistant (``...-E2B-it-assistant``) is another model than its target: its own config is
    needed.
    """
    owner, slash, name = spec.lower().rpartition("/")
    if spec.startswith((".", "/", "~")) or "/" in owner:
        return None
    matched = _GEMMA4_ID.search(name)
    if matched is None:
        return name if not slash and name in preset_names() else None
    variant = matched["variant"]
    if "assistant" in variant:
        return None
    return next((p for p in preset_names() if variant == p or variant.startswith(f"{p}-")), None)


def _divide(config: ModelConfig, field: str, size: int, tp: int) -> int:
    if size % tp:
        config.fail(
            field,
            f"{size} = {size // tp} x {tp} + {size % tp}",
            f"a multiple of the tensor-parallel size {tp}",
        )
    return size // tp


def _divide_kv(config: ModelConfig, index: int, heads: int, tp: int) -> int:
    if heads >= tp:
        return _divide(config, config.kv_heads_field(index), heads, tp)
    if tp % heads:
        config.fail(
            config.kv_heads_field(index),
            str(heads),
            f"a divisor of the tensor-parallel size {tp}, to replicate KV heads",
        )
    return 1
