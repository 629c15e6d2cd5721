"""``gemma-tune bench`` without vLLM: a stand-in for an engine, and what is made of its answers."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tuner import cli
from vllm_plugin.serving import bench, checkpoint, kernels
from vllm_plugin.serving.bench import Variant, Workload, measure, parse_workload, spread
from vllm_plugin.serving.engine import Engine, EngineFailed
from vllm_plugin.serving.result import Result, markdown, table

#: Behaves by its settings, and "generates" at the speed that they name.
CHILD = """
import json, os, sys, time
settings = json.loads(sys.argv[1])
print("log line", file=sys.stderr)
print("INFO [report.py:65] gemma-tune 0.1.0: 3 of 4 hot paths active", file=sys.stderr)
print("non-default args: /tmp/gemma-tune-x", file=sys.stderr, flush=True)
how = settings.get("how", "")
if how == "crash at start":
    sys.exit("no such GPU")
if how == "hang at start":
    time.sleep(60)
print(json.dumps({"ready": True, "device": "fake", "vllm": "0"}), flush=True)
for count, line in enumerate(sys.stdin):
    request = json.loads(line)
    if how == "crash" and count == 2:
        os.abort()
    if how == "garbage":
        print("Loading weights: 100%", flush=True)
        continue
    new = request["sequences"] * request["new_tokens"]
    old = request["sequences"] * request["prompt_tokens"]
    drift = 1 + 0.1 * count  # both variants slow down alike
    seconds = (new if request["new_tokens"] > 1 else old) / settings["speed"] * drift
    answer = {"seconds": seconds, "steps": 2, "prompt_tokens": old, "new_tokens": new,
              "first_token_s": {"p50": 0.1, "p95": 0.2, "p99": 0.3}, "between_tokens_s": None}
    if request["do"] == "profile":
        answer["kernels"] = {"wall_us": 10.0, "busy_us": 8.0, "launches": 4, "longest": [],
                             "paths": {"GEMM": {"us": 8.0, "launches": 4}}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    program = tmp_path / "child.py"
    program.write_text(textwrap.dedent(CHILD))

    def made(name: str, settings: Any, environment: Any, log: Path) -> Engine:
        extra = {"speed": 100.0 if name == "stock" else 150.0, "how": how.get(name, "")}
        command = (sys.executable, str(program))
        return Engine(name, {**settings, **extra}, environment, log, command)

    how: dict[str, str] = {}
    made.how = how  # type: ignore[attr-defined]
    return made


VARIANTS = [Variant.parse("stock"), Variant.parse("tuned")]
WORKLOADS = [Workload("prefill", 4, 100, 1), Workload("decode2", 2, 10, 50)]


def ran(start: Any, tmp_path: Path, rounds: int = 4, **options: Any) -> bench.Outcome:
    return measure(
        VARIANTS, WORKLOADS, {}, tmp_path / "logs", rounds, say=lambda _: None, start=start,
        **options,
    )  # fmt: skip


def test_rounds_are_paired_and_the_first_is_not_counted(start: Any, tmp_path: Path) -> None:
    outcome = ran(start, tmp_path)
    result = Result.of(outcome, "e2b", {"rounds": 4})
    assert [(row.workload, row.variant) for row in result.rows] == [
        ("prefill", "stock"), ("prefill", "tuned"), ("decode2", "stock"), ("decode2", "tuned"),
    ]  # fmt: skip
    for row in result.rows:
        assert len(row.speeds) == 4
        assert row.kernels is not None
        assert row.kernels["steps"] == 2
        if row.variant == "tuned":
            # The machine slows down, both alike: the paired ratio does not show it.
            assert row.ratio == pytest.approx(1.5)
            assert row.noise == pytest.approx(0.0, abs=1e-9)
            assert row.spread > 1
        else:
            assert row.ratio is None
    assert result.rows[0].unit == "prompt tok/s"
    assert result.rows[2].unit == "output tok/s"
    assert result.summaries["tuned"] == ["gemma-tune 0.1.0: 3 of 4 hot paths active"]


def test_report_says_it_all(start: Any, tmp_path: Path) -> None:
    result = Result.of(ran(start, tmp_path), "e2b", {"rounds": 4})
    paths = result.write(tmp_path / "out")
    assert Result.model_validate_json(paths[0].read_text()) == result
    text = paths[1].read_text()
    for wanted in ("| prefill | tuned |", "1.50x", "100 / 200 / 300", "| GEMM |", "3 of 4 hot"):
        assert wanted in text
    assert len(table(result).rows) == 4
    slower = result.model_copy(deep=True)
    slower.rows[1].ratio, slower.rows[1].noise = 1.01, 0.02
    assert "1.01x (noise)" in markdown(slower)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("crash at start", r"ended with status 1; the end of [^\n]*tuned.log:\n[^$]*no such GPU"),
        ("crash", "ended with status -6"),
        ("garbage", "answered 'Loading weights: 100%', wanted a line of JSON"),
    ],
)
def test_a_variant_that_fails_is_left_out(
    start: Any, tmp_path: Path, how: str, reason: str
) -> None:
    import re

    start.how["tuned"] = how
    outcome = ran(start, tmp_path)
    assert re.search(reason, outcome.failed["tuned"])
    result = Result.of(outcome, "e2b", {})
    assert {row.variant for row in result.rows if len(row.speeds) == 4} == {"stock"}
    assert "**tuned failed**: tuned: " in markdown(result)


