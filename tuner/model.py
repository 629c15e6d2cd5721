"""Gemma 4 text shapes, from a preset or from any Gemma 4 ``config.json``.

Field names and defaults are those of Hugging Face transformers 5.17 (``models/gemma4`` and
``models/gemma4_unified``: ``configuration_*.py``), whose config objects vLLM reads.  Splitting over
tensor-parallel ranks follows vLLM 0.26 to 0.33 (``model_executor/models/gemma4.py``).  A
checkpoint's own file is the authority; the presets are read by the same parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from kernel_templates.base import DTYPES, LayerShape, ModelShape

SLIDING = "sliding_attention"
FULL = "full_attention"
KINDS = (SLIDING, FULL)

PRESET_FOLDER = Path(__file__).with_name("presets")

_GEMMA4_TYPE = re.compile(r"gemma4(_unified)?(_text|_assistant)?")
_GEMMA4_ARCHITECTURE = re.compile(r"Gemma4(Unified)?(Assistant)?For\w+")
_GEMMA4_ID = re.compile(r"gemma-?4-(?P<variant>.+)", re.IGNORECASE)

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ModelConfigError(ValueError):
    """A model config cannot be used; names the file, the field, the value found and wanted."""


class _Schema(BaseModel):
    # HF configs hold many fields that no kernel depends on: they are ignored, not refused.
    # Strict: "64" is not 64, true is not 1.
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())


class RopeParameters(_Schema):
    """Rotary embedding of one layer kind."""

    rope_type: Annotated[str, Field(validation_alias=AliasChoices("rope_type", "type"))] = "default"
    rope_theta: PositiveFloat = 10_000.0
    partial_rotary_factor: Annotated[float, Field(ge=0, le=1)] = 1.0

    def pairs(self, head_dim: int) -> int:
        """Rotated (cos, sin) pairs out of ``head_dim / 2``.

        Only ``proportional`` leaves pairs unrotated; its other frequencies are zero.  Source:
        transformers 5.17, ``modeling_rope_utils.py``, ``_compute_proportional_rope_parameters``.
        """
        if self.rope_type == "proportional":
            return int(self.partial_rotary_factor * head_dim) // 2
        return head_dim // 2


class RopeByKind(_Schema):
    """Rotary embedding by layer kind; None for a kind that the config does not describe."""

    sliding_attention: RopeParameters | None = None
    full_attention: RopeParameters | None = None


class LayerOverrides(_Schema):
    """What ``per_layer_config`` may change in one layer; None keeps the model's value."""

    head_dim: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    sliding_window: PositiveInt | None = None
    skip: Annotated[list[str], Field(max_length=0)] = []


class TextConfig(_Schema):
    """The fields of a Gemma 4 text config that shape its hot paths, unsplit.

    Those without a default must be in the file: transformers writes them always, and a guess would
    tune another model.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    vocab_size: PositiveInt = 262_144
    head_dim: PositiveInt = 256
    global_head_dim: PositiveInt | None = 512
    num_global_key_value_heads: PositiveInt | None = None
    attention_k_eq_v: bool | None = False
    per_layer_config: dict[int, LayerOverrides] | None = None
    layer_types: list[str] | None = None
    sliding_window: PositiveInt = 512
    use_bidirectional_attention: str | None = None
    rope_local_base_freq: PositiveFloat = 10_000.0
    # Declared after `rope_local_base_freq`, which its validator reads.
    rope_parameters: RopeByKind | None = None
    num_kv_shared_layers: NonNegativeInt | None = 0
    use_double_wide_mlp: bool | None = False
    hidden_size_per_layer_input: NonNegativeInt | None = 256
    enable_moe_block: bool | None = False
    use_second_mlp_block: bool | None = False
    num_experts: PositiveInt | None = None
    top_k_experts: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    expert_intermediate_size: PositiveInt | None = None
    hidden_activation: str | None = "gelu_pytorch_tanh"
    rms_norm_eps: PositiveFloat = 1e-6
    final_logit_softcapping: PositiveFloat | None = None

    @field_validator("per_layer_config", mode="before")
    @classmethod
    def _by_index(cls, value: Any, info: ValidationInfo) -> Any:
        """JSON keys are text, zero-padded where transformers wrote them.

        The list form holds every layer, with null for one that changes nothing.
        """
        if isinstance(value, list):
            count = info.data.get("num_hidden_layers", len(value))
            if len(value) != count:
                raise ValueError(f"a list of num_hidden_layers = {count} entries")
            return {index: {} if one is None else one for index, one in enumerate(value)}
        if not isinstance(value, Mapping):
            return value
        return {
            int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key: one
            for key, one in value.items()
        }

    @field_validator("rope_parameters", mode="before")
    @classmethod
    def _by_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Older configs give one set of parameters; sliding layers then differ in theta only.

        Published files also mix shared scalars with the sets per kind; those are ignored.
        """
        if not isinstance(value, Mapping) or any(kind in value for kind in KINDS):
            return value
        local = {**value, "rope_theta": info.data.get("rope_local_base_freq", 10_000.0)}
        return {SLIDING: local, FULL: dict(value)}


