"""Confirmation: what was predicted for this GPU is checked and timed on it.

Every predicted entry is compiled ahead, checked against its reference and timed in pairs with the
default config and the stock peer.  The faster of prediction and default is written as a *measured*
entry, with its true times whatever they are: the plugin switches a kind of problem on only where
its measured entries are on average no slower than stock, and leaving the slow ones out would make
that average better than the server is.  A result is on disk before the next trial begins.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import enum
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from kernel_templates.base import (
    DeviceInfo,
    KernelTemplate,
    ModelShape,
    record_from_dict,
    record_to_dict,
    templates,
)
from tuned_configs import Entry, TableSet, problem_key
from tuned_configs.keys import BUCKET
from tuned_configs.store import make_table, update_table

from .compile import CompileError, CompilePool, Resources
from .confirm_record import Record, key_of
from .evaluate import Refused
from .run import max_error_fields, run_record, short, timing_fields
from .timing import Timing, compare_paired
from .trial import Outcome, Status


class Fate(str, enum.Enum):
    """What became of a prediction."""

    HELD = "held"
    DEFAULT = "default instead"
    SLOWER = "slower than stock"
    WRONG = "wrong"
    CRASHED = "crashed"
    UNDECIDED = "not timed"


#: Fates after which a measured entry serves that is no slower than stock.
GOOD = (Fate.HELD, Fate.DEFAULT)


@dataclass(frozen=True)
class Prediction:
    """A predicted entry that no measured one replaces, and the table that holds it."""

    template: KernelTemplate[Any, Any]
    problem: Any
    config: Any
    entry: Entry
    path: Path

    @property
    def kind(self) -> str:
        """Kernel and shapes without the token count."""
        return f"{self.template.name} {self.template.describe(self.problem)}"


@dataclass(frozen=True)
class Result:
    """The end of one prediction.  Ratios are times over stock's in pairs, None if not timed."""

    prediction: Prediction
    fate: Fate
    reason: str
    entry: Entry | None = None


@dataclass
class Confirmed:
    """What a confirmation did; ``left`` predictions were not reached in time, ``remembered`` were
    rejected by an earlier one."""

    results: list[Result] = field(default_factory=list)
    left: int = 0
    remembered: int = 0
    files: set[Path] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def count(self, *fates: Fate) -> int:
        """How many predictions ended so."""
        return sum(result.fate in fates for result in self.results)


class Judge(Protocol):
    """What confirmation needs of :class:`tuner.evaluate.Measuring`."""

    mode: str

    def versions(self) -> Mapping[str, str]: ...
    def open(self, template: KernelTemplate[Any, Any], problem: Any) -> None: ...
    def evaluate(self, config: Any, resources: Sequence[Resources]) -> Outcome: ...
    def beside_stock(self, configs: Sequence[Any]) -> list[list[float]]: ...
    def company(self) -> list[str]: ...


class Pool(Protocol):
    """What confirmation needs of :class:`tuner.compile.CompilePool`."""

    def submit(
        self, template: KernelTemplate[Any, Any], problem: Any, config: Any
    ) -> concurrent.futures.Future[list[Resources]]: ...


def predictions(
    tables: TableSet,
    models: Sequence[ModelShape] = (),
    kernels: Mapping[str, KernelTemplate[Any, Any]] | None = None,
) -> list[Prediction]:
    """Predicted entries for the running kernel sources that no measured one replaces.

    With ``models``, only the kinds of problems that they need.  Ordered so that a confirmation cut
    short has seen every kind at token counts far apart.
    """
    known = templates() if kernels is None else kernels
    measured: set[Any] = set()
    found: dict[Any, Prediction] = {}
    needed = {
        name: {
            kernel.kernel_problem(each)
            for model in models
            for each in kernel.problems(model, (1, 16, 8192))
        }
        for name, kernel in known.items()
    }
    for loaded in tables.tables:  # the preferred tables come last
        kernel = known.get(loaded.table.template)
        if kernel is None:
            continue
        for entry in loaded.table.entries:
            if entry.source_hash != kernel.source_hash:
                continue
            key = (kernel.name, problem_key(entry.problem))
            if loaded.table.runs[entry.run].provenance == "measured":
                measured.add(key)
                continue
            try:
                problem = record_from_dict(kernel.problem, entry.problem)
                config = record_from_dict(kernel.config, entry.config)
            except ValueError:
                continue  # another version's; lint names it
            if not models or kernel.kernel_problem(problem) in needed[kernel.name]:
                found[key] = Prediction(kernel, problem, config, entry, loaded.path)
    return spread_out([each for key, each in found.items() if key not in measured])