def test_an_engine_that_hangs(start: Any, tmp_path: Path) -> None:
    start.how["tuned"] = "hang at start"
    engine = start("tuned", {}, {}, tmp_path / "log")
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="tuned: no answer in 1 s; the end of"):
        engine.answer(1.0)
    assert engine.alive
    engine.close(0.2)
    assert not engine.alive
    assert time.monotonic() - began < 10


def test_the_budget_cuts_rounds(start: Any, tmp_path: Path) -> None:
    outcome = ran(start, tmp_path, rounds=50, budget=0.0, profile=False)
    assert outcome.notes == ["the budget ended after 1 of 50 rounds"]
    assert all(len(each.runs) == 1 for each in outcome.measured.values())
    assert all(each.kernels is None for each in outcome.measured.values())


def test_engines_end_with_the_run(start: Any, tmp_path: Path) -> None:
    made: list[Engine] = []

    def noted(*arguments: Any) -> Engine:
        made.append(start(*arguments))
        return made[-1]

    def interrupted(text: str) -> None:
        if text.startswith("round 1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(VARIANTS, WORKLOADS, {}, tmp_path, 3, say=interrupted, start=noted)
    assert len(made) == 2
    assert not any(engine.alive for engine in made)


def test_variants() -> None:
    found = Variant.parse("tuned:TRITON_ATTN+fast+block64")
    assert found.settings() == {
        "attention_config": {"backend": "TRITON_ATTN"},
        "kv_sharing_fast_prefill": True,
        "block_size": 64,
    }
    assert found.environment()["GEMMA_TUNE"] == "1"
    assert "GEMMA_TUNE_FAST_PREFILL" not in found.environment()
    plain = Variant.parse("stock+nofast")
    assert plain.settings() == {}
    assert plain.environment()["GEMMA_TUNE_FAST_PREFILL"] == "0"
    assert plain.environment()["GEMMA_TUNE"] == "0"
    assert plain.environment()["VLLM_CACHE_ROOT"] != found.environment()["VLLM_CACHE_ROOT"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "begins with 'fast', wanted stock or tuned"),
        ("stock:triton", "has backend 'triton'"),
        ("stock+quick", "has \\+quick, wanted \\+fast"),
        ("stock+block", "has \\+block"),
        ("", "begins with ''"),
    ],
)
def test_variants_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Variant.parse(text)


def test_workloads() -> None:
    assert parse_workload("prefill") == Workload("prefill", 256, 1024, 1)
    assert parse_workload("16x512+64") == Workload("16x512+64", 16, 512, 64)
    for text in ("", "decode", "0x4+1", "4x4", "1x1+1+1", "-1x2+3"):
        with pytest.raises(ValueError, match="wanted prefill, prefill4096"):
            parse_workload(text)
    assert parse_workload("prefill").profiled() == Workload("prefill", 64, 1024, 1)
    assert parse_workload("decode256").profiled() == Workload("decode256", 256, 128, 33)


def test_spread() -> None:
    assert spread([1.0]) == 0
    assert spread([1.0, 3.0]) == 1
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 1


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("kernel_unified_attention", "attention"),
        ("_split_kernel", "attention"),
        ("attention_prefill_kernel", "attention"),
        ("kernel_cutlass_kernel_vllmvllm_flash_attncuteflash_fwd_sm90", "attention"),
        ("qkv_norm_rope_kernel", "QKV norm and RoPE"),
        ("_one_pass_kernel", "norms"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", "norms"),
        ("_gelu_mul_kernel", "gelu * up"),
        ("triton_poi_fused_gelu_mul_slice_2", "gelu * up"),
        ("fused_moe_kernel", "experts"),
        ("_routing_kernel", "routing"),
        ("reshape_and_cache_flash_kernel", "KV write"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "GEMM"),
        ("triton_poi_fused_copy_1", "compiled pointwise"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("something else", "other"),
    ],
)
def test_hot_path_of_a_kernel(name: str, path: str) -> None:
    assert kernels.path_of(name) == path