class UnifiedTextConfig(TextConfig):
    """As :class:`TextConfig`, with the defaults of ``gemma4_unified``: no PLE, a wider window."""

    sliding_window: PositiveInt = 1024
    hidden_size_per_layer_input: NonNegativeInt | None = 0


_DEFAULT_ROPE = RopeByKind(
    sliding_attention=RopeParameters(rope_theta=10_000.0),
    full_attention=RopeParameters(
        rope_type="proportional", rope_theta=1_000_000.0, partial_rotary_factor=0.25
    ),
)


@dataclass(frozen=True)
class ModelConfig:
    """A parsed Gemma 4 config, before it is split over ranks.

    ``source`` is the file; ``prefix`` is ``"text_config."`` when the text part is nested;
    ``dtype`` is the activations'; ``draft`` marks an MTP assistant, all of whose layers share the
    target's K and V; ``notes`` are remarks worth showing to the user.
    """

    name: str
    source: str
    prefix: str
    text: TextConfig
    dtype: str
    draft: bool = False
    notes: tuple[str, ...] = ()

    def fail(self, field: str, found: Any, wanted: str) -> NoReturn:
        """Raise :class:`ModelConfigError` about ``field`` of the text part."""
        raise ModelConfigError(_fault(self.source, self.prefix + field, found, wanted))

    def shape(self, tp: int = 1, dtype: str | None = None) -> ModelShape:
        """The shapes of one of ``tp`` tensor-parallel ranks; ModelConfigError when it cannot be.

        Hidden size, vocabulary, PLE width and number of experts are never split.
        """
        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
            raise ModelConfigError(
                f"tensor-parallel size is {tp!r}, wanted an integer of 1 or more"
            )
        text = self.text
        moe = self._has_moe()
        layers = tuple(self._layer(index, tp, moe) for index in range(text.num_hidden_layers))
        return ModelShape(
            name=self.name,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            layers=layers,
            ple_width=text.hidden_size_per_layer_input or 0,
            num_experts=(text.num_experts or 0) if moe else 0,
            top_k_experts=(text.top_k_experts or 0) if moe else 0,
            moe_intermediate_size=self._expert_size(tp) if moe else 0,
            rms_eps=text.rms_norm_eps,
            final_softcap=text.final_logit_softcapping,
            dtype=self.dtype if dtype is None else _dtype_name(dtype, "dtype argument"),
            tp=tp,
        )

    def layer_kinds(self) -> list[str]:
        """The kind of every layer; as in transformers, the last one is full attention always."""
        text = self.text
        kinds = text.layer_types or [
            SLIDING if (index + 1) % 6 else FULL for index in range(text.num_hidden_layers)
        ]
        return [*kinds[:-1], FULL]

    def kv_shared_layers(self) -> int:
        """How many of the last layers read an earlier layer's (or the target's) K and V."""
        shared = self.text.num_kv_shared_layers or 0
        return shared or (self.text.num_hidden_layers if self.draft else 0)

    def window(self, index: int) -> int:
        """Sliding window of a layer in tokens, the token itself included."""
        own = self._overrides(index).sliding_window or self.text.sliding_window
        # transformers halves it when attention looks both ways.
        return own // 2 + 1 if self.text.use_bidirectional_attention == "all" else own

    def head_dim(self, index: int) -> int:
        """Head dimension of a layer."""
        overrides = self._overrides(index)
        if overrides.head_dim is not None:
            return overrides.head_dim
        # A config with `per_layer_config` says everything there: transformers then drops the
        # `global_*` fields.
        if self.text.per_layer_config is None and self.layer_kinds()[index] == FULL:
            return self.text.global_head_dim or self.text.head_dim
        return self.text.head_dim

    def kv_heads(self, index: int) -> tuple[int, str]:
        """(KV heads of a layer before the split, name of the field that says so)."""
        text = self.text
        overrides = self._overrides(index)
        if overrides.num_key_value_heads is not None:
            return overrides.num_key_value_heads, f"per_layer_config.{index}.num_key_value_heads"
        if (
            text.per_layer_config is None
            and text.attention_k_eq_v
            and text.num_global_key_value_heads is not None
            and self.layer_kinds()[index] == FULL
        ):
            return text.num_global_key_value_heads, "num_global_key_value_heads"
        return text.num_key_value_heads, "num_key_value_heads"

    def check(self) -> None:
        """ModelConfigError unless the fields fit together (on one rank)."""
        text, count = self.text, self.text.num_hidden_layers
        if text.hidden_activation not in (None, "gelu_pytorch_tanh"):
            self.fail("hidden_activation", text.hidden_activation, "'gelu_pytorch_tanh'")
        if text.layer_types is not None:
            if len(text.layer_types) != count:
                self.fail(
                    "layer_types",
                    f"{len(text.layer_types)} entries",
                    f"num_hidden_layers = {count} entries",
                )
            for index, kind in enumerate(text.layer_types):
                if kind not in KINDS:
                    self.fail(f"layer_types.{index}", kind, " or ".join(map(repr, KINDS)))
        for index in text.per_layer_config or {}:
            if not 0 <= index < count:
                self.fail("per_layer_config", f"layer {index}", f"layers 0 to {count - 1}")
        shared = self.kv_shared_layers()
        if shared > count:
            self.fail("num_kv_shared_layers", shared, f"at most num_hidden_layers = {count}")
        kinds = self.layer_kinds()
        for kind in sorted(set(kinds[count - shared :]) - set(kinds[: count - shared])):
            if not self.draft:
                self.fail(
                    "num_kv_shared_layers", shared, f"a layer of {kind} before the sharing ones"
                )
        self.shape()

    def _overrides(self, index: int) -> LayerOverrides:
        return (self.text.per_layer_config or {}).get(index) or LayerOverrides()

    def _has_moe(self) -> bool:
        return bool(self.text.enable_moe_block or self.text.use_second_mlp_block)

    def _layer(self, index: int, tp: int, moe: bool) -> LayerShape:
        text, overrides = self.text, self._overrides(index)
        kind = self.layer_kinds()[index]
        head_dim = self.head_dim(index)
        if head_dim % 2:
            self.fail("head_dim", head_dim, "an even number")
        query_heads = overrides.num_attention_heads or text.num_attention_heads
        kv_heads, kv_field = self.kv_heads(index)
        if query_heads % kv_heads:
            self.fail(kv_field, kv_heads, f"a divisor of {query_heads} query heads")
        rope = getattr(text.rope_parameters or _DEFAULT_ROPE, kind)
        if rope is None:
            self.fail(f"rope_parameters.{kind}", None, "the parameters of these layers")
        first_shared = text.num_hidden_layers - self.kv_shared_layers()
        shared = index >= first_shared
        # vLLM and transformers double the width only where some layer does not share.
        double = bool(text.use_double_wide_mlp) and shared and first_shared > 0
        width = (overrides.intermediate_size or text.intermediate_size) * (2 if double else 1)
        return LayerShape(
            kind=kind,
            head_dim=head_dim,
            query_heads=self._split("num_attention_heads", query_heads, tp),
            kv_heads=self._split_kv(kv_field, kv_heads, tp),
            k_eq_v=bool(text.attention_k_eq_v) and kind == FULL,
            kv_shared=shared,
            window=self.window(index) if kind == SLIDING else None,
            intermediate_size=self._split("intermediate_size", width, tp),
            rotary_pairs=rope.pairs(head_dim),
            rope_theta=rope.rope_theta,
            moe=moe,
        )

    def _expert_size(self, tp: int) -> int:
        text = self.text
        if text.num_experts is None:
            self.fail("num_experts", None, "an integer, because the model has MoE layers")
        if text.top_k_experts is None or text.top_k_experts > text.num_experts:
            self.fail("top_k_experts", text.top_k_experts, f"1 to num_experts = {text.num_experts}")
        field = "moe_intermediate_size"
        if text.moe_intermediate_size is None and text.expert_intermediate_size is not None:
            field = "expert_intermediate_size"
        size: int | None = getattr(text, field)
        if size is None:
            self.fail(field, None, "an integer, because the model has MoE layers")
        return self._split(field, size, tp)

    def _split(self, field: str, size: int, tp: int) -> int:
        if size % tp:
            self.fail(
                field,
                f"{size} = {size // tp} x {tp} + {size % tp}",
                f"a multiple of the tensor-parallel size {tp}",
            )
        return size // tp

    def _split_kv(self, field: str, heads: int, tp: int) -> int:
        if heads >= tp:
            return self._split(field, heads, tp)
        if tp % heads:
            self.fail(
                field, heads, f"a divisor of the tensor-parallel size {tp}, to replicate KV heads"
            )
        return 1


