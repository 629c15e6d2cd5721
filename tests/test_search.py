"""What is tried next: order, exhaustion, sampling, failures told, and what survives in storage."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
from faulty_template import A100, TEMPLATE, Problem
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState

from kernel_templates.base import KernelTemplate
from search_spaces.base import SearchSpace
from tuner.search import (
    FlockLock,
    ProblemSearch,
    StorageError,
    mend_journal,
    open_storage,
    study_name,
)
from tuner.trial import Outcome, Status

PROBLEM = Problem(4)
SIZES = tuple(1 << n for n in range(12))


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    kind: str


class Tiles(SearchSpace):
    @property
    def kernel(self) -> KernelTemplate[Any, Any]:
        return KERNEL


KERNEL = dataclasses.replace(TEMPLATE, config=Tile)


def space(sizes: Sequence[int] = SIZES, kinds: Sequence[str] = ("plain", "broken")) -> Tiles:
    """Tiles of rows x columns; more than 8192 elements are infeasible."""
    return Tiles(
        "double",
        lambda problem, device: {
            "rows": tuple(sizes), "columns": tuple(sizes), "kind": tuple(kinds),
        },
        lambda problem, config, device: (
            "too large" if config.rows * config.columns > 8192 else None
        ),
    )  # fmt: skip


SMALL = space((1, 2, 4))
FEASIBLE = sum(a * b <= 8192 for a in SIZES for b in SIZES) * 2


def judged(config: Tile) -> Outcome:
    """Broken ones fail; the others are fastest at 64 x 16."""
    if config.kind == "broken":
        return Outcome(config, Status.CRASHED, "told to crash")
    away = abs(math.log2(config.rows / 64)) + abs(math.log2(config.columns / 16))
    return Outcome(config, Status.OK, time_us=10.0 + 5 * away, spread_us=0.1)


def search(
    storage: BaseStorage | None = None, of: SearchSpace = SMALL, budget: int = 64, **options: Any
) -> ProblemSearch:
    storage = InMemoryStorage() if storage is None else storage
    return ProblemSearch(of, PROBLEM, A100, storage, "study", budget, **options)


def run(
    one: ProblemSearch, most: int = 10**6, judge: Callable[[Tile], Outcome] = judged
) -> list[Tile]:
    asked: list[Tile] = []
    while len(asked) < most and (config := one.ask()) is not None:
        asked.append(config)
        one.tell(judge(config))
    return asked


# Order and exhaustion


def test_a_space_that_fits_is_searched_whole() -> None:
    one = search(budget=18)
    assert one.exhaustive
    asked = run(one)
    assert len(asked) == 18
    assert set(asked) == set(SMALL.configs(PROBLEM, A100))
    assert one.done
    assert one.exhausted
    assert one.ask() is None


def test_infeasible_points_of_a_whole_space_are_left_out() -> None:
    whole = space((1, 64, 2048), ("plain",))
    asked = run(search(of=whole))
    assert set(asked) == set(whole.configs(PROBLEM, A100))
    assert len(asked) == 6  # all but 64 x 2048, 2048 x 64 and 2048 x 2048


def test_default_comes_first_then_the_others_in_their_order() -> None:
    first = [Tile(4, 4, "plain"), Tile(2, 1, "broken"), Tile(4, 4, "plain")]
    for budget in (64, 5):
        one = search(budget=budget, first=first)
        assert [one.ask(), one.ask()] == first[:2]
        assert one.ask() not in first


def test_first_ones_that_cannot_run_are_passed_over() -> None:
    first = [Tile(2048, 2048, "plain"), Tile(3, 1, "plain"), Tile(1, 1, "odd"), Tile(2, 2, "plain")]
    one = search(of=space(), budget=30, first=first)
    assert one.ask() == Tile(2, 2, "plain")
    assert one.infeasible == 1  # the others belong to another space


def test_the_budget_counts_what_is_in_flight() -> None:
    one = search(budget=3)
    asked = [one.ask() for _ in range(3)]
    assert None not in asked
    assert one.ask() is None
    one.tell(judged(asked[0]))
    assert one.ask() is None
    assert not one.done


def test_only_candidates_are_tried_when_they_are_given() -> None:
    chosen = [Tile(1, 1, "plain"), Tile(64, 16, "plain"), Tile(64, 32, "plain")]
    one = search(of=space(), candidates=chosen, first=[Tile(2, 2, "plain")])
    assert run(one) == [Tile(2, 2, "plain"), *chosen]
    assert one.exhausted


def test_nothing_to_try() -> None:
    one = search(of=space((4096,), ("plain",)))
    assert one.ask() is None
    assert one.best(3) == []
    assert one.done


# Sampling


def test_sampling_repeats_nothing_and_keeps_to_what_can_run() -> None:
    one = search(of=space(), budget=80)
    assert not one.exhaustive
    assert one.size == FEASIBLE > 80
    asked = run(one)
    assert len(asked) == len(set(asked)) == len(one.outcomes) == 80
    assert all(config.rows * config.columns <= 8192 for config in asked)
    assert one.done
    assert not one.exhausted


def test_sampling_with_many_in_flight_repeats_nothing() -> None:
    one = search(of=space(), budget=60)
    asked: list[Any] = []
    for _ in range(15):
        batch = [one.ask() for _ in range(4)]
        asked += batch
        for config in reversed(batch):
            one.tell(judged(config))
    assert None not in asked
    assert len(set(asked)) == 60
    assert one.ask() is None


def test_a_space_barely_larger_than_the_budget_is_no_endless_loop() -> None:
    one = search(budget=17)
    assert not one.exhaustive
    assert len(set(run(one))) == 17


def test_failures_are_told_with_finite_penalties() -> None:
    storage = InMemoryStorage()
    one = search(storage, space(), budget=40)
    run(one)
    assert one.rejected()["crashed"] == len(list(one.reasons())) > 0
    slowest = max(o.time_us for o in one.outcomes.values() if o.time_us is not None)
    trials = optuna.load_study(study_name="study", storage=storage).trials
    assert len(trials) == 40
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert all(trial.value is not None and math.isfinite(trial.value) for trial in trials)
    failed = [t for t in trials if t.user_attrs["outcome"]["status"] == "crashed"]
    assert failed[-1].value is not None
    assert failed[-1].value > slowest
    # What the sampler learns from is the same: nothing is dropped.
    assert one._sampling is not None
    told = [t for t in one._sampling.trials if t.state is TrialState.COMPLETE]
    assert len(told) == 40
    assert all(t.value is not None and math.isfinite(t.value) for t in told)


def test_failures_inform_the_sampler() -> None:
    # Half of the space crashes: later on little of that half is asked for.
    late = [run(search(of=space(), budget=50, seed=seed))[-25:] for seed in range(4)]
    broken = sum(config.kind == "broken" for part in late for config in part)
    assert broken < 25  # of 100; 50 if nothing were learned


def test_failures_before_any_success_are_finite_too() -> None:
    storage = InMemoryStorage()
    one = search(storage, space(), budget=12)
    run(one, judge=lambda config: Outcome(config, Status.WRONG, "wrong"))
    assert all(
        math.isfinite(trial.value or math.inf)
        for trial in optuna.load_study(study_name="study", storage=storage).trials
    )
    assert one.best(1) == []


def test_sampling_finds_what_is_fast() -> None:
    found = []
    for seed in range(3):
        one = search(of=space(), budget=60, seed=seed)
        run(one)
        found.append(one.best(1)[0].time_us or math.inf)
    # 144 tiles of 182 are possible; 60 trials that ignore what was found end above 15 on average.
    assert sorted(found)[1] <= 15.0


def test_the_seed_decides() -> None:
    first, again, other = (
        run(search(of=space(), budget=30, seed=seed), judge=judged) for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


# Storage


def test_results() -> None:
    one = search()
    run(one)
    best = one.best(3)
    assert best[0].config == Tile(4, 4, "plain")
    times = [outcome.time_us or 0 for outcome in one.best(99)]
    assert times == sorted(times)
    assert len(times) == 9
    assert one.rejected() == {"crashed": 9}
    assert set(one.reasons()) == {("crashed", "told to crash")}


@pytest.mark.parametrize("url", [None, "sqlite:///{}/trials.db"])
@pytest.mark.parametrize("budget", [18, 12])
def test_resumed_search_goes_on(url: str | None, budget: int, tmp_path: Path) -> None:
    def opened() -> BaseStorage:
        return open_storage(url and url.format(tmp_path), tmp_path / "state")

    one = search(opened(), budget=budget)
    before = run(one, most=7)
    in_flight = one.ask()  # and then it was killed
    again = search(opened(), budget=budget)
    assert again.reused == 7
    assert again.outcomes == one.outcomes
    after = run(again)
    assert not set(before) & set(after)
    assert len(before) + len(after) == budget
    assert in_flight in after or budget < 18
    assert again.finals is None
    again.store_finals({"complete": True, "entry": {"a": [1, None]}})
    third = search(opened(), budget=budget)
    assert third.finals == {"complete": True, "entry": {"a": [1, None]}}
    assert third.ask() is None
    assert third.done
    assert third.reused == budget


def test_two_searches_on_one_storage_learn_from_each_other(tmp_path: Path) -> None:
    one = search(open_storage(None, tmp_path))
    other = search(open_storage(None, tmp_path))
    done = run(one, most=10)
    other.sync()
    assert set(other.outcomes) == set(done)
    assert not set(run(other)) & set(done)
    one.sync()
    one.sync()
    assert len(one.outcomes) == 18
    assert one.ask() is None


def test_two_storages_are_apart(tmp_path: Path) -> None:
    run(search(open_storage(None, tmp_path / "a")))
    assert search(open_storage(None, tmp_path / "b")).reused == 0
    assert search(open_storage(None, tmp_path / "a")).reused == 18


def test_study_names_tell_apart_what_must_not_be_mixed() -> None:
    versions = {"triton": "3", "torch": "2", "python": "3.11"}
    base = study_name(SMALL, PROBLEM, A100, "measured", versions)
    assert base == study_name(SMALL, Problem(4), A100, "measured", dict(reversed(versions.items())))
    others = [
        study_name(space((1, 2)), PROBLEM, A100, "measured", versions),
        study_name(SMALL, Problem(8), A100, "measured", versions),
        study_name(SMALL, Problem(4, width=64), A100, "measured", versions),
        study_name(SMALL, PROBLEM, A100, "predicted", versions),
        study_name(SMALL, PROBLEM, A100, "measured", {**versions, "triton": "4"}),
        study_name(SMALL, PROBLEM, dataclasses.replace(A100, name="x"), "measured", versions),
        study_name(SMALL, PROBLEM, dataclasses.replace(A100, sms=1), "measured", versions),
    ]
    assert len({base, *others}) == len(others) + 1


def test_records_of_another_version_are_passed_over(tmp_path: Path) -> None:
    one = search(open_storage(None, tmp_path))
    run(one, most=3)
    path = tmp_path / "trials.journal"
    path.write_text(path.read_text().replace('"spread_us"', '"deviation"', 1))
    again = search(open_storage(None, tmp_path))
    assert again.reused == 2
    assert len(run(again)) == 16


# The journal


def journal(tmp_path: Path) -> tuple[Path, list[bytes]]:
    run(search(open_storage(None, tmp_path)), most=5)
    path = tmp_path / "trials.journal"
    return path, path.read_bytes().splitlines(keepends=True)


def test_a_cut_line_is_lost_and_nothing_else(tmp_path: Path) -> None:
    path, lines = journal(tmp_path)
    said: list[str] = []
    for cut in (1, 20, len(lines[-1]) - 1):
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        assert search(open_storage(None, tmp_path, said.append)).reused == 4
        kept = path.read_bytes()
        # What follows is the new search's own.
        assert kept.startswith(b"".join(lines[:-1]) + b'{"op_code":0,')
        assert kept.endswith(b"\n")
    assert said == []
    assert list(tmp_path.glob("*.broken-*")) == []


@pytest.mark.parametrize("garbage", [b"garbage\n", b"\0\0\0\n", b"\n", b"[1]\n", b'{"a": 1}\n'])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_broken_line_keeps_what_is_before_it(at: int, garbage: bytes, tmp_path: Path) -> None:
    path, lines = journal(tmp_path)
    assert len(lines) == 6  # the study and five trials
    broken = b"".join([*lines[:at], garbage, *lines[at:]])
    path.write_bytes(broken)
    said: list[str] = []
    one = search(open_storage(None, tmp_path, said.append))
    assert one.reused == max(0, at - 1)
    assert len(said) == 1
    assert f"line {at + 1} is no record" in said[0]
    (aside,) = tmp_path.glob("trials.journal.broken-*")
    assert aside.name in said[0]
    assert aside.read_bytes() == broken
    assert len(run(one)) == 18 - one.reused
    assert search(open_storage(None, tmp_path, said.append)).reused == 18
    assert len(said) == 1


def test_a_record_that_cannot_be_replayed(tmp_path: Path) -> None:
    path, lines = journal(tmp_path)
    record = json.loads(lines[2])
    del record["study_id"]
    path.write_bytes(b"".join([*lines, json.dumps(record).encode() + b"\n"]))
    said: list[str] = []
    one = search(open_storage(None, tmp_path, said.append))
    assert one.reused == 0
    assert len(said) == 1
    assert "moved aside" in said[0]
    assert len(run(one)) == 18


def test_whole_and_absent_journals_are_left_alone(tmp_path: Path) -> None:
    assert mend_journal(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()
    path, lines = journal(tmp_path)
    assert mend_journal(path) is None
    assert path.read_bytes() == b"".join(lines)


def test_the_journals_lock_is_exclusive_and_reusable(tmp_path: Path) -> None:
    lock = FlockLock(str(tmp_path / "j"))
    for _ in range(2):
        assert lock.acquire()
        handle = os.open(tmp_path / "j.lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.release()
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
    lock.release()


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "sqlite:////nowhere/at/all.db", "nosuch://u:secret@h/db", "sqlite://h/db"],
)
def test_broken_urls_are_said_in_one_line(url: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as refused:
        open_storage(url, tmp_path)
    text = str(refused.value)
    assert "cannot be used: " in text
    assert "wanted for example sqlite:///trials.db" in text
    assert "\n" not in text
    assert "secret" not in text


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "t.db").write_text("this is no database, whatever its name says " * 100)
    with pytest.raises(StorageError, match="file is not a database"):
        open_storage(f"sqlite:///{tmp_path}/t.db", tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(StorageError, match="cannot be kept"):
        open_storage(None, tmp_path / "state")
    (tmp_path / "other" / "trials.journal").mkdir(parents=True)
    with pytest.raises(StorageError, match="Is a directory"):
        open_storage(None, tmp_path / "other")
