"""Which GPU: names by rule, facts of known GPUs, and what is attached to this machine.

Reading an attached GPU starts CUDA, which a tuner's own process must not do (it forks compilers and
outlives poisoned contexts).  :func:`probe` therefore runs ``python -m tuner.device`` in a child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kernel_templates.base import DeviceInfo

GPU_FACTS = Path(__file__).with_name("gpus.json")
PROBE_COMMAND = (sys.executable, "-m", "tuner.device")
PROBE_SECONDS = 60.0

_DEVICE = TypeAdapter(DeviceInfo)
_DEVICES = TypeAdapter(list[DeviceInfo])
_MIG_PROFILE = re.compile(r"\d+[gc]")


class DeviceError(ValueError):
    """No GPU, the wrong GPU, or a mix of GPUs; the message says what was found and wanted."""


def matches(query: str, device_name: str) -> bool:
    """Whether ``query`` means the GPU with that driver name.

    Both are split into lower-case alphanumeric tokens.  Every token of the query must equal a token
    of the name or several adjacent ones written together: ``a100`` means every A100,
    ``a100-40gb`` only those of 40 GB, ``rtx4090`` the ``NVIDIA GeForce RTX 4090``; ``l4`` is no
    L40 and ``h100`` no GH200.  A MIG slice (``mig`` or a profile such as ``1g.10gb`` in its name)
    and a whole GPU never match: a slice has other numbers.
    """
    wanted, tokens = _tokens(query), _tokens(device_name)
    if not wanted or _is_slice(wanted) != _is_slice(tokens):
        return False
    spelled = {
        "".join(tokens[start:end])
        for start in range(len(tokens))
        for end in range(start + 1, len(tokens) + 1)
    }
    return all(token in spelled for token in wanted)


@functools.cache
def _facts() -> tuple[DeviceInfo, ...]:
    entries = json.loads(GPU_FACTS.read_text(encoding="utf-8"))["gpus"]
    return tuple(
        _DEVICE.validate_python({k: v for k, v in entry.items() if k != "source"})
        for entry in entries
    )


def known_gpus() -> list[DeviceInfo]:
    """The GPUs of the data file, in its order: public figures, for GPUs that are not attached."""
    return list(_facts())


def from_data_file(query: str) -> DeviceInfo:
    """The known GPU that ``query`` means, for cross-compilation.

    When several match (``a100`` means both memory sizes) it is the first in the file.  DeviceError
    when none matches, or when those that match are different chips (``80gb``).
    """
    found = [gpu for gpu in known_gpus() if matches(query, gpu.name)]
    if not found:
        known = ", ".join(gpu.name for gpu in known_gpus())
        raise DeviceError(f"no known GPU matches {query!r}; known: {known}")
    if len({(gpu.capability, gpu.sms) for gpu in found}) > 1:
        names = ", ".join(gpu.name for gpu in found)
        raise DeviceError(f"{query!r} matches different GPUs: {names}; name one of them")
    return found[0]


def attached_gpus() -> list[DeviceInfo]:
    """Every visible GPU as the driver describes it.  Starts CUDA: see :func:`probe`.

    DeviceError when CUDA does not work.  Bandwidth is memory clock x bus width where PyTorch knows
    them, else the known GPU of the same name, else the lowest of the known GPUs of that capability.
    No property tells the bf16 rate or the blocks per SM: see :func:`describe`.
    """
    import torch

    if torch.version.hip is not None:
        raise DeviceError("this PyTorch is built for ROCm, wanted one for CUDA")
    try:
        # is_available() would hide the reason.
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"CUDA does not start: {str(error).strip()}") from error
    driver = _driver_version()
    return [
        describe(torch.cuda.get_device_properties(index), driver)
        for index in range(torch.cuda.device_count())
    ]


def describe(properties: Any, driver: str | None) -> DeviceInfo:
    """A :class:`DeviceInfo` from PyTorch's device properties.

    What they lack comes from the known GPU of the same name and capability, else from the peers of
    the same capability (else from all known GPUs), each time the lowest figure: bandwidth as it
    stands, the bf16 rate per SM, the blocks per SM.  A low figure only makes predictions careful.
    """
    name = str(properties.name)
    capability = (int(properties.major), int(properties.minor))
    sms = int(properties.multi_processor_count)
    known = known_gpus()
    peers = [gpu for gpu in known if gpu.capability == capability] or known
    peers = [gpu for gpu in peers if gpu.name == name and gpu.sms == sms] or peers
    # kHz x bits, two transfers per clock.
    clock = int(getattr(properties, "memory_clock_rate", 0) or 0) * 1000
    width = int(getattr(properties, "memory_bus_width", 0) or 0)
    measured = 2.0 * clock * width / 8
    uuid = str(properties.uuid) if getattr(properties, "uuid", None) else None
    if uuid is not None and not uuid.startswith(("GPU-", "MIG-")):
        uuid = ("MIG-" if _is_slice(_tokens(name)) else "GPU-") + uuid
    return DeviceInfo(
        name=name,
        capability=capability,
        sms=sms,
        shared_per_block=int(properties.shared_memory_per_block_optin),
        shared_per_sm=int(properties.shared_memory_per_multiprocessor),
        l2_bytes=int(properties.L2_cache_size),
        memory_bytes=int(properties.total_memory),
        bandwidth=measured or min(gpu.bandwidth for gpu in peers),
        bf16_flops=sms * min(gpu.bf16_flops / gpu.sms for gpu in peers),
        registers_per_sm=int(properties.regs_per_multiprocessor),
        threads_per_sm=int(properties.max_threads_per_multi_processor),
        blocks_per_sm=min(gpu.blocks_per_sm for gpu in peers),
        driver=driver,
        uuid=uuid,
        attached=True,
    )


@dataclass(frozen=True)
class ProbeResult:
    """The attached GPUs, or none and the ``reason`` in one line."""

    devices: tuple[DeviceInfo, ...] = ()
    reason: str | None = None


def probe(command: Sequence[str] | None = None, seconds: float = PROBE_SECONDS) -> ProbeResult:
    """The attached GPUs, read in a child process; never raises for what is wrong with them.

    No driver, a broken CUDA, a crash, a hang of more than ``seconds`` or garbage on the child's
    output give no devices and a reason, and so does a ``CUDA_VISIBLE_DEVICES`` that
    :func:`visible_devices` refuses.  ``command`` replaces :data:`PROBE_COMMAND`.
    """
    command = command or PROBE_COMMAND
    if refusal := _refused_selection(seconds):
        return ProbeResult(reason=refusal)
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    # Files rather than pipes: a grandchild that keeps a pipe open would hang the reader.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # Safe path: a folder named `tuner` where the user stands is not this package.
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )
        except OSError as error:
            return ProbeResult(reason=f"cannot start {command[0]}: {error.strerror}")
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return ProbeResult(reason=f"the GPU did not answer within {seconds:g} s")
        finally:
            _end(child)
        out.seek(0)
        err.seek(0)
        text = out.read().decode(errors="replace")
        errors = err.read().decode(errors="replace")
    if code != 0:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        return ProbeResult(reason=f"reading the GPU ended with {_status(code)}: {last}")
    return _parse_probe(text)


def same_model(devices: Sequence[DeviceInfo]) -> DeviceInfo:
    """The first of ``devices``; DeviceError when there is none or when they are different models.

    One tuning run makes one GPU's tables: a mix would label one GPU with another's times.
    """
    if not devices:
        raise DeviceError("no GPU, wanted at least one")
    models = sorted({f"{gpu.name} ({gpu.sms} SMs)" for gpu in devices})
    if len(models) > 1:
        raise DeviceError(
            f"different GPU models in one run: {', '.join(models)}; "
            "select one model with CUDA_VISIBLE_DEVICES"
        )
    return devices[0]


def visible_devices(value: str | None, uuids: Sequence[str]) -> tuple[str, ...]:
    """UUIDs of the devices that a value of ``CUDA_VISIBLE_DEVICES`` selects, in its order.

    ``uuids`` are all devices of the machine in the driver's order (:func:`driver_uuids`); ``value``
    None selects every GPU.  Entries are indices of GPUs (MIG slices have none), UUIDs, or
    beginnings of UUIDs that mean one device.  DeviceError for an empty value, an unknown or
    ambiguous entry, and a device named twice; CUDA itself would silently drop or hide devices.
    """
    gpus = [uuid for uuid in uuids if not uuid.startswith("MIG-")]
    if value is None:
        return tuple(gpus)
    if not value.strip():
        raise DeviceError("CUDA_VISIBLE_DEVICES is empty and hides every GPU; unset it or name one")
    chosen: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.isascii() and entry.isdigit():
            found = gpus[int(entry) : int(entry) + 1]
        elif entry.startswith(("GPU-", "MIG-")):
            found = [uuid for uuid in uuids if uuid == entry] or [
                uuid for uuid in uuids if uuid.startswith(entry)
            ]
        else:
            found = []
        where = f"CUDA_VISIBLE_DEVICES={value!r}: {entry!r}"
        if not found:
            raise DeviceError(
                f"{where} is no device here; wanted an index below {len(gpus)}"
                f" or one of: {', '.join(uuids) or 'none, there is no GPU'}"
            )
        if len(found) > 1:
            raise DeviceError(f"{where} means several devices: {', '.join(found)}")
        if found[0] in chosen:
            raise DeviceError(f"{where} is {found[0]}, which is named twice; name each GPU once")
        chosen.append(found[0])
    return tuple(chosen)


def driver_uuids(seconds: float = PROBE_SECONDS) -> list[str]:
    """UUIDs of all GPUs and MIG slices of the machine, visible to CUDA or not, in PCI order.

    Read from ``nvidia-smi -L``; empty where that does not work.  CUDA numbers GPUs in this order
    when ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, and by default when all GPUs are of one model.
    """
    return re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", _nvidia_smi(["-L"], seconds) or "")


def other_processes(uuid: str | None, own: int | None, seconds: float = 20.0) -> list[str]:
    """Processes other than ``own`` that have a GPU open to compute on it, as ``pid (memory)``.

    Empty where ``nvidia-smi`` does not say.  In a container it may print the host's process ids;
    then ``own`` is not among them and one entry is taken to be it.
    """
    query = ["--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader"]
    rows = [
        [part.strip() for part in line.split(",")]
        for line in (_nvidia_smi(query, seconds) or "").splitlines()
        if line.count(",") == 2
    ]
    here = [row for row in rows if uuid is None or row[0] == uuid]
    others = [row for row in here if row[1] != str(own)]
    if own is not None and len(others) == len(here):
        others = others[1:]
    return [f"{pid} ({memory})" for _, pid, memory in others]


def _tokens(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _is_slice(tokens: Iterable[str]) -> bool:
    return any(token == "mig" or _MIG_PROFILE.fullmatch(token) for token in tokens)


def _driver_version() -> str | None:
    # PyTorch has no portable call for it.
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception:  # whatever a missing or mismatched NVML raises, the GPU still works
        text = _nvidia_smi(["--query-gpu=driver_version", "--format=csv,noheader"], 20.0)
        return text.splitlines()[0].strip() if text and text.strip() else None


def _refused_selection(seconds: float) -> str | None:
    """What is wrong with the caller's ``CUDA_VISIBLE_DEVICES``; None where nobody can tell."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    uuids = [] if value is None else driver_uuids(seconds)
    try:
        if uuids:
            visible_devices(value, uuids)
    except DeviceError as error:
        return str(error)
    return None


def _nvidia_smi(arguments: Sequence[str], seconds: float) -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=seconds, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    # A process stuck inside the driver cannot be killed; it is left behind rather than waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _parse_probe(text: str) -> ProbeResult:
    """Read the child's last line; libraries may have printed before it."""
    line = (text.strip().splitlines() or [""])[-1]
    try:
        answer = json.loads(line)
        if answer.get("reason") is not None:
            return ProbeResult(reason=str(answer["reason"]))
        devices = tuple(_DEVICES.validate_python(answer["devices"]))
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValidationError):
        return ProbeResult(reason=f"reading the GPU gave no answer but {line[:200]!r}")
    return ProbeResult(devices, None if devices else "no GPU is visible")


def main() -> None:
    """Print the attached GPUs as one line of JSON: ``{"devices": [...], "reason": ...}``."""
    answer: dict[str, Any] = {"devices": [], "reason": None}
    try:
        answer["devices"] = [dataclasses.asdict(gpu) for gpu in attached_gpus()]
    except DeviceError as error:
        answer["reason"] = " ".join(str(error).split())
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
