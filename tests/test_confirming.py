"""``GEMMA_TUNE=confirm`` at a server's start: once, with a limit, and never the server's end."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_tables import NAME, write_tables
from vllm_tiny import config, write_config

from vllm_plugin import confirming, settings

FOLDER = "Triton_interpreter"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server's config, and predicted tables in the user's folder."""
    model = write_config(tmp_path / "model", "dense")
    write_tables(tmp_path / "tables", model, provenance="predicted")
    monkeypatch.setenv("GEMMA_TUNE_CONFIGS", str(tmp_path / "tables"))
    monkeypatch.setenv("GEMMA_TUNE", "confirm")
    monkeypatch.setattr(settings.log, "propagate", True)
    hf = SimpleNamespace(to_json_string=lambda use_diff: json.dumps(config("dense")))
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def child(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> Path:
    """Let the child be a script that notes its words, then does as ``code`` says."""
    log = folder / "calls"
    program = folder / "child.py"
    program.write_text(
        f"import sys, time\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n{code}\n"
    )
    monkeypatch.setattr(confirming, "PROGRAM", (sys.executable, str(program)))
    return log


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_switch_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA_TUNE", "confirm")
    assert settings.switched_on()
    assert settings.confirm_asked()
    monkeypatch.setenv("GEMMA_TUNE", "1")
    assert not settings.confirm_asked()


def test_once_per_predictions(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = child(monkeypatch, tmp_path, "print('3 of 3 predictions held')")
    with caplog.at_level(logging.INFO):
        confirming.once(server)
        confirming.once(server)
    (words,) = log.read_text().splitlines()
    assert words.startswith(f"confirm --gpu {NAME} --model ")
    assert words.endswith("--budget 120s")
    assert "3 of 3 predictions held" in caplog.text
    assert "were confirmed before" in caplog.text
    assert warnings(caplog) == []
    # Other predictions are confirmed anew.
    (path,) = (tmp_path / "tables").rglob("gelu_mul.json")
    path.unlink()
    confirming.once(server)
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('error: no GPU here'); sys.exit(3)", "ended with 3: error: no GPU here"),
        ("import os; os.kill(os.getpid(), 11)", "ended with -11"),
    ],
)
def test_failure_is_one_warning_and_remembered(
    server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: str,
    said: str,
) -> None:
    log = child(monkeypatch, tmp_path, code)
    confirming.once(server)
    assert len(warnings(caplog)) == 1
    assert said in warnings(caplog)[0]
    confirming.once(server)
    assert len(log.read_text().splitlines()) == 1
    marker = tmp_path / "tables" / FOLDER / confirming.MARKER
    assert json.loads(marker.read_text())["exit"] != 0


def test_child_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    late = f"import time; time.sleep(4); open({str(tmp_path / 'alive')!r}, 'w')"
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {late!r}])\n"
        "time.sleep(600)"
    )
    begin = time.monotonic()
    ended = confirming.run_child([sys.executable, "-c", code], {}, seconds=2.0)
    assert ended.code is None
    assert time.monotonic() - begin < 10
    time.sleep(4)
    assert not (tmp_path / "alive").exists()


def test_broken_marker_counts_as_none(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = child(monkeypatch, tmp_path, "pass")
    (tmp_path / "tables" / FOLDER / confirming.MARKER).write_text("{broken")
    confirming.once(server)
    assert len(log.read_text().splitlines()) == 1


def test_tensor_parallel_is_refused_with_the_command(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = child(monkeypatch, tmp_path, "pass")
    server.parallel_config.tensor_parallel_size = 2
    confirming.once(server)
    assert "gemma-tune confirm --tp 2" in warnings(caplog)[0]
    assert not log.exists()


def test_nothing_predicted_starts_nothing(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = child(monkeypatch, tmp_path, "pass")
    write_tables(tmp_path / "tables", tmp_path / "model")
    confirming.once(server)
    assert not log.exists()
