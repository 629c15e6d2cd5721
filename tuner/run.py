"""One tuning run: every problem of some models on one GPU, searched, decided and emitted.

The way of a problem: candidates are asked for and compiled ahead, in parallel; what cannot run is
dropped by the numbers of its binary; the evaluator judges the others one by one; finals decide
between the best and the default; the table is rewritten.  At the end every gain is timed again in
another process: one that does not show there was noise, and the default takes its place.  All of it
is recorded as it happens, so a run that is killed at any moment goes on where it was.
"""

from __future__ import annotations

import collections
import concurrent.futures
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from optuna.storages import BaseStorage
from pydantic import ValidationError

from kernel_templates.base import (
    DeviceInfo,
    KernelTemplate,
    ModelShape,
    record_from_dict,
    record_to_dict,
    template,
)
from search_spaces.base import SearchSpace, spaces
from tuned_configs.schema import Device, Entry, MaxError, Predicted, Run
from tuned_configs.schema import Timing as TimingFields
from tuned_configs.store import make_table, update_table

from . import __version__
from .compile import CompileError, CompilePool, Resources
from .evaluate import Decision, Evaluator, Refused
from .search import ProblemSearch, study_name
from .timing import Timing
from .trial import Outcome, Status

#: Candidates compiled ahead of the one being judged, per compile worker.
LOOK_AHEAD = 1
#: Trials after which those of other tuners on the same storage are taken in.
SYNC_TRIALS = 16
#: Crashes and hangs in a row after which a problem's search ends with what it has.
LOST_IN_A_ROW = 6
#: Share of the time that is kept for timing the gains again.
CONFIRM_SHARE = 0.12


def counted(tokens: int) -> str:
    return f"{tokens} token" if tokens == 1 else f"{tokens} tokens"


@dataclass(frozen=True)
class Job:
    """One problem to tune and the models that need it."""

    template: KernelTemplate[Any, Any]
    space: SearchSpace
    problem: Any
    models: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The problem's name without its token count."""
        return self.template.describe(self.problem)

    @property
    def title(self) -> str:
        """Kernel, kind and token count."""
        return f"{self.template.name} {self.kind}, {counted(self.problem.tokens)}"


@dataclass(frozen=True)
class Settings:
    """How to tune.  ``trials`` is the most candidates per problem, ``seconds`` the time for all."""

    out: Path
    trials: int = 64
    seconds: float | None = None
    jobs: int | None = None
    seed: int = 0


@dataclass
class Progress:
    """The problem being tuned, for display: best so far against the default, in microseconds."""

    job: Job
    number: int
    total: int
    search: ProblemSearch
    default: Any
    deadline: float | None

    @property
    def default_us(self) -> float | None:
        outcome = self.search.outcomes.get(self.default)
        return outcome.time_us if outcome else None

    @property
    def best_us(self) -> float | None:
        best = self.search.best(1)
        return best[0].time_us if best else None


class Reporter(Protocol):
    """Who is told what happens; every method returns at once."""

    def begin(self, total: int, deadline: float | None) -> None: ...
    def progress(self, state: Progress, outcome: Outcome | None) -> None: ...
    def decided(self, job: Job, entry: Entry, reused: bool, notes: Sequence[str]) -> None: ...
    def undecided(self, job: Job, reason: str) -> None: ...
    def say(self, message: str) -> None: ...


@dataclass
class Summary:
    """What a run did.  ``reused_trials`` were taken from an earlier run's record; ``confirmed`` and
    ``unconfirmed`` gains did and did not show in a second process, ``not_timed_again`` were left
    for want of time."""

    decided: list[tuple[Job, Entry]] = field(default_factory=list)
    undecided: list[tuple[Job, str]] = field(default_factory=list)
    left: int = 0
    trials: int = 0
    reused_trials: int = 0
    reused_problems: int = 0
    confirmed: int = 0
    unconfirmed: int = 0
    not_timed_again: int = 0
    binaries: int = 0
    infeasible: int = 0
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)
    reasons: dict[tuple[str, str], int] = field(default_factory=dict)
    files: set[Path] = field(default_factory=set)
    seconds: float = 0.0


