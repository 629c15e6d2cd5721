"""What happens to one candidate: its outcome, and the worker that checks and times it.

:class:`Bench` runs inside a worker process and owns the GPU.  It holds one problem at a time: input
sets, the exact answers and PyTorch's own error on them.  A candidate is always checked before it is
timed, on several inputs: the problem's own size, an odd size with padded rows, and outputs that
were filled with NaN.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import math
import platform
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_templates.base import KernelTemplate, record_from_dict

from .check import Verdict, compare, gaps_untouched, poison
from .compile import load_template
from .timing import CudaClock, HostClock, Timing
from .worker import Fatal, headline


class Status(str, enum.Enum):
    """How a candidate ended."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    COMPILE_FAILED = "compile failed"
    OUT_OF_RESOURCES = "out of resources"
    WRONG = "wrong result"
    FAILED = "failed"
    CRASHED = "crashed"
    HUNG = "hung"


@dataclass(frozen=True)
class Outcome:
    """One candidate's end.

    ``time_us`` is its median time (measured or predicted) when it is OK; ``error_ratio`` its
    largest error in units of PyTorch's own in the same dtype, ``max_error`` the largest absolute
    error.
    """

    config: Any
    status: Status
    reason: str = ""
    time_us: float | None = None
    spread_us: float | None = None
    error_ratio: float | None = None
    max_error: float | None = None
    resources: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the config."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["config"]
        return {**values, "status": self.status.value, "resources": dict(self.resources)}

    @staticmethod
    def from_dict(config: Any, values: Mapping[str, Any]) -> Outcome:
        """The inverse of :meth:`to_dict`; KeyError, TypeError or ValueError for anything else."""
        found = Outcome(config, **{**values, "status": Status(values["status"])})
        for name in ("time_us", "spread_us", "error_ratio", "max_error"):
            value = getattr(found, name)
            if value is not None and (isinstance(value, bool) or not math.isfinite(value)):
                raise ValueError(f"{name} is {value!r}, wanted a finite number")
        if (found.status is Status.OK) != (found.time_us is not None and found.time_us > 0):
            raise ValueError(f"status {found.status.value} with time {found.time_us!r}")
        if not isinstance(found.reason, str) or not isinstance(found.resources, dict):
            raise TypeError("reason or resources are of another type")
        return found


@dataclass(frozen=True)
class CheckCase:
    """Inputs of one check with their exact answer and the answer of the same-dtype reference."""

    name: str
    inputs: Any
    exact: Mapping[str, torch.Tensor]
    same_dtype: Mapping[str, torch.Tensor]


#: Messages of errors after which a CUDA context answers nothing else but the same error.
STICKY = (
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "hardware stack error",
    "invalid program counter",
    "uncorrectable",
    "unknown error",
)


class WrongResultError(Exception):
    """A candidate's output differs from the reference by more than PyTorch's own error allows."""


