"""Which candidate next: one Optuna study per problem, resumable, with every failure told.

Sampling runs in an in-memory study; every finished candidate is appended to a durable one (a local
journal by default, any Optuna storage URL otherwise) in a single write.  So asking is fast, a kill
loses at most the candidates in flight, and several tuners on one storage learn from each other's
finished trials.  TPE learns nothing from trials in state FAIL, hence failures enter as completed
trials with a finite penalty.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from kernel_templates.base import DeviceInfo, record_to_dict
from search_spaces.base import SearchSpace
from tuned_configs.files import aside_of

from .trial import Outcome, Status

#: Spaces beyond this are sampled without being listed; none of today's comes near it.
LISTED = 200_000
#: Penalty of a failed candidate, as a multiple of the slowest time seen.
PENALTY = 4.0
#: Distance between two choices that have no order, in steps between neighbouring numbers.
OTHER_KIND = 3


class FlockLock:
    """Journal lock that the operating system releases when its holder dies, however it dies.

    Has the methods that Optuna's journal asks of a lock (their base class is not public).
    """

    def __init__(self, path: str) -> None:
        self._path = path + ".lock"
        self._handle: int | None = None

    def acquire(self) -> bool:
        self._handle = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class StorageError(Exception):
    """The trials cannot be stored; the message says where and why."""


def open_storage(
    url: str | None, folder: Path, say: Callable[[str], None] = lambda message: None
) -> BaseStorage:
    """The durable storage: ``url`` as Optuna takes it, or a journal file in ``folder``.

    A journal whose last line was cut by a kill loses that line and nothing else; one that is broken
    elsewhere is told to ``say``.  StorageError when there is no such storage.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is not None:
        try:
            return RDBStorage(url)
        # Whatever SQLAlchemy and the database's driver raise; a driver may also be missing.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            hidden = re.sub(r"(://[^/@:]*):[^@]*@", r"\1:***@", url)
            raise StorageError(
                f"the storage {hidden!r} cannot be used: {reason}; "
                "wanted for example sqlite:///trials.db"
            ) from error
    path = folder / "trials.journal"
    lock = FlockLock(str(path))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        try:
            if warning := mend_journal(path):
                say(warning)
        finally:
            lock.release()
        return _journal(path, lock, say)
    except OSError as error:
        raise StorageError(
            f"{path}: the record of trials cannot be kept: {error.strerror or error}"
        ) from error


def _journal(path: Path, lock: FlockLock, say: Callable[[str], None]) -> BaseStorage:
    """The journal's storage; a journal that Optuna cannot replay is moved aside."""
    try:
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except OSError:
        raise
    except Exception as error:
        aside = aside_of(path)
        path.rename(aside)
        say(f"{path} cannot be replayed ({error!r}): moved aside to {aside.name}, begun anew")
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def mend_journal(path: Path) -> str | None:
    """Cut a journal before its first line that is no record; returns a warning to show, or None.

    Records name studies by their number, so that nothing behind a lost one can be trusted.  What a
    killed writer left after the last whole line goes silently; before anything else is cut, the
    whole file is copied aside.
    """
    if not path.exists():
        return None
    if not path.is_file() and not path.is_dir():  # a pipe would hang, a device never end
        raise OSError(errno.EINVAL, "it is no regular file")
    data = path.read_bytes()
    keep = lines = 0
    for line in data.splitlines(keepends=True):
        if not _is_record(line):
            break
        keep += len(line)
        lines += 1
    if keep == len(data):
        return None
    warning = None
    if b"\n" in data[keep:]:
        aside = aside_of(path)
        aside.write_bytes(data)
        warning = (
            f"{path}: line {lines + 1} is no record of a trial; the lines before it are used, "
            f"the whole file was kept as {aside.name}"
        )
    os.truncate(path, keep)
    return warning


