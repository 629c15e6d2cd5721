"""A Gemma 4 ``config.json``: its fields, what they mean for each layer, and what is wrong with it.

Field names and defaults are those of Hugging Face transformers 5.17 to 5.24 (``models/gemma4``,
``models/gemma4_unified`` and their assistants: ``configuration_*.py``), whose config objects vLLM
reads.  Two older names that vLLM still accepts are accepted too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator

from kernel_templates.base import DTYPES, LayerShape

SLIDING = "sliding_attention"
FULL = "full_attention"
KINDS = (SLIDING, FULL)

_GEMMA4_TYPE = re.compile(r"gemma4(_unified)?(_text|_assistant)?")
_GEMMA4_ARCHITECTURE = re.compile(r"Gemma4(Unified)?(Assistant)?For\w+")
_WANTED_TYPE = "a Gemma 4 type such as 'gemma4_text'"

# Limits no model comes near, so that sizes multiply within int64 and layers fit the memory.
PositiveInt = Annotated[int, Field(gt=0, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]
Layers = Annotated[int, Field(gt=0, le=10_000)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ModelConfigError(ValueError):
    """A model config cannot be used; names the file, the field, the value found and wanted."""


class _Schema(BaseModel):
    # HF configs hold many fields that no kernel depends on: they are ignored, not refused.
    # Strict: "64" is not 64, true is not 1.
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class RopeParameters(_Schema):
    """Rotary embedding of one layer kind."""

    rope_type: str = "default"
    rope_theta: PositiveFloat = 10_000.0
    partial_rotary_factor: Annotated[float, Field(ge=0, le=1)] = 1.0

    def pairs(self, head_dim: int) -> int:
        """Rotated (cos, sin) pairs out of ``head_dim / 2``; the others have frequency zero.

        Source: transformers, ``modeling_rope_utils.py``, ``_compute_proportional_rope_parameters``.
        """
        return int(self.partial_rotary_factor * head_dim) // 2


class RopeByKind(_Schema):
    """Rotary embedding by layer kind; None for a kind that the config does not describe."""

    sliding_attention: RopeParameters | None = None
    full_attention: RopeParameters | None = None


_DEFAULT_ROPE = RopeByKind(
    sliding_attention=RopeParameters(rope_theta=10_000.0),
    full_attention=RopeParameters(
        rope_type="proportional", rope_theta=1_000_000.0, partial_rotary_factor=0.25
    ),
)


class LayerOverrides(_Schema):
    """What ``per_layer_config`` may change in one layer; None keeps the model's value."""

    head_dim: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    sliding_window: PositiveInt | None = None
    # Layers without attention or MLP are no Gemma 4.
    skip: Annotated[list[str], Field(max_length=0)] = []


