"""Whatever is wrong with tables, GPU, settings or our own code: vLLM answers as without us."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from vllm_runs import ALL, MARKS, Ran, assert_same, assert_stock, run
from vllm_tables import write_tables

pytestmark = MARKS


def test_predicted_tables_wait_for_confirmation(
    vllm_place: Path, vllm_stock: dict[str, Ran]
) -> None:
    tables = vllm_place / "tables-predicted"
    write_tables(tables, vllm_place / "dense", provenance="predicted")
    ran = run(vllm_place / "dense", "--eager", tables=tables)
    assert_stock(ran, vllm_stock["dense"])
    assert "0 of 9 hot paths active" in ran.summaries[0]
    assert "gemma-tune confirm" in ran.summaries[0]
    ran = run(vllm_place / "dense", "--eager", tables=tables, GEMMA_TUNE_PREDICTED="1")
    assert ran.result["used"] == ALL
    assert_same(ran, vllm_stock["dense"])


def test_confirmation_that_cannot_run_leaves_vllm_stock(
    vllm_place: Path, vllm_stock: dict[str, Ran]
) -> None:
    tables = vllm_place / "tables-unconfirmed"
    write_tables(tables, vllm_place / "dense", provenance="predicted")
    ran = run(vllm_place / "dense", "--eager", tables=tables, GEMMA_TUNE="confirm")
    assert_stock(ran, vllm_stock["dense"])
    # The child took the model's config as vLLM has it, and found no GPU.
    (warning,) = ran.warnings
    assert "gemma-tune confirm ended with 3" in warning
    assert "no attached GPU matches 'Triton interpreter'" in warning
    assert "0 of 9 hot paths active" in ran.summaries[0]
    # It is not tried again at the next start.
    again = run(vllm_place / "dense", "--eager", tables=tables, GEMMA_TUNE="confirm")
    assert again.warnings == []


def test_slower_than_stock_stays_off(vllm_place: Path, vllm_stock: dict[str, Ran]) -> None:
    tables = vllm_place / "tables-worse"
    write_tables(tables, vllm_place / "dense", stock_us=0.9)
    ran = run(vllm_place / "dense", "--eager", tables=tables)
    assert_stock(ran, vllm_stock["dense"])
    assert "measured 1.11x as slow as stock" in ran.summaries[0]


def test_broken_table_is_named_and_the_others_serve(
    vllm_place: Path, vllm_stock: dict[str, Ran]
) -> None:
    tables = vllm_place / "tables-broken"
    shutil.copytree(vllm_place / "tables-dense", tables)
    (broken,) = tables.rglob("qkv_norm_rope.json")
    broken.write_text('{"schema": 1, "entries": [')
    ran = run(vllm_place / "dense", "--eager", tables=tables)
    assert ran.result["used"] == ["gelu_mul", "residual_norm"]
    assert len(ran.warnings) == 1
    assert str(broken) in ran.warnings[0]
    assert_same(ran, vllm_stock["dense"])


def test_missing_gpu(vllm_place: Path, vllm_stock: dict[str, Ran]) -> None:
    ran = run(
        vllm_place / "dense", "--eager", tables=vllm_place / "tables-dense", TRITON_INTERPRET="0"
    )
    assert_stock(ran, vllm_stock["dense"])
    assert "inactive, vLLM runs stock: no GPU found" in ran.summaries[0]


def test_unknown_switch(vllm_place: Path, vllm_stock: dict[str, Ran]) -> None:
    ran = run(
        vllm_place / "dense", "--eager", tables=vllm_place / "tables-dense", GEMMA_TUNE="maybe"
    )
    assert_stock(ran, vllm_stock["dense"])
    assert len(ran.warnings) == 1
    assert "wanted 0, 1 or confirm" in ran.warnings[0]


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
        "vllm_plugin.warmup:run",
        "vllm_plugin.ranks:disagreement",
    ],
)
def test_exception_in_a_hook_leaves_vllm_stock(
    vllm_place: Path, vllm_stock: dict[str, Ran], where: str
) -> None:
    ran = run(vllm_place / "dense", "--eager", "--break", where, tables=vllm_place / "tables-dense")
    assert_stock(ran, vllm_stock["dense"])
    assert len(ran.warnings) == 1
    assert "vLLM runs stock: RuntimeError: broken on purpose" in ran.warnings[0]


def test_exception_in_planning_one_kind_leaves_the_others(
    vllm_place: Path, vllm_stock: dict[str, Ran]
) -> None:
    broken = "vllm_plugin.plan:Planner._attention"
    ran = run(
        vllm_place / "dense", "--eager", "--break", broken, tables=vllm_place / "tables-dense"
    )
    assert ran.result["used"] == ["gelu_mul", "residual_norm"]
    assert "inactive, RuntimeError: broken on purpose" in ran.summaries[0]
    assert_same(ran, vllm_stock["dense"])


@pytest.mark.parametrize(
    "where", ["kernel_templates.launcher:Launcher.launch", "vllm_plugin.tables:Choices.config"]
)
def test_kernel_that_cannot_run_is_replaced(
    vllm_place: Path, vllm_stock: dict[str, Ran], where: str
) -> None:
    ran = run(vllm_place / "dense", "--eager", "--break", where, tables=vllm_place / "tables-dense")
    assert len(ran.result["broken"]) == len(ran.warnings) > 5
    assert all("plain PyTorch takes its place" in warning for warning in ran.warnings)
    assert_same(ran, vllm_stock["dense"])
