"""vLLM's folder of fused-MoE tables is set only where it holds some for this GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tuned_configs import TableSet
from tuned_configs.vllm_moe import file_name
from vllm_plugin import moe_folder
from vllm_plugin.tables import Unavailable

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


def config(experts: int | None, **changed: Any) -> Any:
    text = SimpleNamespace(
        num_experts=experts, enable_moe_block=bool(experts), moe_intermediate_size=704
    )
    options = {"tp": 1, "dp": 1, "expert_parallel": False, "quant": None, "dtype": torch.bfloat16}
    given = SimpleNamespace(**{**options, **changed})
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, dtype=given.dtype),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=given.tp,
            data_parallel_size=given.dp,
            enable_expert_parallel=given.expert_parallel,
        ),
        quant_config=given.quant,
    )


def quantised(method: str, blocks: list[int] | None = None) -> Any:
    return SimpleNamespace(get_name=lambda: method, weight_block_size=blocks)


@pytest.fixture
def h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an H200 and one folder of tables."""
    monkeypatch.setattr(moe_folder, "roots", lambda: [tmp_path])
    monkeypatch.setattr(moe_folder, "vllm_device_name", lambda: "NVIDIA_H200")
    monkeypatch.setattr(moe_folder, "find_device", lambda: SimpleNamespace(name=NAME))
    monkeypatch.delenv(moe_folder.VARIABLE, raising=False)
    return tmp_path


def test_what_is_said(h200: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moe_folder.use(config(None)) == ""
    put(h200, "NVIDIA_H100")
    said = moe_folder.use(config(128, quant=quantised("fp8")))  # case 1
    assert "left to vLLM, no vLLM fused-MoE table for NVIDIA_H200" in said
    assert "wanted E=128,N=704,device_name=NVIDIA_H200,dtype=fp8_w8a8.json in" in said
    assert str(h200 / "NVIDIA_H200") in said
    assert "benchmark_moe.py" in said
    monkeypatch.setenv(moe_folder.VARIABLE, "/theirs")
    assert "set by the user" in moe_folder.use(config(128))


def test_no_gpu_is_a_reason(h200: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise Unavailable("no GPU")

    monkeypatch.setattr(moe_folder, "find_device", none)
    assert moe_folder.use(config(128)) == "moe_experts: inactive, Unavailable: no GPU"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (config(128, tp=2), "E=128,N=352,device_name=NVIDIA_H200.json"),
        (config(128, tp=2, dp=2), "E=128,N=176,device_name=NVIDIA_H200.json"),
        (config(128, tp=8, expert_parallel=True), "E=16,N=704,device_name=NVIDIA_H200.json"),
        (
            config(128, dtype=torch.float32),
            "E=128,N=704,device_name=NVIDIA_H200,dtype=float32.json",
        ),
        (
            config(128, quant=quantised("fp8", [128, 128])),
            "E=128,N=704,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
        (
            config(128, quant=quantised("compressed-tensors")),
            "E=128,N=704,device_name=NVIDIA_H200,dtype=....json",
        ),
    ],
)
def test_the_file_that_vllm_looks_for(given: Any, name: str) -> None:  # cases 1 and 5
    assert moe_folder.wanted(given, "NVIDIA_H200") == name


@pytest.mark.vllm
def test_vllm_reads_the_folder(h200: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = pytest.importorskip("vllm.envs")
    put(h200)
    monkeypatch.setenv(moe_folder.VARIABLE, "")
    monkeypatch.delenv(moe_folder.VARIABLE)
    said = moe_folder.use(config(128))
    assert "E=128,N=704,device_name=NVIDIA_H200.json: found" in said
    assert str(h200 / "NVIDIA_H200") == envs.VLLM_TUNED_CONFIG_FOLDER


QUANTISED = [(None, None), ("fp8_w8a8", None), ("fp8_w8a8", (128, 128)), ("int4_w4a16", None)]


@pytest.mark.vllm
@pytest.mark.parametrize(("dtype", "blocks"), QUANTISED)
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB"])
def test_names_are_those_that_vllm_reads(
    dtype: str | None,
    blocks: tuple[int, int] | None,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # case 5
    """Written under our name, found by vLLM's look-up, for every slice of the experts."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.fused_moe import fused_moe

    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: device.replace(" ", "_"))
    monkeypatch.setenv(moe_folder.VARIABLE, str(tmp_path))
    for width in (704, 352, 176, 88):
        row = {**ROW, "BLOCK_SIZE_N": 16 * (width // 88)}
        (tmp_path / file_name(128, width, device, dtype, blocks)).write_text(
            json.dumps({"16": row})
        )
    fused_moe.get_moe_configs.cache_clear()
    for width in (704, 352, 176, 88):
        found = fused_moe.get_moe_configs(128, width, dtype, *(blocks or (None, None)))
        assert found == {16: {**ROW, "BLOCK_SIZE_N": 16 * (width // 88)}}
    fused_moe.get_moe_configs.cache_clear()