def load_model(spec: str, tp: int = 1, dtype: str | None = None) -> ModelShape:
    """The shapes of a Gemma 4 model on one of ``tp`` tensor-parallel ranks.

    ``spec`` is as for :func:`read_config`.  ``dtype`` (``bfloat16``, ``float16``, ``float32``)
    replaces the config's.  ModelConfigError when there is no such model, when it is not Gemma 4,
    or when it cannot be split.
    """
    return read_config(spec).shape(tp, dtype)


def preset_names() -> list[str]:
    """The names of the shipped presets."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.json"))


def read_config(spec: str) -> ModelConfig:
    """Read and check the config that ``spec`` names.

    ``spec`` is a path of a ``config.json``, a folder that holds one, a preset (``e2b``), or a model
    id that contains a preset's name after ``gemma-4-`` (``google/gemma-4-E2B-it``); case does not
    matter.  A file that exists wins over a preset of the same name: it is the authority.
    """
    path = Path(spec).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file():
        absolute = path.resolve()
        name = absolute.parent.name if absolute.name == "config.json" else absolute.stem
        return parse_config(_read_json(path), str(path), name)
    preset = _preset_of(spec)
    if preset is not None:
        path = PRESET_FOLDER / f"{preset}.json"
        return parse_config(_read_json(path), str(path), preset)
    known = f"a preset ({', '.join(preset_names())}), a config.json, or a folder that holds one"
    if path.is_dir():
        raise ModelConfigError(f"{spec}: no config.json in this folder; wanted {known}")
    raise ModelConfigError(f"{spec}: no such model; wanted {known}")


def parse_config(raw: Any, source: str, name: str) -> ModelConfig:
    """Check a decoded ``config.json``; ``source`` is the file's name in messages."""
    if not isinstance(raw, dict):
        raise ModelConfigError(_fault(source, "(top level)", type(raw).__name__, "an object"))
    nested = raw.get("text_config") is not None
    text = raw["text_config"] if nested else raw
    if not isinstance(text, dict):
        raise ModelConfigError(_fault(source, "text_config", text, "an object"))
    types = _gemma4_types(raw, text, source)
    prefix = "text_config." if nested else ""
    schema = UnifiedTextConfig if any("unified" in one for one in types) else TextConfig
    try:
        parsed = schema.model_validate(text)
    except ValidationError as error:
        faults = [_pydantic_fault(one, source, prefix) for one in error.errors()]
        raise ModelConfigError("\n".join(faults)) from None
    config = ModelConfig(
        name=name,
        source=source,
        prefix=prefix,
        text=parsed,
        dtype=_activation_dtype(raw, text, source),
        draft=any("assistant" in one for one in types),
        notes=tuple(_notes(raw, text, parsed)),
    )
    config.check()
    return config


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
            shape = config.shape(tp)
        except ModelConfigError as error:
            rows.append(RankRow(tp=tp, refusal=str(error)))
            continue
        counts: dict[tuple[LayerShape, int], int] = {}
        for index, layer in enumerate(shape.layers):
            key = (layer, layer.kv_heads * tp // config.kv_heads(index)[0])
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


def _fault(source: str, field: str, found: Any, wanted: str) -> str:
    shown = found if isinstance(found, str) and " " in found else repr(found)
    return f"{source}: field {field!r} is {shown}, wanted {wanted}"


def _pydantic_fault(error: Any, source: str, prefix: str) -> str:
    """One error of pydantic in this module's words."""
    # `[key]` is pydantic's mark for a dict's key rather than its value.
    field = prefix + ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "missing":
        return f"{source}: field {field!r} is missing, wanted a value"
    wanted = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return _fault(source, field, repr(error["input"]), wanted)


def _read_json(path: Path) -> Any:
    try:
        # A byte-order mark is an editor's accident, not a fault of the config.
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ModelConfigError(
            f"{path}: line {error.lineno} column {error.colno} is not JSON ({error.msg}), "
            "wanted a Hugging Face config.json"
        ) from None
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{path}: byte {error.start} is not UTF-8, wanted a config.json"
        ) from None
    except OSError as error:
        raise ModelConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _preset_of(spec: str) -> str | None:
    """The preset that a bare name or a model id means, by rule.

    An assistant (``...-E2B-it-assistant``) is another model than its target: its own config is
    needed.
    """
    name = spec.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower()
    matched = _GEMMA4_ID.search(name)
    variant = matched["variant"] if matched else name
    if "assistant" in variant:
        return None
    for preset in preset_names():
        if variant == preset or (matched and variant.startswith(f"{preset}-")):
            return preset
    return None