def plan(models: Sequence[ModelShape], names: Iterable[str], tokens: Sequence[int]) -> list[Job]:
    """Every problem of the models once, kind by kind, the largest token count first.

    KeyError for an unknown template.
    """
    jobs: list[Job] = []
    for name in names:
        kernel = template(name)
        needed: dict[Any, list[str]] = {}
        for model in models:
            for problem in kernel.problems(model, tokens):
                needed.setdefault(problem, []).append(model.name)
        kinds = list(dict.fromkeys(kernel.kernel_problem(problem) for problem in needed))
        order = sorted(
            needed, key=lambda p: (kinds.index(kernel.kernel_problem(p)), -getattr(p, "tokens", 0))
        )
        jobs += [
            Job(kernel, spaces()[name], problem, tuple(sorted(set(needed[problem]))))
            for problem in order
        ]
    return jobs


def weight(job: Job) -> float:
    """A problem's part of the time budget, relative to others'.

    Large problems have larger spaces and more to gain: 8192 tokens get four times as much as one.
    """
    return 4.0 + math.log2(max(1, job.problem.tokens))


@dataclass(frozen=True)
class Gain:
    """A decision that a config beats the default, to be timed again in another process."""

    job: Job
    search: ProblemSearch
    default: Any
    run_name: str
    run: Run
    entry: Entry