def _is_record(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and {"op_code", "worker_id"} <= record.keys()


def study_name(
    space: SearchSpace, problem: Any, device: DeviceInfo, mode: str, versions: Mapping[str, str]
) -> str:
    """Name under which trials are kept: everything that must agree for a result to be reused."""
    choices = {name: list(values) for name, values in space.choices(problem, device).items()}
    identity = json.dumps(
        [
            record_to_dict(problem),
            choices,
            space.kernel.source_hash,
            [device.name, *device.capability, device.sms, device.shared_per_block],
            sorted(versions.items()),
        ],
        sort_keys=True,
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return f"{space.template}/{problem.tokens}/{mode}/{digest}"


class ProblemSearch:
    """The search of one problem.

    ``budget`` is the number of evaluated candidates; a space (or ``candidates`` list) that fits it
    is searched exhaustively.  ``first`` are tried before anything else, in their order.
    """

    def __init__(
        self,
        space: SearchSpace,
        problem: Any,
        device: DeviceInfo,
        storage: BaseStorage,
        name: str,
        budget: int,
        first: Sequence[Any] = (),
        candidates: Sequence[Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.space, self.problem, self.device = space, problem, device
        self.budget = budget
        self.choices = space.choices(problem, device)
        self.outcomes: dict[Any, Outcome] = {}
        self.reused = 0
        self.infeasible = 0
        self._asked: dict[Any, FrozenTrial | optuna.Trial | None] = {}
        self._random = random.Random(f"{seed}/{name}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._durable = optuna.create_study(
                storage=storage, study_name=name, load_if_exists=True
            )
        self._seen_trials: set[int] = set()
        self._queue = list(dict.fromkeys(first))
        listed = list(candidates) if candidates is not None else self._listed()
        self.size = len(listed)
        self.exhaustive = self.size <= budget
        self._listing = listed
        self._rows = {config: row for row, config in enumerate(listed)}
        self._left = np.ones(len(listed), dtype=bool)
        self._places = np.array([self._place(config) for config in listed])
        if self.exhaustive:
            queued = set(self._queue)
            self._queue += [config for config in listed if config not in queued]
        self._distributions = {
            field: CategoricalDistribution(values) for field, values in self.choices.items()
        }
        self._sampled = {field: _ordered(values) for field, values in self.choices.items()}
        self._sampling: optuna.Study | None = None if self.exhaustive else self._sampler(seed)
        self.sync()
        self.reused = len(self.outcomes)

    def _listed(self) -> list[Any]:
        found = []
        for config in self.space.configs(self.problem, self.device):
            found.append(config)
            if len(found) >= LISTED:
                break
        return found

    def _sampler(self, seed: int) -> optuna.Study:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                seed=seed,
                multivariate=True,
                n_startup_trials=max(8, self.budget // 4),
                constant_liar=True,
            )
            return optuna.create_study(sampler=sampler)

    # What is known already

    def sync(self) -> None:
        """Take in the trials that earlier runs or other tuners finished."""
        for trial in self._durable.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if trial.number in self._seen_trials:
                continue
            self._seen_trials.add(trial.number)
            values = trial.user_attrs.get("outcome")
            if values is None:
                continue
            try:
                config = self.space.kernel.config(**trial.params)
                outcome = Outcome.from_dict(config, values)
            except (KeyError, TypeError, ValueError):
                continue  # another version's record
            if config not in self.outcomes:
                self._learn(outcome, trial=None)

    @property
    def finals(self) -> dict[str, Any] | None:
        """The stored result of the finals, if this problem was already decided."""
        found = self._durable.user_attrs.get("finals")
        return dict(found) if isinstance(found, dict) and found else None

    def store_finals(self, result: Mapping[str, Any]) -> None:
        self._durable.set_user_attr("finals", dict(result))

    @property
    def done(self) -> bool:
        """Whether the budget is spent or nothing is left to try."""
        return len(self.outcomes) >= self.budget or (not self._queue and not self._left.any())

    @property
    def exhausted(self) -> bool:
        """Whether every candidate of the space was tried."""
        return self.exhaustive and not self._left.any()

    # Ask and tell

    def ask(self) -> Any | None:
        """The next candidate, None when none is left or the budget is in flight or spent."""
        in_flight = sum(config not in self.outcomes for config in self._asked)
        if len(self.outcomes) + in_flight >= self.budget:
            return None
        while self._queue:
            config = self._queue.pop(0)
            if not self._is_new(config) or not self._in_space(config):
                continue
            if self.space.infeasible(self.problem, config, self.device) is None:
                return self._take(config, None)
            self.infeasible += 1
        # An exhaustive search has queued all there is, and has no sampler.
        if self._sampling is None or not self._left.any():
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = self._sampling.ask(self._sampled)
        proposed = self._config_of(trial.params)
        row = self._rows.get(proposed)
        if row is not None and self._left[row]:
            return self._take(proposed, trial)
        # The sampler knows no constraint between fields, so most of its proposals cannot run or
        # are known: try the nearest candidate that is left.
        self._sampling.tell(trial, state=TrialState.FAIL)
        self.infeasible += proposed not in self.outcomes and proposed not in self._asked
        return self._take(self._nearest(proposed), None)

    def _nearest(self, config: Any) -> Any:
        """The untried candidate that is the fewest steps through the choices from ``config``.

        Another choice of a field that is no number, which may be one that fails, is worth
        :data:`OTHER_KIND` steps.
        """
        away = np.abs(self._places - np.array(self._place(config)))
        kinds = [isinstance(d, CategoricalDistribution) for d in self._sampled.values()]
        steps = np.where(kinds, OTHER_KIND * (away > 0), away).sum(axis=1)
        steps[~self._left] = np.iinfo(steps.dtype).max
        nearest = np.flatnonzero(steps == steps.min())
        return self._listing[self._random.choice(nearest.tolist())]

    def _place(self, config: Any) -> list[int]:
        return [values.index(getattr(config, name)) for name, values in self.choices.items()]

    def _config_of(self, params: Mapping[str, Any]) -> Any:
        """The config that the sampler means by its parameters."""
        return self.space.kernel.config(
            **{
                name: self.choices[name][value]
                if isinstance(self._sampled[name], IntDistribution)
                else value
                for name, value in params.items()
            }
        )

    def _params_of(self, config: Any) -> dict[str, Any]:
        """The inverse of :meth:`_config_of`."""
        return {
            name: place if isinstance(self._sampled[name], IntDistribution) else values[place]
            for (name, values), place in zip(self.choices.items(), self._place(config), strict=True)
        }

    def _is_new(self, config: Any) -> bool:
        return config not in self.outcomes and config not in self._asked

    def _in_space(self, config: Any) -> bool:
        """Whether every field holds one of today's choices (a foreign table's may not)."""
        return all(getattr(config, name) in values for name, values in self.choices.items())

    def _take(self, config: Any, trial: optuna.Trial | None) -> Any:
        self._asked[config] = trial
        self._strike(config)
        return config

    def _strike(self, config: Any) -> None:
        """Take a candidate off what is left to try."""
        if (row := self._rows.get(config)) is not None:
            self._left[row] = False

    def tell(self, outcome: Outcome) -> None:
        """Record a finished candidate: durably first, then for the sampler."""
        value = outcome.time_us if outcome.time_us is not None else self._penalty()
        self._durable.add_trial(
            create_trial(
                params=record_to_dict(outcome.config),
                distributions=dict(self._distributions),
                value=value,
                user_attrs={"outcome": outcome.to_dict()},
            )
        )
        self._learn(outcome, self._asked.get(outcome.config))

    def _learn(self, outcome: Outcome, trial: Any) -> None:
        self.outcomes[outcome.config] = outcome
        self._strike(outcome.config)
        if self._sampling is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if trial is not None:
                self._tell_sampler(trial, outcome)
            else:
                self._sampling.add_trial(
                    create_trial(
                        params=self._params_of(outcome.config),
                        distributions=dict(self._sampled),
                        value=outcome.time_us or self._penalty(),
                    )
                )

    def _tell_sampler(self, trial: optuna.Trial, outcome: Outcome | None) -> None:
        assert self._sampling is not None
        if outcome is None:
            # In flight: the sampler must not wait for it.
            self._sampling.tell(trial, state=TrialState.PRUNED)
            return
        self._sampling.tell(trial, outcome.time_us or self._penalty())

    def _penalty(self) -> float:
        times = [o.time_us for o in self.outcomes.values() if o.time_us is not None]
        return PENALTY * max(times, default=1e6)

    # Results

    def best(self, count: int) -> list[Outcome]:
        """The fastest correct candidates, fastest first."""
        good = [o for o in self.outcomes.values() if o.status is Status.OK]
        return sorted(good, key=lambda o: o.time_us or 0.0)[:count]

    def rejected(self) -> dict[str, int]:
        """Number of evaluated candidates that failed, by status."""
        counts: dict[str, int] = {}
        for outcome in self.outcomes.values():
            if outcome.status is not Status.OK:
                counts[outcome.status.value] = counts.get(outcome.status.value, 0) + 1
        return counts

    def reasons(self) -> Iterator[tuple[str, str]]:
        """(status, reason) of every rejected candidate."""
        for outcome in self.outcomes.values():
            if outcome.status is not Status.OK:
                yield outcome.status.value, outcome.reason


def _ordered(values: Sequence[Any]) -> BaseDistribution:
    """How a field is sampled: numbers by their index, since neighbours have like effects."""
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return IntDistribution(0, len(values) - 1)
    return CategoricalDistribution(tuple(values))