def test_busy_time_counts_overlaps_once() -> None:
    spans = [
        kernels.Busy("fused_moe_kernel", 0, 10),
        kernels.Busy("fused_moe_kernel", 5, 12),
        kernels.Busy("Memset", 20, 21),
    ]
    found = kernels.summarise(spans)
    assert (found["wall_us"], found["busy_us"], found["launches"]) == (21, 13, 3)
    assert found["paths"]["experts"] == {"us": 17, "launches": 2}
    assert found["longest"][0]["name"] == "fused_moe_kernel"
    assert kernels.summarise([])["busy_us"] == 0


TEXT = {
    "vocab_size": 64,
    "num_hidden_layers": 10,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    "num_kv_shared_layers": 4,
}


def test_model_folder(tmp_path: Path) -> None:
    folder = checkpoint.write_folder({"_source": "x", "text_config": TEXT}, tmp_path / "model")
    found = json.loads((folder / "config.json").read_text())
    assert found["architectures"] == ["Gemma4ForCausalLM"]
    assert found["torch_dtype"] == "bfloat16"
    assert "_source" not in found
    assert found["num_kv_shared_layers"] == 4


@pytest.mark.parametrize(("layers", "shared"), [(9, 3), (6, 1), (5, 0), (2, 1), (1, 0), (10, 4)])
def test_a_model_cut_short(layers: int, shared: int, tmp_path: Path) -> None:
    folder = checkpoint.write_folder(TEXT, tmp_path, layers)
    found = json.loads((folder / "config.json").read_text())
    assert found["num_kv_shared_layers"] == shared
    assert len(found["layer_types"]) == layers == found["num_hidden_layers"]
    own = set(found["layer_types"][: layers - shared])
    assert set(found["layer_types"][layers - shared :]) <= own


def test_layers_that_the_model_has_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layers is 11, wanted 1 to 10"):
        checkpoint.write_folder(TEXT, tmp_path, 11)


def test_drawn_weights_follow_names_alone() -> None:
    import torch

    def model(order: int) -> torch.nn.Module:
        made = torch.nn.Module()
        for name in ("proj", "norm", "embed_tokens")[::order]:
            shape = (64,) if name == "norm" else (96, 64)
            setattr(made, name, torch.nn.Module())
            getattr(made, name).weight = torch.nn.Parameter(torch.zeros(shape))
        made.register_buffer("scale", torch.ones(1))
        return made

    one, other = model(1), model(-1)
    for each in (one, other):
        checkpoint.draw(each, 3)
    states = one.state_dict(), other.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["scale"].item() == 1
    assert states[0]["proj.weight"].std().item() == pytest.approx(64**-0.5, rel=0.1)
    assert states[0]["embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert states[0]["norm.weight"].mean().item() == pytest.approx(1.0, abs=0.1)
    checkpoint.draw(other, 4)
    assert not torch.equal(one.state_dict()["proj.weight"], other.state_dict()["proj.weight"])


def test_values_that_are_keys_are_drawn_as_such() -> None:
    from types import SimpleNamespace

    import torch

    class Attention(torch.nn.Module):
        def __init__(self, sliding: bool) -> None:
            super().__init__()
            self.config = SimpleNamespace(attention_k_eq_v=True)
            self.is_sliding, self.q_size, self.kv_size = sliding, 8, 4
            self.qkv_proj = torch.nn.Linear(16, 16, bias=False)

    full, sliding = Attention(False), Attention(True)
    checkpoint.draw(torch.nn.ModuleList([full, sliding]), 0)
    assert torch.equal(full.qkv_proj.weight[8:12], full.qkv_proj.weight[12:])
    assert not torch.equal(sliding.qkv_proj.weight[8:12], sliding.qkv_proj.weight[12:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "fill"], "workload 'fill', wanted"),
        (["--variant", "tuned", "--variant", "tuned"], "named twice"),
        (["--variant", "fast"], "wanted stock or tuned"),
        (["--budget", "soon"], "no duration"),
    ],
)
def test_wrong_usage(words: list[str], message: str) -> None:
    found = CliRunner().invoke(cli.app, ["bench", *words])
    assert found.exit_code == 2
    assert message in found.output + str(found.stderr)


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner import cli_serving

    monkeypatch.setattr(cli_serving.importlib.util, "find_spec", lambda name: None)
    found = CliRunner().invoke(cli.app, ["bench"])
    assert found.exit_code == 3
    assert "vLLM is not installed" in found.output + str(found.stderr)


def test_rotation_is_fair() -> None:
    orders = [bench._rotated(["a", "b", "c"], turn) for turn in range(3)]
    assert sorted(order[0] for order in orders) == ["a", "b", "c"]
    assert dataclasses.is_dataclass(bench.Outcome)
