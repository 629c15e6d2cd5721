"""vLLM's own fused-MoE tables: point vLLM to ours for this GPU, where there are any.

vLLM looks for ``E=...,N=...,device_name=....json`` in ``VLLM_TUNED_CONFIG_FOLDER`` first and keeps
what it found, so the folder is set while the model is built, before the first look-up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tuned_configs.faults import TableError
from tuned_configs.naming import folder_name
from tuned_configs.roots import roots
from tuned_configs.vllm_moe import is_moe_table, read_moe_table

VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"


def use(device_name: str, vllm_config: Any) -> str:
    """Set the folder if that helps this model; what was done or why not, empty without experts."""
    try:
        return _use(device_name, vllm_config)
    except Exception as error:  # the other paths do not depend on this one
        return f"moe_experts: inactive, {type(error).__name__}: {error}"


def _use(device_name: str, vllm_config: Any) -> str:
    text = getattr(vllm_config.model_config, "hf_text_config", None)
    if not getattr(text, "num_experts", None) or not getattr(text, "enable_moe_block", True):
        return ""
    if os.environ.get(VARIABLE) is not None:
        return f"moe_experts: inactive, {VARIABLE} is set by the user"
    folder, reason = find(roots(), device_name, vllm_device_name())
    if folder is None:
        return f"moe_experts: inactive, {reason}"
    os.environ[VARIABLE] = str(folder)
    from vllm import envs

    if getattr(envs, VARIABLE, None) != str(folder):
        del os.environ[VARIABLE]
        return "moe_experts: inactive, vLLM has read its environment already"
    return f"moe_experts: vLLM looks for its tables in {folder}"


def vllm_device_name() -> str:
    """The GPU as vLLM names it in these files: ``NVIDIA_H200`` for every H200."""
    from vllm.platforms import current_platform

    name = str(current_platform.get_device_name()).replace(" ", "_")
    return "NVIDIA_H200" if "H200" in name.split("_") else name


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
