"""Two ways to judge candidates: measure them on the attached GPU, or predict them for one that is
not here.

An evaluator serves one problem at a time: ``open`` it, ``evaluate`` candidates that compiled, and
``decide`` between the best of them, the default config and the stock peer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton

from kernel_templates.base import DeviceInfo, KernelTemplate, record_to_dict

from .compile import Resources, template_module
from .device import other_processes
from .predict import LEAST_GAIN, predict_us
from .search import ProblemSearch
from .timing import Timing, compare_paired
from .trial import Outcome, Status, versions
from .worker import RemoteError, Worker, WorkerDied, WorkerError, WorkerTimeout

#: Seconds for which an answer about other processes on the GPU holds.
COMPANY_SECONDS = 15.0


class Refused(Exception):
    """A problem cannot be evaluated here; the message says why, with the figures."""


class EvaluatorBroken(Exception):
    """No further problem can be evaluated; what was decided so far is kept."""


@dataclass(frozen=True)
class Decision:
    """What a problem ends with.

    Times are in microseconds.  ``tuned`` says that ``config`` beats the default beyond the noise;
    ``gain`` is the share of the default's time it saves.  ``time`` is None when nothing was
    measured; ``predicted`` is then (config's, default's) predicted time.
    """

    config: Any
    tuned: bool
    gain: float | None
    time: Timing | None = None
    default: Timing | None = None
    stock: Timing | None = None
    predicted: tuple[float, float] | None = None
    error_ratio: float | None = None
    max_error: float | None = None
    notes: tuple[str, ...] = ()


class Evaluator(Protocol):
    """What the tuner needs of either way; ``mode`` is the provenance of its results."""

    mode: str

    def versions(self) -> Mapping[str, str]:
        """Versions that a result depends on: torch, triton, python."""

    def open(self, template: KernelTemplate[Any, Any], problem: Any) -> None:
        """Turn to a problem; :class:`Refused` when it cannot be evaluated here."""

    def evaluate(self, config: Any, resources: Sequence[Resources]) -> Outcome:
        """Judge one compiled candidate; never raises for what the candidate does."""

    def decide(self, search: ProblemSearch, default: Any) -> Decision | None:
        """Choose between the best candidates and the default; None when nothing is valid."""

    def renew(self) -> None:
        """Go on in another process, for a second opinion."""

    def confirms(self, config: Any, default: Any) -> bool:
        """Whether the open problem's config beats the default here too, beyond the noise.

        :class:`Refused` when that cannot be told.
        """

    def close(self) -> None:
        """Release the GPU."""


@dataclass(frozen=True)
class Limits:
    """Seconds after which a worker counts as hung, and how finals are run."""

    prepare_seconds: float = 120.0
    trial_seconds: float = 20.0
    finals_seconds: float = 180.0
    finalists: int = 3
    rounds: int = 21
    stock: bool = True


class Measuring:
    """Checks and times candidates in a worker that owns the GPU.

    ``options`` go to :class:`tuner.trial.Bench`.  A worker that hangs or dies is replaced and the
    candidate is rejected with the reason.  ``uuid`` is the GPU that must answer.
    """

    mode = "measured"

    def __init__(
        self,
        options: Mapping[str, Any],
        env: Mapping[str, str | None] | None = None,
        uuid: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        # Inductor would move Triton's cache elsewhere, away from what was compiled ahead.
        cache = str(triton.knobs.cache.dir)
        self.worker = Worker(
            "tuner.trial:Bench", options, {"TRITON_CACHE_DIR": cache, **(env or {})}
        )
        self.uuid = uuid
        self._template: KernelTemplate[Any, Any] | None = None
        self._problem: Any = None
        self._prepared = 0
        self._versions: dict[str, str] | None = None
        self._on_gpu = str(options.get("device", "")).startswith("cuda")
        self._company: list[str] = []
        self._asked = -COMPANY_SECONDS

    def versions(self) -> Mapping[str, str]:
        if self._versions is None:
            try:
                found = self.worker.call("versions", timeout=self.limits.prepare_seconds)
            except WorkerError as error:
                raise EvaluatorBroken(f"the measuring worker does not start: {error}") from error
            uuid = found.pop("uuid", None)
            if self.uuid and uuid and _bare(uuid) != _bare(self.uuid):
                raise EvaluatorBroken(f"the worker runs on GPU {uuid}, wanted {self.uuid}")
            self._versions = found
        return self._versions

    def open(self, template: KernelTemplate[Any, Any], problem: Any) -> None:
        self._template, self._problem = template, problem
        self._prepared = 0
        self._ready()

    def _ready(self) -> None:
        """Make sure that a living worker holds the problem."""
        if self.worker.alive and self._prepared == self.worker.starts:
            return
        assert self._template is not None
        try:
            self.worker.call(
                "prepare",
                template_module(self._template),
                record_to_dict(self._problem),
                0,
                timeout=self.limits.prepare_seconds,
            )
        except RemoteError as error:
            raise Refused(str(error)) from error
        except WorkerError as error:
            raise EvaluatorBroken(f"the worker cannot prepare a problem: {error}") from error
        self._prepared = self.worker.starts

    def evaluate(self, config: Any, resources: Sequence[Resources]) -> Outcome:
        self._ready()
        try:
            values = self.worker.call(
                "trial", record_to_dict(config), timeout=self.limits.trial_seconds
            )
        except WorkerTimeout as error:
            return Outcome(config, Status.HUNG, str(error))
        except WorkerDied as error:
            return Outcome(config, Status.CRASHED, str(error))
        except RemoteError as error:
            return Outcome(config, Status.FAILED, str(error))
        return Outcome.from_dict(config, values)

    def decide(self, search: ProblemSearch, default: Any) -> Decision | None:
        notes: list[str] = []
        stock = self.limits.stock
        while True:
            best = [outcome.config for outcome in search.best(self.limits.finalists)]
            if not best:
                return None
            known = search.outcomes.get(default)
            has_default = known is not None and known.status is Status.OK
            contestants = list(dict.fromkeys([*best, *([default] if has_default else [])]))
            try:
                samples = self._finals(contestants, stock)
                break
            except WorkerError as error:
                if stock:
                    notes.append(f"no stock peer: {error}")
                    stock = False
                else:
                    # It passed its trial alone, so the fault is not reproducible: it must not win.
                    search.tell(Outcome(best[0], Status.FAILED, f"in the finals: {error}"))
        times = [Timing.of(one) for one in samples]
        winner = min(range(len(contestants)), key=lambda index: times[index].median)
        tuned, gain = True, None
        if has_default:
            base = contestants.index(default)
            comparison = compare_paired(samples[winner], samples[base])
            tuned, gain = comparison.faster, comparison.gain
            if not tuned:
                winner, gain = base, 0.0
        outcome = search.outcomes[contestants[winner]]
        if others := self.company():
            notes.append(
                f"times are doubtful: other processes compute on this GPU: {', '.join(others)}"
            )
        return Decision(
            config=contestants[winner],
            tuned=tuned,
            gain=gain,
            time=times[winner],
            default=times[contestants.index(default)] if has_default else None,
            stock=times[-1] if stock else None,
            error_ratio=outcome.error_ratio,
            max_error=outcome.max_error,
            notes=tuple(notes),
        )

    def renew(self) -> None:
        self.worker.close()

    def confirms(self, config: Any, default: Any) -> bool:
        try:
            mine, base = self._finals([config, default], stock=False)
        except WorkerError as error:
            raise Refused(str(error)) from error
        faster = compare_paired(mine, base).faster
        if not faster and (others := self.company()):
            raise Refused(f"other processes compute on this GPU: {', '.join(others)}")
        return faster

    def beside_stock(self, configs: Sequence[Any]) -> list[list[float]]:
        """Paired samples in microseconds of the open problem: each config's, then stock's.

        :class:`Refused` when a contestant cannot run.
        """
        try:
            return self._finals(configs, stock=True)
        except WorkerError as error:
            raise Refused(str(error)) from error

    def company(self) -> list[str]:
        """Other processes that compute on the GPU; asked anew after :data:`COMPANY_SECONDS`."""
        now = time.monotonic()
        if self._on_gpu and now - self._asked >= COMPANY_SECONDS:
            self._asked = now
            self._company = other_processes(self.uuid, self.worker.pid)
        return self._company

    def _finals(self, configs: Sequence[Any], stock: bool) -> list[list[float]]:
        self._ready()
        samples: list[list[float]] = self.worker.call(
            "finals",
            [record_to_dict(config) for config in configs],
            stock,
            self.limits.rounds,
            timeout=self.limits.finals_seconds,
        )
        return samples

    def close(self) -> None:
        self.worker.close()


def _bare(uuid: str) -> str:
    """A UUID without the prefix that the driver prints and CUDA's properties leave out."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


