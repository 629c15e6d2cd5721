"""After warm-up nothing is compiled while serving: counted by the hook that vLLM's monitor uses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuned_configs.roots import shipped_root

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def count(how: str, cache: Path) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/tests"}
    program = ROOT / "tests" / "warmup_counts.py"
    done = subprocess.run(
        [sys.executable, str(program), str(shipped_root()), how],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def test_nothing_compiles_while_serving(tmp_path: Path) -> None:
    warmed = count("ahead", tmp_path)
    assert warmed["serving"] == []
    assert warmed["ahead"] > 4
    # The counter does count: without warm-up the same steps compile.
    cold = count("cold", tmp_path)
    assert cold["ahead"] == 0
    assert 0 < len(cold["serving"]) <= warmed["ahead"]