def _gemma4_types(raw: Mapping[str, Any], text: Mapping[str, Any], source: str) -> list[str]:
    """The model types that the config states; ModelConfigError when it is not Gemma 4."""
    stated = {
        "model_type": raw.get("model_type"),
        "text_config.model_type": text.get("model_type") if text is not raw else None,
    }
    architectures = raw.get("architectures") or []
    types = [value for value in stated.values() if value is not None]
    for field, value in stated.items():
        if value is not None and not (isinstance(value, str) and _GEMMA4_TYPE.fullmatch(value)):
            raise ModelConfigError(
                f"{_fault(source, field, value, 'a Gemma 4 type such as gemma4_text')}"
                f" (architectures: {architectures})"
            )
    names = [str(one) for one in architectures] if isinstance(architectures, list) else []
    if not types and not any(_GEMMA4_ARCHITECTURE.fullmatch(name) for name in names):
        raise ModelConfigError(
            f"{_fault(source, 'model_type', None, 'a Gemma 4 type such as gemma4_text')}"
            f" (architectures: {architectures})"
        )
    return [*types, *(name.lower() for name in names)]


def _activation_dtype(raw: Mapping[str, Any], text: Mapping[str, Any], source: str) -> str:
    """The activations' dtype: newer configs say ``dtype``, older ones ``torch_dtype``."""
    for holder, prefix in ((text, "text_config." if text is not raw else ""), (raw, "")):
        for field in ("dtype", "torch_dtype"):
            if holder.get(field) not in (None, "auto"):
                return _dtype_name(holder[field], f"{source}: field {prefix + field!r}")
    return "bfloat16"


def _dtype_name(value: Any, where: str) -> str:
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise ModelConfigError(f"{where} is {value!r}, wanted {', '.join(DTYPES)}")
    return str(name)


def _notes(raw: Mapping[str, Any], text: Mapping[str, Any], parsed: TextConfig) -> Iterable[str]:
    quantised = text.get("quantization_config") or raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        yield (
            f"weights are quantised ({method or 'method not stated'}): kernels are tuned for the "
            "activations' dtype"
        )
    if parsed.layer_types and parsed.layer_types[-1] != FULL:
        yield f"last layer is {parsed.layer_types[-1]} in the file, taken as {FULL}"
    if parsed.use_bidirectional_attention == "all":
        yield "attention looks both ways: the sliding window is halved"