def spread_out(found: Iterable[Prediction]) -> list[Prediction]:
    """One of each kind in turn; within a kind the largest count, the smallest, then the middles."""
    kinds: dict[Any, list[Prediction]] = {}
    for each in found:
        kind = (each.template.name, problem_key(each.entry.problem, without=BUCKET))
        kinds.setdefault(kind, []).append(each)
    ordered = []
    for rows in kinds.values():
        rows.sort(key=lambda each: each.entry.problem.get(BUCKET, 0))
        ordered.append([rows[index] for index in _middles(len(rows))])
    rounds = max(map(len, ordered), default=0)
    return [rows[number] for number in range(rounds) for rows in ordered if number < len(rows)]


def _middles(count: int) -> list[int]:
    order = dict.fromkeys([count - 1, 0] if count else [])
    spans = collections.deque([(0, count - 1)])
    while spans:
        low, high = spans.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            order[middle] = None
            spans += [(low, middle), (middle, high)]
    return list(order)


class Confirmer:
    """Judges predictions one after the other and writes each result as it falls."""

    def __init__(
        self,
        device: DeviceInfo,
        judge: Judge,
        out: Path,
        seconds: float | None,
        say: Callable[[Result, int, int], None] = lambda result, number, total: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.judge, self.out = device, judge, out
        self.seconds, self.say, self.clock = seconds, say, clock
        self.done = Confirmed()
        self.run_name = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}-confirmed"

    def run(self, wanted: Sequence[Prediction], pool: Pool) -> Confirmed:
        """Confirm within the time given; at least one prediction is tried.

        TableError or OSError when a result cannot be written.
        """
        start = self.clock()
        versions = self.judge.versions()
        stamp = {**versions, "driver": str(self.device.driver)}
        record = Record.load(self.out, self.device.name)
        todo = []
        for each in wanted:
            if record.rejected(key_of(each.template, each.entry, stamp)):
                self.done.remembered += 1
            else:
                todo.append(each)
        builds = [
            (each, self._builds(pool, each, each.template.default(each.problem, self.device)))
            for each in todo
        ]
        for number, (each, futures) in enumerate(builds):
            if number and self.seconds is not None and self.clock() - start >= self.seconds:
                self.done.left = len(todo) - number
                for _, waiting in builds[number:]:
                    for future in waiting.values():
                        future.cancel()
                break
            result = self._judge(each, futures)
            if result.entry is not None:
                self._write(result.entry, each, versions)
            elif result.fate is not Fate.UNDECIDED:
                record.reject(key_of(each.template, each.entry, stamp), result.reason)
            self.done.results.append(result)
            self.say(result, number + 1, len(todo))
        self.done.seconds = self.clock() - start
        return self.done

    @staticmethod
    def _builds(
        pool: Pool, each: Prediction, default: Any
    ) -> dict[Any, concurrent.futures.Future[list[Resources]]]:
        configs = dict.fromkeys([each.config, default])
        return {config: pool.submit(each.template, each.problem, config) for config in configs}

    def _judge(
        self, each: Prediction, builds: Mapping[Any, concurrent.futures.Future[list[Resources]]]
    ) -> Result:
        """Check and time one prediction beside the default and stock."""
        default = each.template.default(each.problem, self.device)
        try:
            self.judge.open(each.template, each.problem)
            outcomes = {config: self._evaluate(each, config, builds[config]) for config in builds}
            fit = [config for config, found in outcomes.items() if found.status is Status.OK]
            mine = outcomes[each.config]
            if not fit:
                return Result(each, _fate(mine), mine.reason or mine.status.value)
            samples = self.judge.beside_stock(fit)
        except Refused as refusal:
            return Result(each, Fate.UNDECIDED, str(refusal))
        if others := self.judge.company():
            self.done.notes.add(f"other processes compute on this GPU: {', '.join(others)}")
        return self._decide(each, default, outcomes, fit, samples)

    def _evaluate(
        self,
        each: Prediction,
        config: Any,
        build: concurrent.futures.Future[list[Resources]],
    ) -> Outcome:
        try:
            resources = build.result()
        except CompileError as error:
            return Outcome(config, Status.COMPILE_FAILED, str(error))
        for usage in resources:
            if reason := usage.infeasible(self.device):
                return Outcome(config, Status.OUT_OF_RESOURCES, reason)
        return self.judge.evaluate(config, resources)

    def _decide(
        self,
        each: Prediction,
        default: Any,
        outcomes: Mapping[Any, Outcome],
        fit: Sequence[Any],
        samples: Sequence[Sequence[float]],
    ) -> Result:
        times = {config: samples[index] for index, config in enumerate(fit)}
        stock = list(samples[-1])
        same = each.config == default
        better = each.config in times and (
            same
            or default not in times
            or compare_paired(list(times[each.config]), list(times[default])).faster
        )
        chosen = each.config if better else default
        if chosen not in times:  # cannot be: one of the two is fit
            raise AssertionError("neither config was timed")
        ratio = Timing.of(times[chosen]).median / Timing.of(stock).median
        slower = compare_paired(stock, list(times[chosen])).faster
        if slower:
            what = "the prediction" if better else "the default, the faster one,"
            fate, reason = Fate.SLOWER, f"{what} takes {ratio:.2f}x stock's time"
        elif better:
            fate, reason = Fate.HELD, f"{1 / ratio:.2f}x stock"
        else:
            mine = outcomes[each.config]
            why = mine.reason or "no faster than the default"
            fate, reason = Fate.DEFAULT, f"{why}; the default is {1 / ratio:.2f}x stock"
        if not better and outcomes[each.config].status is not Status.OK and slower:
            fate = _fate(outcomes[each.config])
        outcome = outcomes[chosen]
        rejected = collections.Counter(
            found.status.value for found in outcomes.values() if found.status is not Status.OK
        )
        entry = each.entry.model_copy(
            update={
                "config": record_to_dict(chosen),
                "verdict": "tuned" if better and not same else "default",
                "time_us": timing_fields(Timing.of(times[chosen])),
                "default_us": timing_fields(Timing.of(times[default]))
                if default in times
                else None,
                "stock_us": timing_fields(Timing.of(stock)),
                "predicted_us": None,
                "max_error": max_error_fields(outcome.error_ratio, outcome.max_error),
                "trials": len(outcomes),
                "rejected": dict(rejected),
                "run": self.run_name,
            }
        )
        return Result(each, fate, reason, entry)

    def _write(self, entry: Entry, each: Prediction, versions: Mapping[str, str]) -> None:
        run = run_record(self.device, "measured", versions)
        update = update_table(self.out, make_table(each.template.name, self.run_name, run, [entry]))
        self.done.warnings += update.warnings
        self.done.files.add(update.path)


def _fate(outcome: Outcome) -> Fate:
    return Fate.WRONG if outcome.status is Status.WRONG else Fate.CRASHED


def stock_ratio(results: Iterable[Result]) -> float | None:
    """Geometric mean of stock's time over the entries', None where nothing was timed."""
    logs = [
        math.log(entry.stock_us.median / entry.time_us.median)
        for result in results
        if (entry := result.entry) and entry.stock_us and entry.time_us
    ]
    return float(short(math.exp(sum(logs) / len(logs)))) if logs else None


@contextlib.contextmanager
def compiling(device: DeviceInfo, jobs: int | None) -> Any:
    """The pool that compiles for ``device`` ahead of the trials."""
    with CompilePool(device.target, jobs) as pool:
        pool.start()
        yield pool
