"""vLLM's folder of fused-MoE tables is set only where it holds some for this GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuned_configs import TableSet
from vllm_plugin import moe_folder

ROW = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
ROW |= {"num_warps": 4, "num_stages": 3}
NAME = "NVIDIA H200"


def put(root: Path, device: str = "NVIDIA_H200", row: dict[str, Any] = ROW) -> Path:
    path = root / "NVIDIA_H200" / f"E=128,N=704,device_name={device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"16": row}))
    return path


def test_found_for_this_gpu_only(tmp_path: Path) -> None:
    assert moe_folder.find([tmp_path], NAME, "NVIDIA_H200")[0] is None
    put(tmp_path, "NVIDIA_H100")
    folder, reason = moe_folder.find([tmp_path], NAME, "NVIDIA_H200")
    assert folder is None
    assert reason == "no vLLM fused-MoE table for NVIDIA_H200 among the tables"
    put(tmp_path)
    assert moe_folder.find([tmp_path], NAME, "NVIDIA_H200")[0] == tmp_path / "NVIDIA_H200"


def test_users_folder_comes_first_and_a_faulty_one_is_left(tmp_path: Path) -> None:
    put(tmp_path / "shipped")
    mine = put(tmp_path / "mine")
    searched = [tmp_path / "shipped", tmp_path / "mine"]
    assert moe_folder.find(searched, NAME, "NVIDIA_H200")[0] == mine.parent
    put(tmp_path / "mine", row={**ROW, "BLOCK_SIZE_M": 17})
    assert moe_folder.find(searched, NAME, "NVIDIA_H200")[0] == tmp_path / "shipped" / "NVIDIA_H200"
    folder, reason = moe_folder.find([tmp_path / "mine"], NAME, "NVIDIA_H200")
    assert folder is None
    assert "BLOCK_SIZE_M" in reason


def test_such_a_file_is_no_faulty_table(tmp_path: Path) -> None:
    put(tmp_path)
    assert TableSet.load(tmp_path, NAME).faults == ()


def config(experts: int | None) -> Any:
    text = SimpleNamespace(num_experts=experts, enable_moe_block=bool(experts))
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))


def test_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_folder, "roots", lambda: [tmp_path])
    monkeypatch.setattr(moe_folder, "vllm_device_name", lambda: "NVIDIA_H200")
    monkeypatch.delenv(moe_folder.VARIABLE, raising=False)
    assert moe_folder.use(NAME, config(None)) == ""
    assert "inactive, no vLLM fused-MoE table" in moe_folder.use(NAME, config(128))
    monkeypatch.setenv(moe_folder.VARIABLE, "/theirs")
    assert "set by the user" in moe_folder.use(NAME, config(128))


@pytest.mark.vllm
def test_vllm_reads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = pytest.importorskip("vllm.envs")
    put(tmp_path)
    monkeypatch.setattr(moe_folder, "roots", lambda: [tmp_path])
    monkeypatch.setattr(moe_folder, "vllm_device_name", lambda: "NVIDIA_H200")
    monkeypatch.setenv(moe_folder.VARIABLE, "")
    monkeypatch.delenv(moe_folder.VARIABLE)
    said = moe_folder.use(NAME, config(128))
    assert str(tmp_path) in said
    assert str(tmp_path / "NVIDIA_H200") == envs.VLLM_TUNED_CONFIG_FOLDER
