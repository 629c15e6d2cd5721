"""``GEMMA_TUNE=confirm``: confirm this GPU's predicted tables once, before the model is built.

The work is ``gemma-tune confirm``'s, in a process of its own, so that a crash there costs the
server nothing.  A marker beside the user's tables remembers that it was done, well or badly, for
these predictions and versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernel_templates.base import DeviceInfo
from tuned_configs import TableSet
from tuned_configs.files import replace_file
from tuned_configs.naming import folder_name
from tuned_configs.roots import roots, user_root

from . import settings
from .tables import find_device

BUDGET_SECONDS = 120
#: What starting, compiling the stock peers and ending may take beside the budget.
LIMIT_SECONDS = BUDGET_SECONDS + 180.0
MARKER = ".confirmed.json"
LOCK = ".confirm.lock"
PROGRAM = (sys.executable, "-m", "tuner.cli")


@dataclass(frozen=True)
class Ended:
    """How the child ended: exit code (None: out of time) and its last line."""

    code: int | None
    text: str


def once(vllm_config: Any) -> None:
    """Confirm unless it was done before; never raises, says at most one WARNING."""
    try:
        _once(vllm_config)
    except Exception as error:
        settings.log.warning(
            "gemma-tune: predictions are not confirmed, they stay inactive: %s: %s",
            type(error).__name__,
            error,
        )


def _once(vllm_config: Any) -> None:
    ranks = getattr(vllm_config.parallel_config, "tensor_parallel_size", 1)
    device = find_device()
    if not predicted_digest(device):
        settings.log.info("gemma-tune: nothing to confirm on %s", device.name)
        return
    if ranks > 1:
        # The ranks' GPUs are all in use, and one rank's times would have to reach the others.
        raise RuntimeError(
            f"tensor parallelism: run `gemma-tune confirm --tp {ranks} --model ...` before serving"
        )
    folder = user_root() / folder_name(device.name)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / LOCK):
        marker = folder / MARKER
        if _remembered(marker) == predicted_digest(device):
            settings.log.info("gemma-tune: predictions were confirmed before: %s", marker)
            return
        settings.log.info(
            "gemma-tune: confirming predicted tables on %s, up to %d s",
            device.name,
            LIMIT_SECONDS,
        )
        with tempfile.TemporaryDirectory() as scratch:
            ended = run_child(command(device, vllm_config, Path(scratch)), child_environment())
        # What was predicted is measured now: the digest is that of what is left.
        done = {"predicted": predicted_digest(device), "exit": ended.code, "last": ended.text}
        replace_file(marker, json.dumps(done, indent=1) + "\n")
    if ended.code is None:
        raise TimeoutError(f"no end within {LIMIT_SECONDS:.0f} s")
    if ended.code not in (0, 1):
        raise RuntimeError(f"gemma-tune confirm ended with {ended.code}: {ended.text}")
    settings.log.info("gemma-tune: %s", ended.text)


def predicted_digest(device: DeviceInfo) -> str:
    """Hash of the predicted entries at hand and of the versions; empty where there are none."""
    import triton

    tables = TableSet.load(roots(), device.name, measured_only=False)
    rows = sorted(
        entry.model_dump_json()
        for loaded in tables.tables
        for entry in loaded.table.entries
        if loaded.table.runs[entry.run].provenance == "predicted"
    )
    if not rows:
        return ""
    versions = [settings.version(), str(torch.__version__), triton.__version__]
    return hashlib.sha256(json.dumps([versions, rows]).encode()).hexdigest()[:24]


def _remembered(marker: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(marker.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return str(found.get("predicted", ""))
    return ""


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One engine at a time; others (data or pipeline parallel) wait, then find the marker."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def command(device: DeviceInfo, vllm_config: Any, scratch: Path) -> list[str]:
    """``gemma-tune confirm`` for this model; its config as vLLM sees it goes into ``scratch``."""
    config = scratch / "config.json"
    config.write_text(vllm_config.model_config.hf_config.to_json_string(use_diff=False))
    return [
        *PROGRAM, "confirm", "--gpu", device.name, "--model", str(config),
        "--budget", f"{BUDGET_SECONDS}s",
    ]  # fmt: skip


def child_environment() -> dict[str, str]:
    """This process's environment with this process's GPU only, and the plugin off."""
    environment = {**os.environ, settings.SWITCH_VARIABLE: "0"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        uuid = str(getattr(properties, "uuid", ""))
        if uuid and "MIG" not in properties.name:
            environment["CUDA_VISIBLE_DEVICES"] = f"GPU-{uuid.removeprefix('GPU-')}"
    return environment


def run_child(
    words: Sequence[str], environment: Mapping[str, str], seconds: float = LIMIT_SECONDS
) -> Ended:
    """Run to its end or kill it and its children after ``seconds``."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            list(words),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    said = [line for line in lines if "predictions held" in line or "error:" in line]
    return Ended(code, (said or lines or [""])[-1].strip())