class TextConfig(_Schema):
    """The fields of a Gemma 4 text config that shape its hot paths, unsplit.

    Those without a default must be in the file: transformers writes them always, and a guess would
    tune another model.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: Layers
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
    rope_parameters: RopeByKind | None = None
    num_kv_shared_layers: NonNegativeInt | None = 0
    use_double_wide_mlp: bool | None = False
    hidden_size_per_layer_input: NonNegativeInt | None = 256
    enable_moe_block: Annotated[
        bool | None,
        Field(validation_alias=AliasChoices("enable_moe_block", "use_second_mlp_block")),
    ] = False
    num_experts: PositiveInt | None = None
    top_k_experts: PositiveInt | None = None
    moe_intermediate_size: Annotated[
        PositiveInt | None,
        Field(validation_alias=AliasChoices("moe_intermediate_size", "expert_intermediate_size")),
    ] = None
    hidden_activation: str | None = "gelu_pytorch_tanh"
    rms_norm_eps: PositiveFloat = 1e-6
    final_logit_softcapping: PositiveFloat | None = None

    @field_validator("per_layer_config", mode="before")
    @classmethod
    def _by_index(cls, value: Any) -> Any:
        """JSON keys are text."""
        if not isinstance(value, Mapping):
            return value
        return {
            int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key: one
            for key, one in value.items()
        }


class UnifiedTextConfig(TextConfig):
    """As :class:`TextConfig`, with the defaults of ``gemma4_unified``: no PLE, a wider window."""

    sliding_window: PositiveInt = 1024
    hidden_size_per_layer_input: NonNegativeInt | None = 0


@dataclass(frozen=True)
class ModelConfig:
    """A checked Gemma 4 config, before it is split over ranks.

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

    def fail(self, field: str, found: str, wanted: str) -> NoReturn:
        """Raise :class:`ModelConfigError` about ``field`` of the text part."""
        raise ModelConfigError(_fault(self.source, self.prefix + field, found, wanted))

    @property
    def has_moe(self) -> bool:
        """Whether every layer has experts beside its MLP."""
        return bool(self.text.enable_moe_block)

    def layers(self) -> list[LayerShape]:
        """Every layer, unsplit."""
        return [self._layer(index, kind) for index, kind in enumerate(self._kinds())]

    def kv_heads_field(self, index: int) -> str:
        """The field that says how many KV heads a layer has."""
        if self._overrides(index).num_key_value_heads is not None:
            return f"per_layer_config.{index}.num_key_value_heads"
        if self._has_global_kv_heads(self._kinds()[index]):
            return "num_global_key_value_heads"
        return "num_key_value_heads"

    def check(self) -> None:
        """ModelConfigError unless the fields fit together."""
        text, count = self.text, self.text.num_hidden_layers
        if text.hidden_activation not in (None, "gelu_pytorch_tanh"):
            self.fail("hidden_activation", repr(text.hidden_activation), "'gelu_pytorch_tanh'")
        if text.layer_types is not None:
            if len(text.layer_types) != count:
                self.fail(
                    "layer_types",
                    f"{len(text.layer_types)} entries",
                    f"num_hidden_layers = {count} entries",
                )
            for index, kind in enumerate(text.layer_types):
                if kind not in KINDS:
                    self.fail(f"layer_types.{index}", repr(kind), " or ".join(map(repr, KINDS)))
        for index in text.per_layer_config or {}:
            if not 0 <= index < count:
                self.fail("per_layer_config", f"about layer {index}", f"layers 0 to {count - 1}")
        self._check_rope()
        self._check_sharing()
        self._check_experts()
        for index, layer in enumerate(self.layers()):
            if layer.head_dim % 2:
                self.fail("head_dim", f"{layer.head_dim} in layer {index}", "an even number")
            if layer.query_heads % layer.kv_heads:
                self.fail(
                    self.kv_heads_field(index),
                    str(layer.kv_heads),
                    f"a divisor of {layer.query_heads} query heads",
                )

    def _check_rope(self) -> None:
        for kind in sorted(set(self._kinds())):
            rope = self._rope(kind)
            if rope is None:
                self.fail(f"rope_parameters.{kind}", "missing", "the parameters of these layers")
            # Elsewhere transformers ignores the factor, and vLLM pairs other elements by it.
            if rope.rope_type != "proportional" and rope.partial_rotary_factor != 1:
                self.fail(
                    f"rope_parameters.{kind}.partial_rotary_factor",
                    repr(rope.partial_rotary_factor),
                    f"1.0 with rope_type {rope.rope_type!r}",
                )

    def _check_sharing(self) -> None:
        kinds, shared = self._kinds(), self._shared_layers()
        if shared > len(kinds):
            self.fail(
                "num_kv_shared_layers", str(shared), f"at most num_hidden_layers = {len(kinds)}"
            )
        own = len(kinds) - shared
        without = sorted(set(kinds[own:]) - set(kinds[:own]))
        if without and not self.draft:
            self.fail(
                "num_kv_shared_layers",
                str(shared),
                f"fewer, so that a {without[0]} layer comes before the sharing ones",
            )

    def _check_experts(self) -> None:
        if not self.has_moe:
            return
        text = self.text
        for field in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if getattr(text, field) is None:
                self.fail(field, "missing", "an integer, because enable_moe_block is true")
        if text.top_k_experts > text.num_experts:  # type: ignore[operator]
            self.fail(
                "top_k_experts", str(text.top_k_experts), f"1 to num_experts = {text.num_experts}"
            )

    def _kinds(self) -> list[str]:
        """The kind of every layer; as in transformers, the last one is full attention always."""
        kinds = self.text.layer_types or [
            FULL if index % 6 == 5 else SLIDING for index in range(self.text.num_hidden_layers)
        ]
        return [*kinds[:-1], FULL]

    def _shared_layers(self) -> int:
        """How many of the last layers read an earlier layer's (or the target's) K and V."""
        shared = self.text.num_kv_shared_layers or 0
        return shared or (self.text.num_hidden_layers if self.draft else 0)

    def _overrides(self, index: int) -> LayerOverrides:
        return (self.text.per_layer_config or {}).get(index) or LayerOverrides()

    def _rope(self, kind: str) -> RopeParameters | None:
        rope: RopeParameters | None = getattr(self.text.rope_parameters or _DEFAULT_ROPE, kind)
        return rope

    def _has_global_kv_heads(self, kind: str) -> bool:
        text = self.text
        return (
            kind == FULL
            and text.per_layer_config is None
            and bool(text.attention_k_eq_v)
            and text.num_global_key_value_heads is not None
        )

    def _layer(self, index: int, kind: str) -> LayerShape:
        text, own = self.text, self._overrides(index)
        # A config with `per_layer_config` says everything there: transformers then drops the
        # `global_*` fields.
        head_dim = text.head_dim
        if kind == FULL and text.per_layer_config is None:
            head_dim = text.global_head_dim or head_dim
        head_dim = own.head_dim or head_dim
        kv_heads: int | None = text.num_key_value_heads
        if self._has_global_kv_heads(kind):
            kv_heads = text.num_global_key_value_heads
        window = own.sliding_window or text.sliding_window
        if text.use_bidirectional_attention == "all":
            window = window // 2 + 1  # as transformers does when attention looks both ways
        first_shared = text.num_hidden_layers - self._shared_layers()
        shared = index >= first_shared
        width = own.intermediate_size or text.intermediate_size
        # vLLM and transformers double the width only where some layer does not share.
        if text.use_double_wide_mlp and shared and first_shared > 0:
            width *= 2
        rope = self._rope(kind)
        assert rope is not None  # _check_rope
        return LayerShape(
            kind=kind,
            head_dim=head_dim,
            query_heads=own.num_attention_heads or text.num_attention_heads,
            kv_heads=own.num_key_value_heads or kv_heads or 1,
            k_eq_v=bool(text.attention_k_eq_v) and kind == FULL,
            kv_shared=shared,
            window=window if kind == SLIDING else None,
            intermediate_size=width,
            rotary_pairs=rope.pairs(head_dim),
            rope_theta=rope.rope_theta,
            moe=self.has_moe,
        )