class Tuner:
    """Runs jobs one after the other; see the module's docstring."""

    def __init__(
        self,
        device: DeviceInfo,
        evaluator: Evaluator,
        storage: BaseStorage,
        settings: Settings,
        reporter: Reporter,
        seeds: Callable[[Job], Iterable[Any]] = lambda job: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.evaluator, self.storage = device, evaluator, storage
        self.settings, self.reporter, self.seeds = settings, reporter, seeds
        self.clock = clock
        self.summary = Summary()
        self._judges = concurrent.futures.ThreadPoolExecutor(1)
        self._neighbours: dict[Any, list[Any]] = {}
        self._candidates: dict[Any, list[Any]] = {}
        self._gains: list[Gain] = []
        started = datetime.now(timezone.utc)
        self.run_name = f"{started:%Y-%m-%dT%H:%M:%SZ}-{evaluator.mode}"

    def run(self, jobs: Sequence[Job]) -> Summary:
        """Tune every job, within the time given; what was decided is on disk at any moment."""
        start = self.clock()
        seconds = self.settings.seconds
        end = None if seconds is None else start + seconds
        # A prediction is never made again: all of the time is the search's.
        kept = CONFIRM_SHARE if self.evaluator.mode == "measured" else 0.0
        deadline = None if seconds is None else start + (1.0 - kept) * seconds
        versions = self.evaluator.versions()
        self.reporter.begin(len(jobs), deadline)
        with CompilePool(self.device.target, self.settings.jobs) as pool:
            try:
                pool.start()
                for number, job in enumerate(jobs):
                    now = self.clock()
                    if deadline is not None and now >= deadline:
                        self.summary.left = len(jobs) - number
                        break
                    share = None
                    if deadline is not None:
                        part = weight(job) / sum(map(weight, jobs[number:]))
                        share = now + (deadline - now) * part
                    self._tune(job, number, len(jobs), share, pool, versions)
                self._time_again(end)
            finally:
                self._judges.shutdown(wait=False, cancel_futures=True)
                self.summary.binaries = pool.compiled
                self.summary.seconds = self.clock() - start
        return self.summary

    def _tune(
        self,
        job: Job,
        number: int,
        total: int,
        deadline: float | None,
        pool: CompilePool,
        versions: Mapping[str, str],
    ) -> None:
        default = job.template.default(job.problem, self.device)
        if reason := job.space.infeasible(job.problem, default, self.device):
            self.reporter.say(f"{job.template.name}, {job.kind}: default not usable: {reason}")
        kind = (job.template.name, job.template.kernel_problem(job.problem))
        search = ProblemSearch(
            job.space,
            job.problem,
            self.device,
            self.storage,
            study_name(job.space, job.problem, self.device, self.evaluator.mode, versions),
            budget=self.settings.trials,
            first=[
                default,
                *self._neighbours.get(kind, ()),
                *self.seeds(job),
                *job.space.starts(job.problem, self.device),
                *job.space.neighbours(job.problem, default, self.device),
            ],
            candidates=self._shared_candidates(job, kind),
            seed=self.settings.seed,
        )
        self.summary.reused_trials += search.reused
        if (entry := self._stored(search, default)) is not None:
            self.summary.reused_problems += 1
            self._emit(job, entry[0], entry[1], entry[2], (), reused=True)
            self._remember(kind, job, search)
            self._note_gain(Gain(job, search, default, *entry))
            return
        state = Progress(job, number + 1, total, search, default, deadline)
        self.reporter.progress(state, None)
        try:
            self.evaluator.open(job.template, job.problem)
            self._search(job, search, state, pool)
            decision = self.evaluator.decide(search, default)
        except Refused as refusal:
            self._undecided(job, str(refusal))
            return
        finally:
            self.summary.rejected.update(search.rejected())
            self.summary.infeasible += search.infeasible
            for pair in search.reasons():
                self.summary.reasons[pair] = self.summary.reasons.get(pair, 0) + 1
        if decision is None:
            counts = ", ".join(f"{n} {status}" for status, n in sorted(search.rejected().items()))
            self._undecided(job, f"no valid candidate ({counts or 'none was tried'})")
            return
        self._remember(kind, job, search)
        run = run_record(self.device, self.evaluator.mode, versions)
        new = self._entry(job, search, decision)
        search.store_finals(
            {
                "trials": self.settings.trials,
                "complete": search.done,
                "run_name": self.run_name,
                "run": run.model_dump(),
                "entry": new.model_dump(),
                "default": record_to_dict(default),
            }
        )
        self._emit(job, self.run_name, run, new, decision.notes, reused=False)
        self._note_gain(Gain(job, search, default, self.run_name, run, new))

    def _note_gain(self, gain: Gain) -> None:
        found = gain.search.finals or {}
        entry = gain.entry
        if entry.verdict == "tuned" and entry.default_us is not None and not found.get("confirmed"):
            self._gains.append(gain)

    def _time_again(self, end: float | None) -> None:
        """Time every measured gain in another process; what does not show there was noise."""
        if not self._gains:
            return
        self.reporter.say(f"timing {len(self._gains)} gains again, in another process")
        self.summary.not_timed_again = len(self._gains)
        self.evaluator.renew()
        for gain in self._gains:
            if end is not None and self.clock() >= end:
                return
            holds, reason = self._shows_again(gain)
            if holds is not None:
                self.summary.not_timed_again -= 1
                self.summary.confirmed += holds
                self.summary.unconfirmed += not holds
            entry = gain.entry if holds else self._demoted(gain)
            found = gain.search.finals or {}
            # Unless another tuner has decided the problem since: what is stored is about that then.
            mine = _parsed(found) == (gain.run_name, gain.run, gain.entry)
            if holds is not None and mine and not found.get("confirmed"):
                gain.search.store_finals({**found, "confirmed": True, "entry": entry.model_dump()})
            if not holds:
                self._write(gain.job, gain.run_name, gain.run, entry)
                self.reporter.say(f"{gain.job.title}: default kept, {reason}")

    def _shows_again(self, gain: Gain) -> tuple[bool | None, str]:
        """Whether the gain shows in a second process, None if that cannot be told; and why not."""
        config = record_from_dict(gain.job.template.config, gain.entry.config)
        reason = ""
        for attempt in range(2):
            if attempt:
                self.evaluator.renew()  # the fault may be the process's
            try:
                self.evaluator.open(gain.job.template, gain.job.problem)
                if self.evaluator.confirms(config, gain.default):
                    return True, ""
                return False, "the gain did not show in a second process"
            except Refused as refusal:
                reason = f"the gain could not be timed again: {refusal}"
        return None, reason

    @staticmethod
    def _demoted(gain: Gain) -> Entry:
        """The entry with the default in place of a config whose gain did not show again."""
        outcome = gain.search.outcomes.get(gain.default)
        error = max_error_fields(outcome.error_ratio, outcome.max_error) if outcome else None
        return gain.entry.model_copy(
            update={
                "config": record_to_dict(gain.default),
                "verdict": "default",
                "time_us": gain.entry.default_us,
                "max_error": error,
            }
        )

    def _search(self, job: Job, search: ProblemSearch, state: Progress, pool: CompilePool) -> None:
        """Judge candidates until the budget or the problem's share of the time is spent."""
        waiting: collections.deque[tuple[Any, concurrent.futures.Future[list[Resources]]]]
        waiting = collections.deque()
        depth = max(4, LOOK_AHEAD * pool.jobs)
        lost = 0

        def in_time() -> bool:
            # Whatever the time, something is tried: the default comes first.
            return state.deadline is None or self.clock() < state.deadline or not search.outcomes

        def fill() -> None:
            while in_time() and len(waiting) < depth and (config := search.ask()) is not None:
                waiting.append((config, pool.submit(job.template, job.problem, config)))

        while True:
            fill()
            if not waiting or (not in_time() and search.best(1)):
                return
            config, future = waiting.popleft()
            verdict = self._judges.submit(self._judge, job, config, future)
            fill()  # the sampler thinks while the GPU works
            outcome = verdict.result()
            search.tell(outcome)
            self.summary.trials += 1
            if self.summary.trials % SYNC_TRIALS == 0:
                search.sync()  # what other tuners on this storage have found
            lost = lost + 1 if outcome.status in (Status.CRASHED, Status.HUNG) else 0
            self.reporter.progress(state, outcome)
            if lost >= LOST_IN_A_ROW:
                self.reporter.say(
                    f"{job.template.name}, {job.kind}: {lost} candidates in a row crashed or hung "
                    f"(last: {outcome.reason}); its search ends here"
                )
                return

    def _judge(
        self, job: Job, config: Any, future: concurrent.futures.Future[list[Resources]]
    ) -> Outcome:
        try:
            resources = future.result()
        except CompileError as error:
            return Outcome(config, Status.COMPILE_FAILED, str(error))
        for usage in resources:
            if reason := usage.infeasible(self.device):
                return Outcome(config, Status.OUT_OF_RESOURCES, reason)
            if usage.spill_bytes > job.template.most_spill:
                reason = f"spills {usage.spill_bytes} B per thread to local memory"
                return Outcome(config, Status.OUT_OF_RESOURCES, reason)
        return self.evaluator.evaluate(config, resources)

    def _shared_candidates(self, job: Job, kind: Any) -> list[Any] | None:
        """For predictions: the candidates of this problem out of one sample for its whole kind.

        Binaries do not depend on the token count, so that one sample, drawn where the space is
        largest, is compiled once and ranked for every count.
        """
        if self.evaluator.mode != "predicted":
            return None
        if kind not in self._candidates:
            everything = list(job.space.configs(job.problem, self.device))
            stride = max(1, -(-len(everything) // max(1, self.settings.trials // 2)))
            self._candidates[kind] = everything[::stride]
        return [
            config
            for config in self._candidates[kind]
            if job.space.infeasible(job.problem, config, self.device) is None
        ]

    def _remember(self, kind: Any, job: Job, search: ProblemSearch) -> None:
        self._neighbours[kind] = [outcome.config for outcome in search.best(3)]

    def _stored(self, search: ProblemSearch, default: Any) -> tuple[str, Run, Entry] | None:
        """The decision of an earlier run that searched no less than this one would."""
        found = search.finals
        if not found or not found.get("complete"):
            return None
        trials = found.get("trials", 0)
        if not isinstance(trials, int):
            return None  # edited by hand
        if trials < self.settings.trials and not search.exhausted:
            return None
        if found.get("default", known := record_to_dict(default)) != known:
            return None  # its default is another one by now
        stored = _parsed(found)
        if stored is None or stored[2].problem != record_to_dict(search.problem):
            return None
        try:
            record_from_dict(search.space.kernel.config, stored[2].config)
            make_table(search.space.template, stored[0], stored[1], [stored[2]])
        except ValueError:  # pydantic's is one
            return None
        return stored

    def _undecided(self, job: Job, reason: str) -> None:
        self.summary.undecided.append((job, reason))
        self.reporter.undecided(job, reason)

    def _emit(
        self, job: Job, run_name: str, run: Run, entry: Entry, notes: Sequence[str], reused: bool
    ) -> None:
        if self._write(job, run_name, run, entry):
            notes = (*notes, "a measured entry stands and was kept")
        self.reporter.decided(job, entry, reused, notes)

    def _write(self, job: Job, run_name: str, run: Run, entry: Entry) -> bool:
        """Put an entry into its table; whether another one stands and was kept instead."""
        entry = entry.model_copy(update={"run": run_name, "models": list(job.models)})
        table = make_table(job.template.name, run_name, run, [entry])
        update = update_table(self.settings.out, table)
        for warning in update.warnings:
            self.reporter.say(warning)
        self.summary.files.add(update.path)
        self.summary.decided = [pair for pair in self.summary.decided if pair[0] is not job]
        self.summary.decided.append((job, entry))
        return bool(update.kept)

    def _entry(self, job: Job, search: ProblemSearch, decision: Decision) -> Entry:
        predicted = None
        if decision.predicted is not None:
            predicted = Predicted(
                config=short(decision.predicted[0]), default=short(decision.predicted[1])
            )
        return Entry(
            problem=record_to_dict(job.problem),
            config=record_to_dict(decision.config),
            verdict="tuned" if decision.tuned else "default",
            time_us=timing_fields(decision.time),
            default_us=timing_fields(decision.default),
            stock_us=timing_fields(decision.stock),
            predicted_us=predicted,
            max_error=max_error_fields(decision.error_ratio, decision.max_error),
            trials=len(search.outcomes),
            rejected=search.rejected(),
            models=list(job.models),
            source_hash=job.template.source_hash,
            run=self.run_name,
        )


def run_record(device: DeviceInfo, mode: str, versions: Mapping[str, str]) -> Run:
    """Where entries made now on ``device`` come from; ``mode`` is an evaluator's."""
    return Run(
        provenance="measured" if mode == "measured" else "predicted",
        device=Device(
            name=device.name,
            capability=list(device.capability),
            sms=device.sms,
            memory_bytes=device.memory_bytes,
            driver=device.driver if device.attached else None,
        ),
        gemma_tune=__version__,
        triton=versions["triton"],
        torch=versions["torch"],
        python=versions["python"],
        finished_at=f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
    )


def seeds_from_entries(
    entries: Mapping[str, Sequence[Entry]],
) -> Callable[[Job], Iterator[Any]]:
    """Configs worth trying early: those other GPUs' tables hold for the nearest token count.

    ``entries`` maps a template's name to the entries of the nearest GPUs, nearest first.
    """

    def seeds(job: Job) -> Iterator[Any]:
        wanted = record_to_dict(job.problem)
        tokens = wanted.pop("tokens", 1)
        same = [
            entry
            for entry in entries.get(job.template.name, ())
            if {k: v for k, v in entry.problem.items() if k != "tokens"} == wanted
        ]
        same.sort(key=lambda e: abs(e.problem.get("tokens", 1) - tokens))
        for entry in same[:2]:
            try:
                yield record_from_dict(job.template.config, entry.config)
            except ValueError:
                continue  # another version's config

    return seeds


def _parsed(found: Mapping[str, Any] | None) -> tuple[str, Run, Entry] | None:
    """Run name, run and entry of a stored decision; None for one that was edited by hand."""
    if not found or not isinstance(run_name := found.get("run_name"), str):
        return None
    try:
        entry = {**found["entry"], "run": run_name}
        return run_name, Run.model_validate(found["run"]), Entry.model_validate(entry)
    except (KeyError, TypeError, ValidationError):
        return None


def max_error_fields(ratio: float | None, absolute: float | None) -> MaxError | None:
    """A check's errors as a table holds them; None where there was no check."""
    if ratio is None or absolute is None:
        return None
    return MaxError(ratio=short(ratio), absolute=short(absolute))


def timing_fields(timing: Timing | None) -> TimingFields | None:
    """A timing as a table holds it."""
    if timing is None:
        return None
    return TimingFields(median=short(timing.median), spread=short(timing.spread))


def short(value: float) -> float:
    """Four significant digits: no measurement here holds more."""
    return float(f"{value:.4g}")
