"""Model configs: presets, published and edited files, tensor parallelism, and readable refusals."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tuner.model import (
    PRESET_FOLDER,
    ModelConfigError,
    RankRow,
    load_model,
    per_rank_table,
    preset_names,
    read_config,
)

SLIDING, FULL = "sliding_attention", "full_attention"

# hidden, FFN, layers, period of full layers, query heads, KV heads sliding / full, K = V in full
# layers, KV-shared layers, FFN in those, PLE, window, experts, top-k, expert width.
FIGURES = {
    "e2b": (1536, 6144, 35, 5, 8, 1, 1, False, 20, 12288, 256, 512, 0, 0, 0),
    "e4b": (2560, 10240, 42, 6, 8, 2, 2, False, 18, 10240, 256, 512, 0, 0, 0),
    "12b": (3840, 15360, 48, 6, 16, 8, 1, True, 0, 0, 0, 1024, 0, 0, 0),
    "26b-a4b": (2816, 2112, 30, 6, 16, 8, 2, True, 0, 0, 0, 1024, 128, 8, 704),
    "31b": (5376, 21504, 60, 6, 32, 16, 4, True, 0, 0, 0, 1024, 0, 0, 0),
}


def preset(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((PRESET_FOLDER / f"{name}.json").read_text())
    return raw


def saved(folder: Path, raw: Any) -> str:
    path = folder / "config.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return str(path)


def edited(folder: Path, base: str = "e2b", **fields: Any) -> str:
    """A preset with changed text fields; None removes a field."""
    raw = preset(base)
    for name, value in fields.items():
        raw["text_config"].pop(name, None)
        if value is not None:
            raw["text_config"][name] = value
    return saved(folder, raw)


@pytest.mark.parametrize("name", FIGURES)
def test_preset_has_the_published_shapes(name: str) -> None:
    (
        hidden, ffn, layers, period, heads, kv_sliding, kv_full, k_eq_v, shared, shared_ffn,
        ple, window, experts, top_k, expert_width,
    ) = FIGURES[name]  # fmt: skip
    model = load_model(name)
    assert (model.name, model.hidden_size, model.vocab_size) == (name, hidden, 262_144)
    assert (model.ple_width, model.rms_eps, model.final_softcap) == (ple, 1e-6, 30.0)
    assert (model.dtype, model.tp) == ("bfloat16", 1)
    assert (model.num_experts, model.top_k_experts) == (experts, top_k)
    assert model.moe_intermediate_size == expert_width
    assert len(model.layers) == layers
    for index, layer in enumerate(model.layers):
        full = index % period == period - 1
        assert layer.kind == (FULL if full else SLIDING)
        assert layer.head_dim == (512 if full else 256)
        assert layer.query_heads == heads
        assert layer.kv_heads == (kv_full if full else kv_sliding)
        assert layer.k_eq_v == (k_eq_v and full)
        assert layer.window == (None if full else window)
        assert layer.kv_shared == (index >= layers - shared)
        assert layer.intermediate_size == (shared_ffn if layer.kv_shared else ffn)
        # A quarter of 256 frequencies turn in full layers, all 128 in sliding ones.
        assert layer.rotary_pairs == (64 if full else 128)
        assert layer.rope_theta == (1e6 if full else 1e4)
        assert layer.moe == bool(experts)


def test_every_preset_is_tested() -> None:
    assert preset_names() == sorted(FIGURES)


def test_layer_counts_by_kind() -> None:
    counts = {
        name: tuple(
            Counter(layer.kind for layer in load_model(name).layers)[k] for k in (SLIDING, FULL)
        )
        for name in FIGURES
    }
    assert counts == {
        "e2b": (28, 7),
        "e4b": (35, 7),
        "12b": (40, 8),
        "26b-a4b": (25, 5),
        "31b": (50, 10),
    }


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("E2B", "e2b"),
        ("google/gemma-4-E2B-it", "e2b"),
        ("google/gemma-4-E4B", "e4b"),
        ("google/gemma-4-26B-A4B-it", "26b-a4b"),
        ("someone/gemma-4-31B-it-FP8", "31b"),
        ("gemma4-12b-it", "12b"),
    ],
)
def test_names_that_mean_a_preset(spec: str, name: str) -> None:
    assert load_model(spec).name == name


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "e3b",
        "26b",
        "google/gemma-3-4b-it",
        "google/gemma-4-E2B-it-assistant",
        "someone/e2b",
        "/models/gemma-4-E2B-it",
        "./e2b",
        "models/missing/gemma-4-E2B-it",
        "e2b\0",
        "x" * 5000,
    ],
)
def test_unknown_model_names_the_presets(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, preset("e2b"))
    with pytest.raises(ModelConfigError, match=r"no such model; wanted a preset .*26b-a4b.*31b"):
        load_model(spec)


@pytest.mark.parametrize("name", FIGURES)
def test_flat_config_equals_nested(name: str, tmp_path: Path) -> None:
    nested = tmp_path / name
    nested.mkdir()
    saved(nested, preset(name))
    whole = load_model(str(nested))
    assert whole == load_model(name)
    saved(nested, preset(name)["text_config"])
    assert load_model(str(nested)) == whole
    assert load_model(str(nested / "config.json")) == whole


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("Gemma4ForConditionalGeneration", "gemma4"),
        ("Gemma4ForCausalLM", "gemma4_text"),
        ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified"),
    ],
)
def test_architectures(architecture: str, model_type: str, tmp_path: Path) -> None:
    raw = preset("12b")["text_config"]
    del raw["model_type"], raw["sliding_window"]
    wide = "Unified" in architecture
    for stated in ({"architectures": [architecture]}, {"model_type": model_type}):
        model = load_model(saved(tmp_path, {**raw, **stated}))
        # What the file leaves out are the defaults of its own architecture.
        assert model.ple_width == (0 if wide else 256)
        assert model.layers[0].window == (1024 if wide else 512)


@pytest.mark.parametrize("unified", [False, True])
def test_assistant_shares_all_kv(unified: bool, tmp_path: Path) -> None:
    kind = "gemma4_unified" if unified else "gemma4"
    text = {
        "model_type": f"{kind}_text",
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    }
    path = saved(tmp_path, {"model_type": f"{kind}_assistant", "text_config": text})
    assert read_config(path).draft
    model = load_model(path)
    assert [layer.kv_shared for layer in model.layers] == [True] * 4
    assert [layer.head_dim for layer in model.layers] == [256, 256, 256, 512]


def test_defaults_of_absent_fields(tmp_path: Path) -> None:
    path = edited(tmp_path, "31b", layer_types=None, rope_parameters=None, global_head_dim=None)
    assert load_model(path).layers == load_model("31b").layers


def test_per_layer_config_says_everything(tmp_path: Path) -> None:
    path = edited(
        tmp_path,
        "26b-a4b",
        per_layer_config={
            "05": {"head_dim": 512, "num_key_value_heads": 2},
            "6": {"intermediate_size": 4096, "sliding_window": 256, "num_attention_heads": 8},
        },
    )
    layers = load_model(path).layers
    assert (layers[5].head_dim, layers[5].kv_heads, layers[5].rotary_pairs) == (512, 2, 64)
    # The `global_*` fields no longer count for the other full layers.
    assert (layers[11].head_dim, layers[11].kv_heads, layers[11].rotary_pairs) == (256, 8, 32)
    assert (layers[6].intermediate_size, layers[6].window, layers[6].query_heads) == (4096, 256, 8)
    assert layers[7].intermediate_size == 2112


def test_last_layer_is_full_attention(tmp_path: Path) -> None:
    kinds = preset("12b")["text_config"]["layer_types"]
    path = edited(tmp_path, "12b", layer_types=[*kinds[:-1], SLIDING])
    assert load_model(path).layers == load_model("12b").layers
    assert "taken as full_attention" in read_config(path).notes[0]


def test_attention_both_ways_halves_the_window(tmp_path: Path) -> None:
    path = edited(tmp_path, use_bidirectional_attention="all")
    assert load_model(path).layers[0].window == 257
    assert "window is halved" in read_config(path).notes[0]
    path = edited(tmp_path, use_bidirectional_attention="vision")
    assert load_model(path).layers[0].window == 512


# Case 28: (sliding, full) KV heads per rank.
@pytest.mark.parametrize(
    ("name", "tp", "kv_heads"),
    [
        ("e2b", 1, (1, 1)),
        ("e2b", 2, (1, 1)),
        ("e2b", 8, (1, 1)),
        ("e4b", 2, (1, 1)),
        ("e4b", 4, (1, 1)),
        ("12b", 1, (8, 1)),
        ("12b", 2, (4, 1)),
        ("12b", 4, (2, 1)),
        ("12b", 8, (1, 1)),
        ("26b-a4b", 1, (8, 2)),
        ("26b-a4b", 2, (4, 1)),
        ("26b-a4b", 4, (2, 1)),
        ("26b-a4b", 8, (1, 1)),
        ("31b", 2, (8, 2)),
        ("31b", 4, (4, 1)),
        ("31b", 8, (2, 1)),
    ],
)
def test_tensor_parallel(name: str, tp: int, kv_heads: tuple[int, int]) -> None:
    whole, rank = load_model(name), load_model(name, tp)
    assert rank.tp == tp
    for before, after in zip(whole.layers, rank.layers, strict=True):
        assert after.kv_heads == kv_heads[after.kind == FULL]
        assert after.query_heads == before.query_heads // tp
        assert after.intermediate_size == before.intermediate_size // tp
        assert (after.head_dim, after.window) == (before.head_dim, before.window)
    assert rank.moe_intermediate_size == whole.moe_intermediate_size // tp
    assert (rank.hidden_size, rank.vocab_size) == (whole.hidden_size, whole.vocab_size)
    assert (rank.ple_width, rank.num_experts) == (whole.ple_width, whole.num_experts)


def test_per_rank_table() -> None:
    rows = per_rank_table("26b-a4b", [1, 4, 3])
    assert rows[:4] == [
        RankRow(1, SLIDING, 25, 256, 16, 8, 1, False, 2112, 704),
        RankRow(1, FULL, 5, 512, 16, 2, 1, False, 2112, 704),
        RankRow(4, SLIDING, 25, 256, 4, 2, 1, False, 528, 176),
        RankRow(4, FULL, 5, 512, 4, 1, 2, False, 528, 176),
    ]
    assert len(rows) == 5
    assert rows[4].tp == 3
    refusal = rows[4].refusal or ""
    assert "'text_config.num_attention_heads' is 16 = 5 x 3 + 1" in refusal
    assert "wanted a multiple of the tensor-parallel size 3" in refusal
    # KV-shared layers are rows of their own.
    assert [(row.layers, row.kv_shared) for row in per_rank_table("e2b", [2])] == [
        (12, False),
        (3, False),
        (16, True),
        (4, True),
    ]


@pytest.mark.parametrize("tp", [0, -1, True, "2", 1.0])
def test_wrong_tensor_parallel_size(tp: Any) -> None:
    with pytest.raises(ModelConfigError, match=f"tensor-parallel size is {tp!r}, wanted"):
        load_model("e2b", tp)


def test_kv_heads_that_cannot_be_split(tmp_path: Path) -> None:
    path = edited(
        tmp_path, "12b", num_attention_heads=48, num_key_value_heads=6, intermediate_size=96
    )
    with pytest.raises(
        ModelConfigError, match=r"'text_config.num_key_value_heads' is 6 = 1 x 4 \+ 2"
    ):
        load_model(path, 4)
    with pytest.raises(
        ModelConfigError, match=r"num_key_value_heads' is 6, wanted a divisor of .* 8"
    ):
        load_model(path, 8)


def test_dtypes(tmp_path: Path) -> None:
    assert load_model("e2b", dtype="float16").dtype == "float16"
    with pytest.raises(
        ModelConfigError, match="dtype argument is 'int8', wanted bfloat16, float16"
    ):
        load_model("e2b", dtype="int8")
    raw = preset("e2b")
    del raw["text_config"]["dtype"]
    assert load_model(saved(tmp_path, raw)).dtype == "bfloat16"
    assert load_model(saved(tmp_path, {**raw, "torch_dtype": "float16"})).dtype == "float16"
    assert load_model(saved(tmp_path, {**raw, "dtype": "torch.float32"})).dtype == "float32"
    with pytest.raises(ModelConfigError, match=r"field 'dtype' is \['bfloat16'\]"):
        load_model(saved(tmp_path, {**raw, "dtype": ["bfloat16"]}))


@pytest.mark.parametrize("nested", [False, True])
def test_quantised_weights_are_noted(nested: bool, tmp_path: Path) -> None:
    raw = preset("26b-a4b")
    holder = raw["text_config"] if nested else raw
    holder["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (note,) = read_config(saved(tmp_path, raw)).notes
    assert "quantised (fp8)" in note
    assert load_model(saved(tmp_path, raw)).layers == load_model("26b-a4b").layers
    holder["quantization_config"] = {"bits": 4}
    assert "method not stated" in read_config(saved(tmp_path, raw)).notes[0]


def test_presets_need_no_note() -> None:
    assert [read_config(name).notes for name in FIGURES] == [()] * len(FIGURES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "field 'text_config.hidden_size' is missing, wanted a value"),
        ({"num_attention_heads": "8"}, "num_attention_heads' is '8', wanted a valid integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers' is True, wanted a valid integer"),
        ({"intermediate_size": -6144}, "intermediate_size' is -6144, wanted greater than 0"),
        ({"intermediate_size": 6144.5}, "intermediate_size' is 6144.5, wanted a valid integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps' is nan, wanted"),
        ({"num_key_value_heads": 3}, "num_key_value_heads' is 3, wanted a divisor of 8 query"),
        ({"head_dim": 255}, "head_dim' is 255 in layer 0, wanted an even number"),
        ({"hidden_activation": "silu"}, "hidden_activation' is 'silu', wanted 'gelu_pytorch"),
        ({"layer_types": [FULL]}, "layer_types' is 1 entries, wanted num_hidden_layers = 35"),
        (
            {"layer_types": ["chunked_attention"] * 35},
            "layer_types.0' is 'chunked_attention', wanted 'sliding_attention' or",
        ),
        ({"num_kv_shared_layers": 36}, "num_kv_shared_layers' is 36, wanted at most"),
        ({"num_kv_shared_layers": 31}, "is 31, wanted fewer, so that a full_attention layer"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers' is 35, wanted fewer"),
        ({"enable_moe_block": True}, "num_experts' is missing, wanted an integer, because"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 8}
            | {"moe_intermediate_size": 8},
            "top_k_experts' is 8, wanted 1 to num_experts = 4",
        ),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            "moe_intermediate_size' is missing",
        ),
        ({"per_layer_config": {"35": {}}}, "per_layer_config' is about layer 35, wanted layers 0"),
        ({"per_layer_config": {"last": {}}}, "per_layer_config.last' is 'last', wanted"),
        ({"per_layer_config": {"1": {"head_dim": "x"}}}, "per_layer_config.1.head_dim' is 'x'"),
        ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, r"per_layer_config.1.skip' is \['mlp'\]"),
        ({"per_layer_config": []}, r"per_layer_config' is \[\], wanted a valid dictionary"),
        ({"rope_parameters": {FULL: {}}}, "rope_parameters.sliding_attention' is missing"),
        (
            {"rope_parameters": {SLIDING: {"partial_rotary_factor": 0.5}, FULL: {}}},
            "partial_rotary_factor' is 0.5, wanted 1.0 with rope_type 'default'",
        ),
        (
            {"rope_parameters": {SLIDING: {}, FULL: {"rope_theta": "1e6"}}},
            "rope_parameters.full_attention.rope_theta' is '1e6'",
        ),
    ],
)  # fmt: skip
def test_wrong_field_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = edited(tmp_path, **fields)
    with pytest.raises(ModelConfigError, match=message) as caught:
        load_model(path)
    assert str(caught.value).startswith(f"{path}: field 'text_config.")


def test_all_wrong_fields_are_named_at_once(tmp_path: Path) -> None:
    path = edited(tmp_path, hidden_size=None, vocab_size="many")
    with pytest.raises(ModelConfigError) as caught:
        load_model(path)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
            "field 'model_type' is 'gemma3', wanted a Gemma 4 type .*Gemma3ForConditional",
        ),
        (
            {"model_type": "gemma4", "text_config": {"model_type": "gemma3_text"}},
            "field 'text_config.model_type' is 'gemma3_text', wanted a Gemma 4 type",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "'model_type' is missing, .*LlamaForCausalLM"),
        ({"hidden_size": 4096}, "field 'model_type' is missing, .*architectures: not stated"),
        ({"model_type": 4}, "field 'model_type' is 4, wanted"),
        ({"model_type": "gemma4", "text_config": [1]}, r"field 'text_config' is \[1\], wanted an"),
        ([], r"field '\(top level\)' is list, wanted an object"),
        ("", "line 1 column 1 is not JSON"),
        ('{"model_type": "gemma4", "text_', "line 1 column 26 is not JSON .*config.json"),
        ('{"model_type": "gemma4",}', "line 1 column 2. is not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_file_that_is_no_gemma4_config(raw: Any, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path, raw)
    with pytest.raises(ModelConfigError, match=re.escape(path) + ": .*" + message):
        load_model(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"no config\.json in this folder; wanted a preset"):
        load_model(str(tmp_path))
    binary = tmp_path / "config.json"
    binary.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelConfigError, match="byte 7 is not UTF-8"):
        load_model(str(binary))
    binary.write_text(json.dumps(preset("e2b")), encoding="utf-8-sig")
    assert load_model(str(binary)).layers == load_model("e2b").layers


def test_a_file_wins_over_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "e2b"
    own.mkdir()
    assert load_model("e2b").vocab_size == 262_144  # a folder without a config is no model
    edited(own, vocab_size=1000)
    assert load_model("e2b").vocab_size == 1000


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    path = edited(tmp_path, new_field={"a": 1})
    assert load_model(path).layers == load_model("e2b").layers
