"""Runs of ``vllm_tiny`` in fresh processes, and what the tests ask of them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_tables import write_tables
from vllm_tiny import MARK, write_model

PROGRAM = Path(__file__).parent / "vllm_tiny.py"
KINDS = ("dense", "moe")
ALL = ["gelu_mul", "qkv_norm_rope", "residual_norm"]
#: A front end that has not set up its log yet shows a warning bare.
WARNED = re.compile(r"^(?:.*WARNING.*)?gemma-tune: (.*)$", re.MULTILINE)
INSTALLED = re.compile(r"\(([\w-]+) pid=\d+\) DEBUG.*Gemma4ForCausalLM is built by")
SUMMARY = re.compile(r"INFO.*\] (gemma-tune \S+: Gemma 4 .*)")

#: Marks of every test module that runs vLLM.
MARKS = [
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


def make_place(folder: Path) -> Path:
    """Models and tables of both kinds."""
    for kind in KINDS:
        write_model(folder / kind, kind)
        write_tables(folder / f"tables-{kind}", folder / kind)
    return folder


def run_stock(place: Path) -> dict[str, Ran]:
    """vLLM's own answers, with ``GEMMA_TUNE=0``, and its hidden states in ``stock-<kind>.pt``."""
    return {
        kind: run(
            place / kind, "--eager", "--save", str(place / f"stock-{kind}.pt"), GEMMA_TUNE="0"
        )
        for kind in KINDS
    }


def run(model: Path, *options: str, tables: Path | None = None, **variables: str) -> Ran:
    """One process; an AssertionError with the end of its log unless it answers."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(model), *options],
        env=environment(model, tables, variables),
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


def environment(model: Path, tables: Path | None, variables: Mapping[str, str]) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if "GEMMA_TUNE" not in name},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CACHE_ROOT": str(model.parent / "cache"),
        "TRITON_INTERPRET": "1",
        "GEMMA_TUNE": "1",
        "GEMMA_TUNE_CONFIGS": str(tables or model.parent / "nowhere"),
        **variables,
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