def versions() -> dict[str, str]:
    """Versions of what makes and runs the binaries in this process."""
    import triton

    return {
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


class Bench:
    """The handler of a measuring worker.

    ``device`` is a torch device string.  ``cpu`` times on the host clock: it exists so that the
    whole search can be tested under Triton's interpreter, and its times are never emitted.
    """

    #: Rows of the check with odd size and padded rows.
    ODD_TOKENS = 17
    #: Largest share of free device memory that inputs and references may take.
    MEMORY_SHARE = 0.6

    def __init__(self, device: str, l2_bytes: int = 0) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            # Long-lived from here on: what a collection would walk through again and again.
            gc.collect()
            gc.freeze()
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False
            self.clock: CudaClock | HostClock = CudaClock(self.device, l2_bytes)
        else:
            self.clock = HostClock()
        self._compiled: dict[tuple[str, Any], Callable[[Any], Any]] = {}
        self._forget()

    def _forget(self) -> None:
        self.template: KernelTemplate[Any, Any] | None = None
        self.problem: Any = None
        self.cases: list[CheckCase] = []
        self.sets: list[Any] = []

    def versions(self) -> dict[str, str]:
        """:func:`versions`, and the ``uuid`` of the GPU where there is one."""
        found = versions()
        if self.device.type == "cuda":
            found["uuid"] = str(getattr(torch.cuda.get_device_properties(self.device), "uuid", ""))
        return found

    def prepare(self, module: str, problem: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Build the inputs and references of a problem; returns what was built.

        Raises MemoryError with the figures when the problem does not fit the device.
        """
        self._forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        template = load_template(module)
        self.template = template
        self.problem = record_from_dict(template.problem, problem)
        sizes = template.make_inputs(self.problem, 0, torch.device("meta"), 0)
        one = int(sizes.nbytes())
        self._refuse_if_too_large(one, sizes.reference_bytes())
        odd = dataclasses.replace(self.problem, tokens=min(self.ODD_TOKENS, self.problem.tokens))
        self.cases = [
            self._case("as served", self.problem, seed, pad=0),
            self._case("odd size, padded rows", odd, seed + 1, pad=16),
        ]
        # The check's inputs double as the first timed set.
        count = self.clock.sets_wanted(one)
        self.sets = [self.cases[0].inputs]
        self.sets += [
            template.make_inputs(self.problem, seed + 2 + i, self.device, 0)
            for i in range(count - 1)
        ]
        self._synchronize()
        return {"bytes_per_set": one, "sets": count}

    def _refuse_if_too_large(self, nbytes: int, references: int) -> None:
        needed = nbytes + references
        if self.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self.device)
        if needed > self.MEMORY_SHARE * free:
            raise MemoryError(
                f"needs about {needed / 2**20:.0f} MiB ({nbytes / 2**20:.0f} MiB per input set and "
                f"{references / 2**20:.0f} MiB for its references), {free / 2**20:.0f} MiB of "
                f"{total / 2**20:.0f} MiB are free, of which {self.MEMORY_SHARE:.0%} may be used"
            )

    def _case(self, name: str, problem: Any, seed: int, pad: int) -> CheckCase:
        assert self.template is not None
        inputs = self.template.make_inputs(problem, seed, self.device, pad)
        exact = self.template.reference(inputs.upcast())
        return CheckCase(name, inputs, exact, self.template.reference(inputs))

    def trial(self, config: Mapping[str, Any], samples: int = 9) -> dict[str, Any]:
        """Check a candidate, then time it; returns an :class:`Outcome` as a dict.

        Errors that leave the device usable become outcomes; others end this process.
        """
        assert self.template is not None
        candidate = record_from_dict(self.template.config, config)
        try:
            ratio, error = self._check(candidate)
            times = self.clock.measure(self._launches(candidate), samples)
        except WrongResultError as wrong:
            outcome = Outcome(None, Status.WRONG, str(wrong))
        except Exception as failure:
            outcome = Outcome(None, *self.classify(failure))
        else:
            timing = Timing.of(times)
            outcome = Outcome(None, Status.OK, "", timing.median, timing.spread, ratio, error)
        return outcome.to_dict()

    def check(self, config: Mapping[str, Any]) -> tuple[float, float]:
        """(largest error over PyTorch's own, largest error); raises WrongResultError."""
        assert self.template is not None
        return self._check(record_from_dict(self.template.config, config))

    def finals(
        self, configs: Sequence[Mapping[str, Any]], stock: bool, rounds: int
    ) -> list[list[float]]:
        """Interleaved samples in microseconds, one list per config, stock last when asked for."""
        assert self.template is not None
        contestants = [
            self._launches(record_from_dict(self.template.config, config)) for config in configs
        ]
        if stock:
            contestants.append(self.stock())
        try:
            return self.clock.interleave(contestants, rounds)
        except Exception as failure:
            self.classify(failure)
            raise

    def stock(self) -> list[Callable[[], Any]]:
        """The peer a server runs without us, one launch per input set.

        It is the template's ``stock_config`` where the server has a kernel of its own, else the
        reference as inductor compiles it: with a dynamic token dimension and without guards, as in
        vLLM, so that one graph serves every token count of a kind.
        """
        assert self.template is not None
        if self.template.stock_config is not None:
            return self._launches(self.template.stock_config(self.problem))
        key = (self.template.name, self.template.kernel_problem(self.problem))
        if key not in self._compiled:
            self._compiled[key] = compile_stock(self.template, self.problem, self.device)
        return [functools.partial(self._compiled[key], inputs) for inputs in self.sets]

    def _launches(self, config: Any) -> list[Callable[[], Any]]:
        assert self.template is not None
        return [functools.partial(self.template.launch, inputs, config) for inputs in self.sets]

    def _check(self, config: Any) -> tuple[float, float]:
        assert self.template is not None
        ratio = error = 0.0
        for case in self.cases:
            poison(case.inputs)
            self.template.launch(case.inputs, config)
            verdict: Verdict = compare(
                case.inputs.outputs(), case.exact, case.same_dtype, self.template.exact_outputs
            )
            if not verdict.ok:
                raise WrongResultError(f"{case.name}: {verdict.reason}")
            if not gaps_untouched(case.inputs):
                raise WrongResultError(f"{case.name}: wrote between the rows of an output")
            ratio = max(ratio, verdict.worst_ratio)
            error = max(error, verdict.max_error)
        return ratio, error

    def classify(self, failure: Exception) -> tuple[Status, str]:
        """Status and reason of an exception; ends the process when the context is poisoned."""
        reason = f"{type(failure).__name__}: {headline(failure)}"
        if any(mark in str(failure).lower() for mark in STICKY):
            raise Fatal(reason) from failure
        try:
            # The error may have been queued by an earlier launch; a poisoned context says so here.
            self._synchronize()
        except Exception as again:
            raise Fatal(f"{reason} (then {again})") from failure
        if (
            isinstance(failure, torch.OutOfMemoryError)
            or "OutOfResources" in type(failure).__name__
        ):
            return Status.OUT_OF_RESOURCES, reason
        if type(failure).__name__ in (
            "CompilationError",
            "CompileTimeAssertionFailure",
            "PTXASError",
        ):
            return Status.COMPILE_FAILED, reason
        return Status.FAILED, reason

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compile_stock(
    template: KernelTemplate[Any, Any], problem: Any, device: torch.device
) -> Callable[[Any], Any]:
    """``template.reference`` compiled by inductor with a dynamic token dimension."""
    example = template.make_inputs(
        dataclasses.replace(problem, tokens=max(32, problem.tokens)), 0, device, 0
    )
    # Widths are constants in a server's graph; without this, the second kind's would be dynamic.
    torch._dynamo.config.automatic_dynamic_shapes = False
    rows = example.outputs()
    tokens = next(iter(rows.values())).shape[0]
    for tensor in (*example.operands().values(), *rows.values()):
        if tensor.dim() and tensor.shape[0] == tokens:
            torch._dynamo.mark_dynamic(tensor, 0)
    # A code object of its own: without guards, dynamo would take the graph of another problem kind
    # of the same template for this one.
    own = types.FunctionType(
        template.reference.__code__.replace(co_name=f"stock_{template.name}"),
        template.reference.__globals__,
    )
    compiled: Callable[[Any], Any] = torch.compile(
        own,
        fullgraph=True,
        options={"guard_filter_fn": lambda guards: [False for _ in guards]},
    )
    compiled(example)
    return compiled
