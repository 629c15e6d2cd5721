"""Compile candidates ahead of measuring, in parallel, for a target that need not be present.

Triton's own launch path computes the signature and the specialisation; only its driver is replaced
by one that names the target, so the binaries land in Triton's cache under the very keys that the
measuring process (and later the server) looks up.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib
import os
import queue
import re
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_templates.base import (
    DeviceInfo,
    KernelCall,
    KernelTemplate,
    record_from_dict,
    record_to_dict,
)

from .worker import RemoteError, Worker, WorkerDied, WorkerTimeout

COMPILE_TIMEOUT = 60.0

#: Arguments that kernels which have them name in ``do_not_specialize``.
UNSPECIALISED = frozenset({"tokens", "sequences", "table_stride"})


@dataclass(frozen=True)
class Resources:
    """What one program of a binary takes: registers and local memory per thread, shared memory.

    ``instructions``, ``access_bytes`` (of device memory) and ``barriers`` count what stands in the
    code of one thread once, however often a loop repeats it and whichever branch is taken.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    instructions: int = 0
    access_bytes: int = 0
    barriers: int = 0

    def infeasible(self, device: DeviceInfo) -> str | None:
        """Reason why this binary cannot run on the device, or None."""
        if self.shared_bytes > device.shared_per_block:
            return f"{self.shared_bytes} B of shared memory, limit {device.shared_per_block}"
        # The hardware allocates registers per warp in units of 256.
        registers = -(-self.registers * 32 // 256) * 256 * self.num_warps
        if registers > device.registers_per_sm:
            return f"{registers} registers per block, limit {device.registers_per_sm}"
        return None


class CompileError(Exception):
    """A candidate has no usable binary; the message says why."""


class CompilerBroken(OSError):
    """The machine refuses what any compilation needs (a cache it may write, room on the disk).

    It says nothing about the candidate, hence must not be recorded as the candidate's failure.
    """


def _is_os_error(kind: str) -> bool:
    found = getattr(builtins, kind, None)
    return isinstance(found, type) and issubclass(found, OSError)


def call_key(call: KernelCall) -> str:
    """Identity of the binary a launch needs: kernel, warps, stages, constants and operand types.

    Arguments that no kernel specialises on only count by their width, strides by what Triton
    specialises on.
    """
    parts: list[object] = [call.kernel.__name__, call.num_warps, call.num_stages]
    for name, value in call.args.items():
        if isinstance(value, torch.Tensor):
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            parts.append((name, str(value.dtype), aligned))
        elif isinstance(value, TensorDescriptor):
            parts.append((name, str(value.base.dtype), tuple(value.block_shape)))
        elif name in UNSPECIALISED:
            parts.append((name, abs(value) >= 2**31))
        elif name.endswith("stride"):
            parts.append((name, value == 1, value % 16 == 0, abs(value) >= 2**31))
        else:
            parts.append((name, value))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def meta_calls(template: KernelTemplate[Any, Any], problem: Any, config: Any) -> list[KernelCall]:
    """The launches of a config on tensors that have shapes but no data."""
    small = template.kernel_problem(problem)
    return list(template.calls(template.make_inputs(small, 0, torch.device("meta"), 0), config))


class CrossDriver:
    """The part of Triton's driver that compilation asks: which target, which device."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class Compiler:
    """The handler of a compile worker."""

    def __init__(self, capability: int) -> None:
        from triton.runtime.driver import driver

        warnings.filterwarnings("ignore", module="triton")
        driver.set_active(CrossDriver(capability))

    def ready(self) -> bool:
        """Answer as soon as this worker has started."""
        return True

    def compile(self, module: str, problem: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
        """Compile every kernel of a config; returns their resources as dicts."""
        template = load_template(module)
        calls = meta_calls(
            template,
            record_from_dict(template.problem, problem),
            record_from_dict(template.config, config),
        )
        found = []
        for call in calls:
            binary = call.warmup()
            registers, local = _usage(binary.asm["cubin"])
            found.append(
                dataclasses.asdict(
                    Resources(
                        registers,
                        local,
                        binary.metadata.shared,
                        call.num_warps,
                        *_counts(binary.asm["ptx"]),
                    )
                )
            )
        return found


def load_template(module: str) -> KernelTemplate[Any, Any]:
    """The TEMPLATE of an importable module."""
    template: KernelTemplate[Any, Any] = importlib.import_module(module).TEMPLATE
    return template


def template_module(template: KernelTemplate[Any, Any]) -> str:
    """The module a worker must import to find this template."""
    return template.calls.__module__


_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)[^;{]*(?:\{[^}]*\}[^;]*)?;", re.M)
_ACCESS = re.compile(r"(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)$")
_ASYNC_COPY = re.compile(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)")


def _counts(ptx: str) -> tuple[int, int, int]:
    """(instructions, bytes of device memory accessed, barriers) in the PTX of one thread."""
    names = _INSTRUCTION.findall(ptx)
    accessed = sum(int(found) for found in map(_width, names) if found)
    copies = [int(size, 0) for size in _ASYNC_COPY.findall(ptx)]
    return len(names), accessed + sum(copies), sum(name.startswith("bar.sync") for name in names)


def _width(name: str) -> int:
    """Bytes that a load or store of device memory moves, 0 for another instruction."""
    found = _ACCESS.fullmatch(name)
    return int(found[1] or 1) * int(found[2]) // 8 if found else 0


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) per thread, as cuobjdump reads them off the binary.

    Triton's wheel carries cuobjdump, so this works without a CUDA toolkit and without a driver.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool) if tool.exists() else "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise CompileError(f"cuobjdump printed no resource usage: {text.strip()[:200]!r}")
    registers, stack, local = (int(group) for group in found.groups())
    return registers, max(stack, local)


class CompilePool:
    """Compile workers for one capability; every binary is compiled once.

    ``submit`` returns a future of the list of :class:`Resources`, one per kernel of the config; it
    raises :class:`CompileError` with the reason when there is no binary, :class:`CompilerBroken`
    when this machine cannot compile at all.
    """

    def __init__(self, capability: int, jobs: int | None = None) -> None:
        self.jobs = jobs or max(1, os.cpu_count() or 1)
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._workers = [
            # A compile worker never sees a GPU and never interprets.
            Worker(
                "tuner.compile:Compiler",
                {"capability": capability},
                {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""},
            )
            for _ in range(self.jobs)
        ]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = concurrent.futures.ThreadPoolExecutor(self.jobs)
        self._known: dict[str, concurrent.futures.Future[list[Resources]]] = {}

    def start(self) -> None:
        """Return when the workers run: importing takes seconds, which no candidate should pay."""
        starts = [self._threads.submit(self._start, worker) for worker in self._workers]
        concurrent.futures.wait(starts)

    @staticmethod
    def _start(worker: Worker) -> None:
        with contextlib.suppress(RemoteError, WorkerDied, WorkerTimeout):
            worker.call("ready", timeout=COMPILE_TIMEOUT)  # a failure shows again, at a candidate

    @property
    def compiled(self) -> int:
        """Number of different binaries asked for so far."""
        return len(self._known)

    def submit(
        self, template: KernelTemplate[Any, Any], problem: Any, config: Any
    ) -> concurrent.futures.Future[list[Resources]]:
        key = ":".join(call_key(call) for call in meta_calls(template, problem, config))
        key = f"{template_module(template)}:{key}"
        if key not in self._known:
            self._known[key] = self._threads.submit(
                self._compile, template_module(template), record_to_dict(problem), config
            )
        return self._known[key]

    def _compile(self, module: str, problem: Mapping[str, Any], config: Any) -> list[Resources]:
        worker = self._idle.get()
        try:
            found = worker.call(
                "compile", module, problem, record_to_dict(config), timeout=COMPILE_TIMEOUT
            )
            return [Resources(**fields) for fields in found]
        except (RemoteError, WorkerDied, WorkerTimeout) as error:
            if isinstance(error, RemoteError) and _is_os_error(error.kind):
                raise CompilerBroken(f"nothing can be compiled here: {error}") from error
            raise CompileError(str(error)) from error
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Stop every worker and forget what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
