"""The doctor names every fault of an environment, and what to do about each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_tables import NAME, write_tables
from vllm_tiny import write_config

from kernel_templates.base import KernelTemplate, ModelShape
from tuned_configs import roots
from tuner import cli, doctor, doctor_command
from tuner.device import ProbeResult, known_gpus
from tuner.doctor import Examination, examine
from tuner.model import load_model
from vllm_plugin import contract

NONE = ProbeResult(reason="the test has none")
A100 = ProbeResult((dataclasses.replace(known_gpus()[0], attached=True),))


@pytest.fixture(autouse=True)
def well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, its tables for the interpreter, the plugin on, and vLLM as known."""
    write_tables(tmp_path / "tables", write_config(tmp_path / "model", "dense"))
    monkeypatch.setenv("GEMMA_TUNE_CONFIGS", str(tmp_path / "tables"))
    monkeypatch.setenv("GEMMA_TUNE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(roots, "shipped_root", lambda: tmp_path / "shipped")
    monkeypatch.setattr(contract, "faults", lambda folder: [])
    monkeypatch.setattr(contract, "unknown", lambda text: {})
    gemma4 = tmp_path / "vllm" / contract.GEMMA4
    gemma4.parent.mkdir(parents=True)
    gemma4.write_text("")
    return tmp_path


def shape(place: Path) -> ModelShape:
    return load_model(str(place / "model"), dtype="float32")


def look(place: Path, found: ProbeResult = NONE) -> Examination:
    return examine(found, [shape(place)], place / "vllm")


def todos(seen: Examination) -> list[str]:
    return [finding.todo for finding in seen.findings if finding.todo]


def test_all_is_well(well: Path) -> None:
    seen = look(well)
    assert todos(seen) == []
    texts = [f"{finding.topic}: {finding.text}" for finding in seen.findings]
    assert sum(": active, " in text for text in texts) >= 8
    checked = [text for text in texts if text.startswith("kernel: ")]
    assert len(checked) == 3
    assert all("right" in text for text in checked)


def test_no_tables(well: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA_TUNE_CONFIGS", str(well / "empty"))
    assert f'run gemma-tune --gpu "{NAME}"' in todos(look(well))


def test_predicted_tables(well: Path) -> None:
    write_tables(well / "tables", well / "model", provenance="predicted")
    seen = look(well)
    model = shape(well).name
    assert set(todos(seen)) == {f'run gemma-tune confirm --gpu "{NAME}" --model {model}'}


def test_slower_than_stock_is_nothing_to_do(well: Path) -> None:
    write_tables(well / "tables", well / "model", stock_us=0.9)
    seen = look(well)
    assert todos(seen) == []
    assert any("as slow as stock" in finding.text for finding in seen.findings)


def test_broken_table(well: Path) -> None:
    (path,) = (well / "tables").rglob("gelu_mul.json")
    path.write_text("{")
    seen = look(well)
    assert any(str(path) in finding.text and finding.todo for finding in seen.findings)


@pytest.mark.parametrize(("value", "said"), [("0", "is off"), ("perhaps", "'perhaps'")])
def test_switch(well: Path, monkeypatch: pytest.MonkeyPatch, value: str, said: str) -> None:
    monkeypatch.setenv("GEMMA_TUNE", value)
    seen = look(well)
    assert todos(seen) == ["set GEMMA_TUNE=1 in the server"]
    assert any(said in finding.text for finding in seen.findings)


def test_another_vllm(well: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "faults", lambda folder: ["mlp: differs"])
    monkeypatch.setattr(contract, "unknown", lambda text: {"mlp": "it differs"})
    seen = look(well)
    assert len(todos(seen)) == 1
    paths = [each.text for each in seen.findings if each.topic == "hot path"]
    assert all("inactive, it differs" in text for text in paths if "gelu_mul" in text)


def test_unreadable_vllm(well: Path) -> None:
    seen = examine(NONE, [shape(well)], well / "nowhere")
    assert "install vLLM 0.26 to 0.33" in todos(seen)


def test_no_gpu(well: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    seen = look(well)
    assert todos(seen) == ["run on a machine with an NVIDIA GPU"]


def test_wrong_kernel_is_found(well: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 63
    def wrong(
        worker: object, kernel: KernelTemplate[object, object], problem: object, config: object
    ) -> float:
        if kernel.name == "gelu_mul":
            raise doctor.WorkerError("WrongResultError: as served: 3.1 instead of 2")
        return 0.5

    monkeypatch.setattr(doctor, "_check", wrong)
    seen = look(well)
    assert ["GEMMA_TUNE=0 until then" in todo for todo in todos(seen)] == [True]


def test_command(well: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "probe", lambda: A100)
    monkeypatch.setattr(doctor, "vllm_folder", lambda: None)
    found = CliRunner().invoke(cli.app, ["doctor", "--model", "e2b", "--json"])
    assert found.exit_code == 1
    said = json.loads(found.output)
    assert said["well"] is False
    assert any(each["todo"] == "pip install vllm" for each in said["findings"])
    plain = CliRunner().invoke(cli.app, ["doctor", "--model", "e2b"])
    assert plain.exit_code == 1
    assert 'to do: run gemma-tune --gpu "NVIDIA A100-SXM4-80GB" --model e2b' in plain.output
    assert CliRunner().invoke(cli.app, ["doctor", "--model", "e9b"]).exit_code == 2
