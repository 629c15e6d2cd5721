"""Confirmation under scripted times, real faults, interruption and a second run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from faulty_template import A100, TEMPLATE, Config, Problem
from typer.testing import CliRunner

from kernel_templates.base import record_to_dict
from tuned_configs import TableSet
from tuned_configs.schema import Device, Entry, Predicted, Run
from tuned_configs.store import make_table, read_table, table_path, write_table
from tuner import cli, confirm_command
from tuner.confirm import Confirmed, Confirmer, Fate, predictions
from tuner.device import ProbeResult
from tuner.evaluate import Limits, Measuring, Refused
from tuner.trial import Outcome, Status

FINE = TEMPLATE.default(Problem(4), A100)
OTHER = dataclasses.replace(FINE, num_warps=2 * FINE.num_warps)
KERNELS = {TEMPLATE.name: TEMPLATE}


def predict(root: Path, configs: dict[int, Any], source: str = TEMPLATE.source_hash) -> None:
    run = Run(
        provenance="predicted",
        device=Device(name=A100.name, capability=[8, 0], sms=108, memory_bytes=1, driver=None),
        gemma_tune="0.1.0", triton=None, torch=None, python=None,
        finished_at="2026-12-01T00:00:00Z",
    )  # fmt: skip
    entries = [
        Entry(
            problem=record_to_dict(Problem(tokens)), config=record_to_dict(config),
            verdict="tuned", predicted_us=Predicted(config=1.0, default=2.0), trials=3,
            rejected={}, models=["m"], source_hash=source, run="p",
        )
        for tokens, config in configs.items()
    ]  # fmt: skip
    write_table(table_path(root, A100.name, "double"), make_table("double", "p", run, entries))


class Compiled:
    """A pool in which everything compiles at once."""

    def submit(self, template: Any, problem: Any, config: Any) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        future.set_result([])
        return future


class Scripted:
    """A judge whose times (in us: by config, and stock's) and outcomes are given."""

    mode = "measured"

    def __init__(
        self, times: dict[Any, float], stock: float | Exception = 3.0, bad: dict[Any, Status] | None = None
    ) -> None:  # fmt: skip
        self.times, self.stock, self.bad = times, stock, bad or {}
        self.opened: list[int] = []

    def versions(self) -> dict[str, str]:
        return {"torch": "1", "triton": "1", "python": "3"}

    def open(self, template: Any, problem: Any) -> None:
        self.opened.append(problem.tokens)

    def evaluate(self, config: Any, resources: Any) -> Outcome:
        if config in self.bad:
            return Outcome(config, self.bad[config], "a reason")
        return Outcome(config, Status.OK, "", self.times[config], 0.0, 0.5, 0.001)

    def beside_stock(self, configs: Sequence[Any]) -> list[list[float]]:
        if isinstance(self.stock, Exception):
            raise self.stock
        every = [*(self.times[config] for config in configs), self.stock]
        return [[time * (1 + 0.001 * (n % 3)) for n in range(15)] for time in every]

    def company(self) -> list[str]:
        return []


def confirm(root: Path, judge: Any, seconds: float | None = None, **more: Any) -> Confirmed:
    tables = TableSet.load([root / "in", root / "out"], A100.name, measured_only=False)
    confirmer = Confirmer(A100, judge, root / "out", seconds, **more)
    return confirmer.run(predictions(tables, (), KERNELS), Compiled())


def written(root: Path) -> list[Entry]:
    path = table_path(root / "out", A100.name, "double")
    return read_table(path).entries if path.exists() else []


@pytest.mark.parametrize(
    ("times", "stock", "fate", "config"),
    [
        ((1.0, 2.0), 3.0, Fate.HELD, OTHER),
        ((1.0, 2.0), 1.0, Fate.HELD, OTHER),  # no slower than stock is enough
        ((2.0, 2.0), 3.0, Fate.DEFAULT, FINE),
        ((2.5, 2.0), 3.0, Fate.DEFAULT, FINE),
        ((1.0, 2.0), 0.5, Fate.SLOWER, OTHER),
        ((2.5, 2.0), 1.0, Fate.SLOWER, FINE),
    ],
)
def test_fates(
    tmp_path: Path, times: tuple[float, float], stock: float, fate: Fate, config: Config
) -> None:
    predict(tmp_path / "in", {4: OTHER})
    done = confirm(tmp_path, Scripted({OTHER: times[0], FINE: times[1]}, stock))
    assert [result.fate for result in done.results] == [fate]
    (entry,) = written(tmp_path)
    # Slower ones are written with their true times: the plugin's average must know of them.
    assert entry.config == record_to_dict(config)
    assert entry.verdict == ("tuned" if config == OTHER else "default")
    assert entry.time_us and entry.stock_us and entry.predicted_us is None
    assert entry.time_us.median == pytest.approx(times[config == FINE], rel=0.01)
    assert entry.stock_us.median == pytest.approx(stock, rel=0.01)
    table = read_table(table_path(tmp_path / "out", A100.name, "double"))
    assert {run.provenance for run in table.runs.values()} == {"measured"}


def test_wrong_prediction_leaves_the_default(tmp_path: Path) -> None:
    predict(tmp_path / "in", {4: OTHER})
    done = confirm(tmp_path, Scripted({FINE: 2.0}, bad={OTHER: Status.WRONG}))
    assert [result.fate for result in done.results] == [Fate.DEFAULT]
    (entry,) = written(tmp_path)
    assert (entry.config, entry.rejected) == (record_to_dict(FINE), {"wrong result": 1})


@pytest.mark.parametrize(
    ("status", "fate"), [(Status.WRONG, Fate.WRONG), (Status.CRASHED, Fate.CRASHED)]
)
def test_nothing_fit_is_rejected_and_remembered(tmp_path: Path, status: Status, fate: Fate) -> None:
    predict(tmp_path / "in", {4: OTHER})
    done = confirm(tmp_path, Scripted({}, bad={OTHER: status, FINE: status}))
    assert [(result.fate, result.reason) for result in done.results] == [(fate, "a reason")]
    assert written(tmp_path) == []
    again = Scripted({})
    done = confirm(tmp_path, again)
    assert (done.results, done.remembered, again.opened) == ([], 1, [])
    # Another driver, Triton or torch may do better.
    newer = Scripted({OTHER: 1.0, FINE: 2.0})
    newer.versions = lambda: {"torch": "1", "triton": "2", "python": "3"}  # type: ignore[method-assign]
    assert confirm(tmp_path, newer).count(Fate.HELD) == 1


def test_no_stock_peer_decides_nothing(tmp_path: Path) -> None:
    predict(tmp_path / "in", {4: OTHER})
    done = confirm(tmp_path, Scripted({OTHER: 1.0, FINE: 2.0}, Refused("no compiler")))
    assert [result.fate for result in done.results] == [Fate.UNDECIDED]
    assert written(tmp_path) == []
    # It is tried again: the fault may not be the prediction's.
    assert confirm(tmp_path, Scripted({OTHER: 1.0, FINE: 2.0})).count(Fate.HELD) == 1


def test_second_run_finds_nothing_to_do(tmp_path: Path) -> None:
    predict(tmp_path / "in", {4: OTHER, 8: OTHER})
    judge = Scripted({OTHER: 1.0, FINE: 2.0})
    assert confirm(tmp_path, judge).count(Fate.HELD) == 2
    again = Scripted({})
    assert confirm(tmp_path, again).results == []
    assert again.opened == []


def test_time_limit_leaves_the_rest_and_the_next_run_goes_on(tmp_path: Path) -> None:
    counts = [1, 2, 4, 8, 16]
    predict(tmp_path / "in", dict.fromkeys(counts, OTHER))
    now = iter(range(100))
    judge = Scripted({OTHER: 1.0, FINE: 2.0})
    done = confirm(tmp_path, judge, seconds=2.5, clock=lambda: float(next(now)))
    # The ends first, so that what is confirmed reaches every count between them.
    assert judge.opened == [16, 1, 4][: len(done.results)]
    assert done.left == len(counts) - len(done.results) > 0
    assert len(written(tmp_path)) == len(done.results) > 0
    rest = confirm(tmp_path, Scripted({OTHER: 1.0, FINE: 2.0}))
    assert len(rest.results) == done.left
    assert len(written(tmp_path)) == len(counts)


def test_interruption_loses_one_trial_at_most(tmp_path: Path) -> None:
    predict(tmp_path / "in", dict.fromkeys([1, 2, 4], OTHER))

    def interrupt(result: Any, number: int, total: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        confirm(tmp_path, Scripted({OTHER: 1.0, FINE: 2.0}), say=interrupt)
    assert len(written(tmp_path)) == 2


def test_entries_of_another_kernel_source_are_left_alone(tmp_path: Path) -> None:
    predict(tmp_path / "in", {4: OTHER}, source="another")
    assert confirm(tmp_path, Scripted({})).results == []


def test_real_faults_in_a_real_worker(tmp_path: Path) -> None:
    # case 15, in confirmation: the worker dies, hangs and computes wrong results
    faults = {4: "fine", 8: "crash", 16: "wrong", 32: "sticky"}
    configs = {tokens: Config(fault, FINE.num_warps) for tokens, fault in faults.items()}
    predict(tmp_path / "in", configs)
    limits = Limits(trial_seconds=6.0, rounds=3)
    judge = Measuring({"device": "cpu"}, limits=limits)
    # On the host clock there is no stock peer but the default itself.
    judge.beside_stock = lambda each: [*judge._finals(each, False), [1e9] * 3]  # type: ignore[method-assign]
    try:
        done = confirm(tmp_path, judge)
    finally:
        judge.close()
    fates = {each.prediction.problem.tokens: each for each in done.results}
    assert fates[4].fate is Fate.HELD
    assert {fates[n].fate for n in (8, 16, 32)} == {Fate.DEFAULT}
    assert "SIGSEGV" in fates[8].reason
    assert "illegal memory access" in fates[32].reason
    assert {entry.config["fault"] for entry in written(tmp_path)} == {"fine"}


def test_command_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirm_command, "probe", lambda: ProbeResult(reason="the test has none"))
    found = CliRunner().invoke(cli.app, ["confirm", "--model", "e2b"])
    assert found.exit_code == 3, found.output
    assert CliRunner().invoke(cli.app, ["confirm", "--budget", "soon"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["confirm", "--model", "e9b"]).exit_code == 2


def test_command_with_nothing_to_confirm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = dataclasses.replace(A100, attached=True)
    monkeypatch.setattr(confirm_command, "probe", lambda: ProbeResult((device,)))
    (tmp_path / "in").mkdir()
    words = ["confirm", "--configs", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(cli.app, words)
    assert found.exit_code == 1
    assert "nothing to confirm" in found.output