def read_config_file(path: Path, name: str) -> ModelConfig:
    """Read and check one ``config.json``."""
    try:
        # A byte-order mark is an editor's accident, not a fault of the config.
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ModelConfigError(
            f"{path}: line {error.lineno} column {error.colno} is not JSON ({error.msg}), "
            "wanted a Hugging Face config.json"
        ) from None
    except RecursionError:
        raise ModelConfigError(f"{path}: nested too deeply, wanted a config.json") from None
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{path}: byte {error.start} is not UTF-8, wanted a config.json"
        ) from None
    except ValueError as error:  # an integer of thousands of digits
        raise ModelConfigError(f"{path}: a number cannot be read ({error})") from None
    except OSError as error:
        raise ModelConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_config(raw, str(path), name)


def parse_config(raw: Any, source: str, name: str) -> ModelConfig:
    """Check a decoded ``config.json``; ``source`` is the file's name in messages."""
    if not isinstance(raw, dict):
        raise ModelConfigError(_fault(source, "(top level)", type(raw).__name__, "an object"))
    nested = raw.get("text_config") is not None
    text = raw["text_config"] if nested else raw
    if not isinstance(text, dict):
        raise ModelConfigError(_fault(source, "text_config", repr(text), "an object"))
    prefix = "text_config." if nested else ""
    types = _gemma4_types(raw, text, source)
    schema = UnifiedTextConfig if any("unified" in one for one in types) else TextConfig
    try:
        parsed = schema.model_validate(text)
    except ValidationError as error:
        faults = [_schema_fault(one, source, prefix) for one in error.errors()]
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


def dtype_name(value: Any, where: str) -> str:
    """The dtype that ``value`` names, without ``torch.``; ``where`` opens the error's message."""
    name = value.removeprefix("torch.") if isinstance(value, str) else None
    if name not in DTYPES:
        raise ModelConfigError(f"{where} is {value!r}, wanted {', '.join(DTYPES)}")
    return str(name)


def _fault(source: str, field: str, found: str, wanted: str) -> str:
    return f"{source}: field {field!r} is {found}, wanted {wanted}"


def _schema_fault(error: Any, source: str, prefix: str) -> str:
    """One error of pydantic in this module's words."""
    # `[key]` is pydantic's mark for a dict's key rather than its value.
    field = prefix + ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "missing":
        return _fault(source, field, "missing", "a value")
    wanted = error["msg"].removeprefix("Input should be ")
    found = repr(error["input"])
    return _fault(source, field, found if len(found) <= 80 else f"{found[:77]}...", wanted)


def _gemma4_types(raw: Mapping[str, Any], text: Mapping[str, Any], source: str) -> list[str]:
    """The model types that the config states; ModelConfigError when it is not Gemma 4."""
    stated = {"model_type": raw.get("model_type")}
    if text is not raw:
        stated["text_config.model_type"] = text.get("model_type")
    architectures = raw.get("architectures") or []
    names = [str(one) for one in architectures] if isinstance(architectures, list) else []
    hint = f" (architectures: {', '.join(names) or 'not stated'})"
    for field, value in stated.items():
        if value is not None and not (isinstance(value, str) and _GEMMA4_TYPE.fullmatch(value)):
            raise ModelConfigError(_fault(source, field, repr(value), _WANTED_TYPE) + hint)
    types = [value for value in stated.values() if value is not None]
    if not types and not any(_GEMMA4_ARCHITECTURE.fullmatch(name) for name in names):
        raise ModelConfigError(_fault(source, "model_type", "missing", _WANTED_TYPE) + hint)
    return [*types, *(name.lower() for name in names)]


def _activation_dtype(raw: Mapping[str, Any], text: Mapping[str, Any], source: str) -> str:
    """The activations' dtype: newer configs say ``dtype``, older ones ``torch_dtype``."""
    for holder, prefix in ((text, "text_config." if text is not raw else ""), (raw, "")):
        for field in ("dtype", "torch_dtype"):
            if holder.get(field) not in (None, "auto"):
                return dtype_name(holder[field], f"{source}: field {prefix + field!r}")
    return "bfloat16"


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
