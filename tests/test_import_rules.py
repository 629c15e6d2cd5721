"""Imports run one way, and reading a tuned table needs no torch, no GPU and no search library."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: The packages of this project that each package may import, itself aside.
ALLOWED = {
    "kernel_templates": set(),
    "search_spaces": {"kernel_templates"},
    "tuned_configs": set(),
    "tuner": {"search_spaces", "kernel_templates", "tuned_configs", "vllm_plugin"},
    "vllm_plugin": {"kernel_templates", "tuned_configs"},
}
HEAVY = {"torch", "triton", "optuna", "vllm", "numpy"}
#: Third-party packages that a package must not import, not even inside a function.
BARRED = {
    "kernel_templates": {"optuna", "vllm"},
    "search_spaces": {"optuna", "vllm", "triton"},
    "tuned_configs": HEAVY,
    "tuner": set(),
    "vllm_plugin": {"optuna"},
}


def imported(text: str, package: str) -> set[str]:
    """Top-level names of all imports in a module of ``package``, also those inside functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(package if node.level else (node.module or "").partition(".")[0])
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value).partition(".")[0])
    return found


def files(package: str) -> Iterator[Path]:
    return (ROOT / package).rglob("*.py")


def present() -> list[str]:
    return [package for package in ALLOWED if (ROOT / package).is_dir()]


def test_imports_are_found_wherever_they_stand() -> None:
    text = (
        "import os.path, torch.nn as nn\n"
        "from .base import x\n"
        "def f():\n"
        "    from optuna.trial import Trial\n"
        "    importlib.import_module('vllm.config')\n"
    )
    assert imported(text, "tuner") == {"os", "torch", "tuner", "optuna", "vllm"}


@pytest.mark.parametrize("package", present())
def test_imports_run_one_way(package: str) -> None:
    every = list(files(package))
    assert every
    barred = (set(ALLOWED) - ALLOWED[package] - {package}) | BARRED[package]
    faults = {
        str(file.relative_to(ROOT)): names
        for file in every
        if (names := imported(file.read_text(encoding="utf-8"), package) & barred)
    }
    assert faults == {}


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_reading_tables_loads_nothing_heavy() -> None:
    package = ROOT / "tuned_configs"
    modules = [f"tuned_configs.{info.name}" for info in pkgutil.iter_modules([str(package)])]
    assert modules
    code = f"import sys, {', '.join(modules)}; print(sorted({HEAVY!r} & set(sys.modules)))"
    assert run(code) == "[]"
    # The same question about something heavy has another answer.
    assert "torch" in run(f"import sys, torch; print(sorted({HEAVY!r} & set(sys.modules)))")


@pytest.mark.parametrize("finder", ["kernel_templates.base.templates", "search_spaces.base.spaces"])
def test_templates_and_spaces_do_not_load_the_tuner(finder: str) -> None:
    module, _, function = finder.rpartition(".")
    code = (
        f"import sys; from {module} import {function} as found; assert found(); "
        "print(sorted({'tuner', 'optuna', 'tuned_configs', 'vllm'} & set(sys.modules)))"
    )
    assert run(code) == "[]"
