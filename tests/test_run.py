"""The tuning run under injected faults: whatever candidates do, the run ends with a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from faulty_template import A100, TEMPLATE, Config, Problem, space

from tuned_configs.schema import Entry
from tuned_configs.store import read_table, table_path
from tuner.evaluate import Decision, Limits, Measuring, Predicting, Refused
from tuner.run import Job, Progress, Settings, Summary, Tuner
from tuner.search import ProblemSearch, open_storage
from tuner.timing import Timing
from tuner.trial import Outcome, Status
from tuner.worker import WorkerDied

#: On the host clock: no stock peer, which inductor would compile for half a minute.
LIMITS = Limits(trial_seconds=6.0, finalists=2, rounds=3, stock=False)


class Recorder:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.said: list[str] = []
        self.lost: list[str] = []
        self.reused = 0

    def begin(self, total: int, deadline: float | None) -> None: ...

    def progress(self, state: Progress, outcome: Outcome | None) -> None:
        if outcome is not None:
            self.outcomes.append(outcome)

    def decided(self, job: Job, entry: Entry, reused: bool, notes: Sequence[str]) -> None:
        self.reused += reused

    def undecided(self, job: Job, reason: str) -> None:
        self.lost.append(reason)

    def say(self, message: str) -> None:
        self.said.append(message)


def jobs(faults: Sequence[str], tokens: Sequence[int] = (4,), **options: Any) -> list[Job]:
    return [Job(TEMPLATE, space(faults, **options), Problem(count), ("m",)) for count in tokens]


def tune(
    folder: Path, work: list[Job], evaluator: Any = None, trials: int = 64, **settings: Any
) -> tuple[Summary, Recorder]:
    evaluator = evaluator or Measuring({"device": "cpu"}, limits=LIMITS)
    recorder = Recorder()
    options = Settings(folder / "out", trials=trials, jobs=1, **settings)
    try:
        storage = open_storage(None, folder / "state")
        return Tuner(A100, evaluator, storage, options, recorder).run(work), recorder
    finally:
        evaluator.close()


def entries(folder: Path) -> list[Entry]:
    return read_table(table_path(folder / "out", A100.name, "double")).entries


def test_every_fault_ends_in_a_named_reason(tmp_path: Path) -> None:
    # case 15: each kind of failure is skipped and counted, and the good result is chosen
    faults = ("fine", "hang", "crash", "sticky", "resources", "raise", "static", "shared", "wrong")
    summary, recorder = tune(tmp_path, jobs(faults, warps=(4,)))
    by_fault = {outcome.config.fault: outcome for outcome in recorder.outcomes}
    assert {fault: outcome.status for fault, outcome in by_fault.items()} == {
        "fine": Status.OK,
        "hang": Status.HUNG,
        "crash": Status.CRASHED,
        "sticky": Status.CRASHED,
        "resources": Status.OUT_OF_RESOURCES,
        "raise": Status.FAILED,
        "static": Status.COMPILE_FAILED,
        "shared": Status.OUT_OF_RESOURCES,
        "wrong": Status.WRONG,
    }
    assert "no answer within 6 s" in by_fault["hang"].reason
    assert "SIGSEGV" in by_fault["crash"].reason
    assert "illegal memory access" in by_fault["sticky"].reason
    assert "limit: 232448" in by_fault["resources"].reason
    assert "PassManager::run failed" in by_fault["raise"].reason
    # The binary itself was asked, and the device's limit is in the arithmetic.
    assert by_fault["shared"].reason.endswith("of shared memory, limit 166912")
    assert "wanted" in by_fault["wrong"].reason
    assert sum(summary.rejected.values()) == 8
    (entry,) = entries(tmp_path)
    assert entry.config == {"fault": "fine", "num_warps": 4}
    assert entry.verdict == "default"
    assert sum(entry.rejected.values()) == 8
    assert entry.time_us is not None
    assert entry.max_error is not None


def test_no_valid_candidate_writes_nothing(tmp_path: Path) -> None:
    # case 16: the default is wrong as well
    summary, recorder = tune(tmp_path, [Job(TEMPLATE, space(["wrong"]), Problem(4), ("m",))])
    assert summary.decided == []
    assert recorder.lost == ["no valid candidate (3 wrong result)"]
    assert not (tmp_path / "out").exists()


def test_crashes_in_a_row_end_one_problem_only(tmp_path: Path) -> None:
    warps = (1, 2, 4, 8, 32, 64, 128)
    work = [
        Job(TEMPLATE, space(["sticky"], warps), Problem(4), ("m",)),
        Job(TEMPLATE, space(["fine"], (4,)), Problem(8), ("m",)),
    ]
    summary, recorder = tune(tmp_path, work)
    assert any("in a row crashed or hung" in message for message in recorder.said) or (
        recorder.lost and "crashed" in recorder.lost[0]
    )
    assert [job.problem.tokens for job, _ in summary.decided] == [8]


def test_infeasible_points_cost_nothing(tmp_path: Path) -> None:
    summary, recorder = tune(tmp_path, jobs(["fine"], warps=(4, 16)))
    assert [outcome.config.num_warps for outcome in recorder.outcomes] == [4]
    assert summary.trials == 1


def test_second_run_reuses_everything(tmp_path: Path) -> None:
    first, _ = tune(tmp_path, jobs(["fine"], tokens=(8, 4)))
    before = table_path(tmp_path / "out", A100.name, "double").read_text()
    second, recorder = tune(tmp_path, jobs(["fine"], tokens=(8, 4)))
    assert (first.trials, first.reused_problems) == (6, 0)
    assert (second.trials, second.reused_problems, second.reused_trials) == (0, 2, 6)
    assert recorder.reused == 2
    assert table_path(tmp_path / "out", A100.name, "double").read_text() == before


class TwiceTimed(Measuring):
    """Finds a gain in the config of two warps; ``holds`` says whether a second process does."""

    def __init__(self, holds: bool) -> None:
        super().__init__({"device": "cpu"}, limits=LIMITS)
        self.holds = holds
        self.asked: list[tuple[int, Config, Config]] = []

    def decide(self, search: ProblemSearch, default: Any) -> Decision | None:
        one, two = Timing(1.0, 0.0), Timing(2.0, 0.0)
        return Decision(Config("fine", 2), True, 0.5, one, two, error_ratio=1.0, max_error=0.5)

    def confirms(self, config: Any, default: Any) -> bool:
        self._ready()
        self.asked.append((self.worker.starts, config, default))
        return self.holds


@pytest.mark.parametrize("holds", [True, False])
def test_a_gain_must_show_in_a_second_process(tmp_path: Path, holds: bool) -> None:
    # case 11: what one process measures may be the luck of where things lie in memory
    evaluator = TwiceTimed(holds)
    summary, recorder = tune(tmp_path, jobs(["fine"], tokens=(8, 4)), evaluator)
    default = Config("fine", 4)
    assert evaluator.asked == [(2, Config("fine", 2), default)] * 2
    assert (summary.confirmed, summary.unconfirmed) == ((2, 0) if holds else (0, 2))
    assert len(summary.decided) == 2
    for entry in entries(tmp_path):
        assert entry.verdict == ("tuned" if holds else "default")
        assert entry.config["num_warps"] == (2 if holds else 4)
        assert entry.default_us is not None
        assert entry.default_us.median == 2.0
        assert entry.time_us is not None
        assert entry.time_us.median == (1.0 if holds else 2.0)
    assert any("in a second process" in said for said in recorder.said) is not holds
    # Once is enough: the answer is recorded.
    again = TwiceTimed(not holds)
    tune(tmp_path, jobs(["fine"], tokens=(8, 4)), again)
    assert again.asked == []
    assert {entry.verdict for entry in entries(tmp_path)} == {"tuned" if holds else "default"}


def interrupted(folder: Path, **settings: Any) -> None:
    """A run that decided its problems and was stopped before it timed the gains again."""

    class Stopped(TwiceTimed):
        def renew(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(folder, jobs(["fine"], tokens=(8, 4)), Stopped(True), **settings)


def test_a_stopped_run_times_its_gains_again_later(tmp_path: Path) -> None:
    interrupted(tmp_path)
    assert [entry.verdict for entry in entries(tmp_path)] == ["tuned", "tuned"]
    evaluator = TwiceTimed(False)
    summary, _ = tune(tmp_path, jobs(["fine"], tokens=(8, 4)), evaluator)
    assert (summary.reused_problems, summary.unconfirmed, summary.trials) == (2, 2, 0)
    assert [entry.verdict for entry in entries(tmp_path)] == ["default", "default"]


def test_a_gain_that_cannot_be_timed_again_waits(tmp_path: Path) -> None:
    class Failing(TwiceTimed):
        renewed = 0

        def renew(self) -> None:
            super().renew()
            self.renewed += 1

        def confirms(self, config: Any, default: Any) -> bool:
            raise Refused("OutOfMemoryError: 1 MiB are free")

    failing = Failing(True)
    summary, recorder = tune(tmp_path, jobs(["fine"], tokens=(8, 4)), failing)
    assert failing.renewed == 3  # once for all, once more for each
    assert (summary.confirmed, summary.unconfirmed, summary.not_timed_again) == (0, 0, 2)
    assert any("could not be timed again: OutOfMemoryError" in said for said in recorder.said)
    assert {entry.verdict for entry in entries(tmp_path)} == {"default"}
    # It was not the gain's fault, so the next run asks again.
    summary, _ = tune(tmp_path, jobs(["fine"], tokens=(8, 4)), TwiceTimed(True))
    assert (summary.confirmed, summary.not_timed_again) == (2, 0)
    assert {entry.verdict for entry in entries(tmp_path)} == {"tuned"}


def test_a_worker_that_dies_confirms_nothing(tmp_path: Path) -> None:
    class Dying(TwiceTimed):
        def confirms(self, config: Any, default: Any) -> bool:
            return Measuring.confirms(self, config, default)

        def _finals(self, configs: Sequence[Any], stock: bool) -> list[list[float]]:
            raise WorkerDied("killed by SIGKILL")

    summary, recorder = tune(tmp_path, jobs(["fine"]), Dying(True))
    assert (summary.confirmed, summary.not_timed_again) == (0, 1)
    assert any("killed by SIGKILL" in said for said in recorder.said)


@pytest.mark.parametrize(
    ("found", "edited"),
    [
        ('"num_warps": 2}, "verdict"', '"num_warpz": 2}, "verdict"'),
        ('"num_warps": 2}, "verdict"', '"num_warps": 2.0}, "verdict"'),
        ('"problem": {"tokens": 8', '"problem": {"tokens": 4'),
        ('"default": {"fault": "fine", "num_warps": 4}', '"default": {"fault": "fine"}'),
        ('"run_name": "2', '"run_name": "x'),
    ],
)
def test_decisions_edited_by_hand_are_made_again(tmp_path: Path, found: str, edited: str) -> None:
    interrupted(tmp_path)
    journal = tmp_path / "state" / "trials.journal"
    lines = journal.read_text().splitlines()
    places = [number for number, line in enumerate(lines) if '"finals"' in line]
    first = places[0]
    compact = json.dumps(json.loads(lines[first]))
    assert found in compact
    lines[first] = compact.replace(found, edited)
    journal.write_text("\n".join(lines) + "\n")
    summary, _ = tune(tmp_path, jobs(["fine"], tokens=(8, 4)), TwiceTimed(True))
    again = 0 if "run_name" in found else 1
    assert summary.reused_problems == 2 - again
    assert len(summary.decided) == 2
    assert summary.confirmed == 2
    assert {entry.problem["tokens"] for entry in entries(tmp_path)} == {4, 8}


def test_another_tuner_s_decision_is_left_alone(tmp_path: Path) -> None:
    """Two tuners, one storage: the other finds that the gain is none while this one confirms it."""

    def other() -> None:
        evaluator = TwiceTimed(False)
        storage = open_storage(None, tmp_path / "state")
        options = Settings(tmp_path / "other", jobs=1)
        Tuner(A100, evaluator, storage, options, Recorder()).run(jobs(["fine"]))
        evaluator.close()

    class First(TwiceTimed):
        def confirms(self, config: Any, default: Any) -> bool:
            other()
            return super().confirms(config, default)

    tune(tmp_path, jobs(["fine"]), First(True))
    summary, _ = tune(tmp_path, jobs(["fine"]), TwiceTimed(True))
    assert (summary.reused_problems, summary.confirmed) == (1, 0)
    (entry,) = entries(tmp_path)
    assert entry.verdict == "default"


def test_gains_not_timed_again_wait_for_the_next_run(tmp_path: Path) -> None:
    hours = iter(range(1000))
    storage = open_storage(None, tmp_path / "state")
    for budget, timed in ((1.0, 0), (3600.0 * 1000, 1)):
        evaluator, recorder = TwiceTimed(True), Recorder()
        settings = Settings(tmp_path / "out", jobs=1, seconds=budget)
        tuner = Tuner(A100, evaluator, storage, settings, recorder, clock=lambda: next(hours))
        try:
            if not timed:
                # All of the time is over when the search of the only problem begins.
                tuner.clock = iter([0.0, 0.0, *[2.0] * 1000]).__next__
            summary = tuner.run(jobs(["fine"]))
        finally:
            evaluator.close()
        assert (len(evaluator.asked), summary.not_timed_again) == (timed, 1 - timed)


def test_more_trials_search_further(tmp_path: Path) -> None:
    tune(tmp_path, jobs(["fine"]), trials=2)
    summary, _ = tune(tmp_path, jobs(["fine"]), trials=3)
    assert (summary.reused_problems, summary.reused_trials, summary.trials) == (0, 2, 1)


def test_a_spent_budget_says_what_is_left(tmp_path: Path) -> None:
    summary, _ = tune(tmp_path, jobs(["fine"], tokens=(8, 4)), seconds=1e-9)
    assert (summary.left, summary.trials) == (2, 0)


def test_predictions_are_marked_and_never_replace_measurements(tmp_path: Path) -> None:
    tune(tmp_path, jobs(["fine"]))
    measured = entries(tmp_path)
    summary, _ = tune(tmp_path, jobs(["fine"], tokens=(4, 8)), Predicting(A100))
    assert len(summary.decided) == 2
    table = read_table(table_path(tmp_path / "out", A100.name, "double"))
    kept, new = table.entries
    assert kept == measured[0]
    assert table.runs[new.run].provenance == "predicted"
    assert table.runs[new.run].device.driver is None
    assert new.time_us is None
    assert new.predicted_us is not None


TUNER = """
import sys
from pathlib import Path
from test_run import jobs, tune
summary, recorder = tune(Path(sys.argv[1]), jobs(["fine"], tokens=[int(t) for t in sys.argv[2:]]))
print(summary.trials, summary.reused_trials, summary.reused_problems)
"""


def start(folder: Path, *tokens: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TUNER, str(folder), *map(str, tokens)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(journal: Path) -> int:
    return journal.read_bytes().count(b"outcome") if journal.exists() else 0


def test_kill_9_loses_at_most_the_trial_in_flight(tmp_path: Path) -> None:
    tokens = (64, 32, 16, 8, 4, 2)
    process = start(tmp_path, *tokens)
    journal = tmp_path / "state" / "trials.journal"
    deadline = time.monotonic() + 120
    while lines_of(journal) < 5 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    recorded = lines_of(journal)
    assert recorded >= 5
    # What a kill in mid-write leaves behind.
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    # Tables written before the kill are whole.
    for path in (tmp_path / "out").rglob("*.json"):
        read_table(path)
    summary, _ = tune(tmp_path, jobs(["fine"], tokens=tokens))
    assert summary.reused_trials == recorded
    assert summary.trials == 18 - recorded
    assert len(entries(tmp_path)) == 6


def test_two_tuners_on_one_folder_lose_nothing(tmp_path: Path) -> None:
    both = [start(tmp_path, 64, 32, 16), start(tmp_path, 3, 2, 1)]
    for process in both:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert output.split() == ["9", "0", "0"]
    assert sorted(e.problem["tokens"] for e in entries(tmp_path)) == [1, 2, 3, 16, 32, 64]
    summary, _ = tune(tmp_path, jobs(["fine"], tokens=(64, 32, 16, 3, 2, 1)))
    assert (summary.trials, summary.reused_problems) == (0, 6)


def test_a_broken_table_is_moved_aside(tmp_path: Path) -> None:
    path = table_path(tmp_path / "out", A100.name, "double")
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 1, "entries": [')
    _, recorder = tune(tmp_path, jobs(["fine"]))
    assert len(entries(tmp_path)) == 1
    (aside,) = path.parent.glob("*.broken-*")
    assert aside.read_text() == '{"schema": 1, "entries": ['
    assert any("moved aside" in message for message in recorder.said)


def test_interrupted_tuner_leaves_no_worker(tmp_path: Path) -> None:
    process = start(tmp_path, 64, 32, 16, 8)
    journal = tmp_path / "state" / "trials.journal"
    deadline = time.monotonic() + 120
    while lines_of(journal) < 1 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    children = descendants(process.pid)
    assert children
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if alive(child)]


def descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_outcomes_round_trip() -> None:
    outcome = Outcome(Config("fine", 4), Status.OK, "", 1.5, 0.1, 1.2, 0.01, {"registers": 8})
    again = Outcome.from_dict(outcome.config, json.loads(json.dumps(outcome.to_dict())))
    assert again == outcome