class Predicting:
    """Ranks candidates by :func:`tuner.predict.predict_us`; needs no GPU and runs nothing."""

    mode = "predicted"

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        self._template: KernelTemplate[Any, Any] | None = None
        self._problem: Any = None

    def versions(self) -> Mapping[str, str]:
        return versions()

    def open(self, template: KernelTemplate[Any, Any], problem: Any) -> None:
        self._template, self._problem = template, problem
        try:
            inputs = template.make_inputs(problem, 0, torch.device("meta"), 0)
            template.calls(inputs, template.default(problem, self.device))
        except (ValueError, RuntimeError, OverflowError) as error:
            # For example more rows than the kernel's indices or PyTorch's sizes reach.
            raise Refused(str(error)) from error

    def evaluate(self, config: Any, resources: Sequence[Resources]) -> Outcome:
        assert self._template is not None
        time = predict_us(self._template, self._problem, config, resources, self.device)
        if time == float("inf"):
            return Outcome(config, Status.OUT_OF_RESOURCES, "no program fits a multiprocessor")
        usage = dataclasses.asdict(resources[0]) if resources else {}
        return Outcome(config, Status.OK, time_us=time, resources=usage)

    def decide(self, search: ProblemSearch, default: Any) -> Decision | None:
        best = search.best(1)
        if not best or best[0].time_us is None:
            return None
        base = search.outcomes.get(default)
        if base is None or base.time_us is None:
            time = best[0].time_us
            return Decision(best[0].config, True, None, predicted=(time, time))
        gain = 1.0 - best[0].time_us / base.time_us
        chosen = best[0] if gain > LEAST_GAIN else base
        assert chosen.time_us is not None
        return Decision(
            config=chosen.config,
            tuned=chosen is not base,
            gain=gain if chosen is not base else 0.0,
            predicted=(chosen.time_us, base.time_us),
        )

    def renew(self) -> None:
        return None

    def confirms(self, config: Any, default: Any) -> bool:
        return True  # a prediction says the same every time

    def close(self) -> None:
        return None
