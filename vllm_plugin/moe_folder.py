"""vLLM's own fused-MoE tables: point vLLM to ours for this GPU, where there are any.

vLLM looks for ``E=...,N=...,device_name=....json`` in ``VLLM_TUNED_CONFIG_FOLDER`` first and keeps
what it found, so the folder is set while the model is built, before the first look-up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tuned_configs.faults import TableError
from tuned_configs.naming import folder_name
from tuned_configs.roots import roots
from tuned_configs.vllm_moe import device_part, file_name, is_moe_table, read_moe_table

from .tables import find_device

VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"


def use(vllm_config: Any) -> str:
    """Set the folder if that helps this model; what was done or why not, empty without experts.

    Also for a server whose layers the plugin leaves alone: the tables are vLLM's own kind.
    """
    try:
        return _use(vllm_config)
    except Exception as error:  # the other paths do not depend on this one
        return f"moe_experts: inactive, {type(error).__name__}: {error}"


def _use(vllm_config: Any) -> str:
    text = getattr(vllm_config.model_config, "hf_text_config", None)
    if not getattr(text, "num_experts", None) or not getattr(text, "enable_moe_block", True):
        return ""
    if os.environ.get(VARIABLE) is not None:
        return f"moe_experts: inactive, {VARIABLE} is set by the user"
    device_name = find_device().name
    searched, device = list(roots()), vllm_device_name()
    folder, reason = find(searched, device_name, device)
    name = wanted(vllm_config, device)
    if folder is None:
        places = " or ".join(str(root / folder_name(device_name)) for root in reversed(searched))
        return (
            f"moe_experts: left to vLLM, {reason}: wanted {name} in {places}; vLLM's "
            "benchmark_moe.py tunes one"
        )
    os.environ[VARIABLE] = str(folder)
    from vllm import envs

    if getattr(envs, VARIABLE, None) != str(folder):
        del os.environ[VARIABLE]
        return "moe_experts: inactive, vLLM has read its environment already"
    there = "found" if (folder / name).is_file() else "not there"
    return f"moe_experts: vLLM looks for its tables in {folder} ({name}: {there})"


def vllm_device_name() -> str:
    """The GPU's name as this vLLM knows it."""
    from vllm.platforms import current_platform

    return device_part(str(current_platform.get_device_name()))


def wanted(vllm_config: Any, device: str) -> str:
    """The file that vLLM will look for; ``...`` stands for a quantisation that we cannot name."""
    text, parallel = vllm_config.model_config.hf_text_config, vllm_config.parallel_config
    experts, width, ranks = text.num_experts, text.moe_intermediate_size, _ranks(parallel)
    if getattr(parallel, "enable_expert_parallel", False):
        experts //= ranks
    else:
        width //= ranks
    method = getattr(vllm_config.quant_config, "get_name", lambda: None)()
    if method == "fp8":
        blocks = getattr(vllm_config.quant_config, "weight_block_size", None)
        return file_name(experts, width, device, "fp8_w8a8", tuple(blocks) if blocks else None)
    if method is not None:
        return file_name(experts, width, device).replace(".json", ",dtype=....json")
    dtype = "float32" if vllm_config.model_config.dtype == torch.float32 else None
    return file_name(experts, width, device, dtype)


def _ranks(parallel: Any) -> int:
    """Ranks that experts are divided among, by width or by number."""
    return int(parallel.tensor_parallel_size * getattr(parallel, "data_parallel_size", 1))


def find(searched: Iterable[Path], device_name: str, name: str) -> tuple[Path | None, str]:
    """The folder to use, the user's before the shipped one, else None and why.

    A folder with a faulty file is not used: vLLM would raise on it.
    """
    faults: list[str] = []
    for root in reversed(list(searched)):
        folder = root / folder_name(device_name)
        files = sorted(folder.glob("E=*.json")) if folder.is_dir() else []
        own = [each for each in files if is_moe_table(each) and _device_of(each) == name]
        try:
            for path in own:
                read_moe_table(path)
        except TableError as error:
            faults.append(str(error))
            continue
        if own:
            return folder, ""
    return None, "; ".join(faults) or f"no vLLM fused-MoE table for {name} among the tables"


def _device_of(path: Path) -> str:
    return path.name.partition("device_name=")[2].removesuffix(".json").partition(",")[0]
