"""Tables on disk: naming, round trip, merging, several writers, killed writers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuned_configs import (
    Device,
    Entry,
    Predicted,
    Run,
    Table,
    TableError,
    TableSet,
    Timing,
    folder_name,
    make_table,
    read_table,
    table_path,
    update_table,
    write_table,
)
from tuned_configs.files import STALE_SECONDS
from tuned_configs.store import table_text

DEVICE = "NVIDIA H200"
REPOSITORY = Path(__file__).parents[1]


def make_run(provenance: str = "measured", device: str = DEVICE, **changes: Any) -> Run:
    gpu = Device(
        name=device,
        capability=[9, 0],
        sms=132,
        memory_bytes=150_000_000_000,
        driver="580.65" if provenance == "measured" else None,
    )
    fields: dict[str, Any] = {
        "provenance": provenance,
        "device": gpu,
        "gemma_tune": "0.1.0",
        "triton": "3.7.0",
        "torch": "2.13.0",
        "python": "3.11.9",
        "finished_at": "2026-01-31T23:59:00Z",
    }
    return Run(**{**fields, **changes})


def make_entry(
    tokens: int | None = 16,
    warps: int = 4,
    run: str = "r",
    predicted: bool = False,
    source_hash: str = "abc",
    **problem: Any,
) -> Entry:
    fields: dict[str, Any] = {"hidden": 1536, **problem}
    if tokens is not None:
        fields["tokens"] = tokens
    figures: dict[str, Any] = {
        "time_us": Timing(median=10, spread=0.1),
        "default_us": Timing(median=12, spread=0.1),
    }
    if predicted:
        figures = {"predicted_us": Predicted(config=10, default=12)}
    return Entry(
        problem=fields,
        config={"num_warps": warps},
        verdict="tuned",
        trials=3,
        rejected={"spills": 1},
        models=["e2b"],
        source_hash=source_hash,
        run=run,
        **figures,
    )


def table_of(*entries: Entry, run: Run | None = None, template: str = "residual_norm") -> Table:
    return make_table(template, "r", run or make_run(), entries)


def without_line_of(text: str, part: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if part not in line)


def test_light_import() -> None:
    code = (
        "import sys, tuned_configs; "
        "print(sorted({'torch', 'triton', 'optuna', 'numpy', 'vllm'} & set(sys.modules)))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True)
    assert output.strip() == "[]"


# Naming


@pytest.mark.parametrize(
    ("device", "folder"),
    [
        ("NVIDIA H200", "NVIDIA_H200"),
        (" NVIDIA A100-SXM4-80GB ", "NVIDIA_A100-SXM4-80GB"),
        ("NVIDIA H200 MIG 1g.18gb", "NVIDIA_H200_MIG_1g.18gb"),
        ("../../etc/passwd", "_._.._etc_passwd"),
        (".hidden", "_hidden"),
    ],
)
def test_folder_name(device: str, folder: str) -> None:
    assert folder_name(device) == folder
    assert table_path("/t", device, "ple") == Path("/t") / folder / "ple.json"


@pytest.mark.parametrize("device", ["", "  ", "..", "/"])
def test_folder_name_refuses_what_names_nothing(device: str) -> None:
    with pytest.raises(ValueError, match="no letter or digit"):
        folder_name(device)


# Writing


def test_written_text_is_sorted_and_line_friendly(tmp_path: Path) -> None:
    path = table_path(tmp_path, DEVICE, "residual_norm")
    entries = [make_entry(16), make_entry(8), make_entry(100), make_entry(4, hidden=200)]
    write_table(path, table_of(*entries))
    text = path.read_text()
    assert text.endswith("]\n}\n")
    rows = [
        json.loads(line.strip().rstrip(",")) for line in text.splitlines() if '"problem"' in line
    ]
    assert [row["problem"]["tokens"] for row in rows] == [4, 8, 16, 100]
    assert "null" not in "".join(line for line in text.splitlines() if '"problem"' in line)
    write_table(path, table_of(*reversed(entries)))
    assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert os.listdir(path.parent) == ["residual_norm.json"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_one_changed_entry_changes_one_line(tmp_path: Path) -> None:
    counts = range(1, 20)
    old = table_text(table_of(*(make_entry(count) for count in counts))).splitlines()
    new = [make_entry(count, warps=8 if count == 7 else 4) for count in counts]
    changed = zip(old, table_text(table_of(*new)).splitlines(), strict=True)
    assert sum(a != b for a, b in changed) == 1


def test_unreadable_tables_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "residual_norm.json"
    write_table(path, table_of(make_entry(16)))
    before = path.read_text()
    broken = table_of(make_entry(16))
    broken.entries[0].config["num_warps"] = "4"  # models are frozen, their dicts are not
    with pytest.raises(TableError, match="num_warps"):
        write_table(path, broken)
    assert path.read_text() == before


_names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda n: n != "tokens")
_words = st.sampled_from(["bfloat16", "fp8", "é", 'quo"te', "a\\b", "[1", "{", "line\nend"])
_scalars = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    _words,
)
_fields = st.dictionaries(_names, st.one_of(_scalars, st.lists(_scalars, max_size=3)), max_size=4)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    provenance = draw(st.sampled_from(["measured", "predicted"]))
    problems: dict[str, dict[str, Any]] = {}
    for rest in draw(st.lists(_fields, max_size=4)):
        for tokens in draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=4)):
            problems.setdefault(str(tokens), {**rest, "tokens": tokens})
    entries = []
    for problem in problems.values():
        base = make_entry(predicted=provenance == "predicted")
        config = {"num_warps": 4, **draw(_fields)}
        entries.append(base.model_copy(update={"problem": problem, "config": config}))
    return table_of(*entries, run=make_run(provenance))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(table=tables(), data=st.data())
def test_round_trip(tmp_path: Path, table: Table, data: st.DataObject) -> None:
    path = tmp_path / "residual_norm.json"
    write_table(path, table)
    back = read_table(path)
    assert sorted(map(str, back.entries)) == sorted(
        str(e.model_copy(update={"problem": dict(sorted(e.problem.items())),
                                 "config": dict(sorted(e.config.items()))}))
        for e in table.entries
    )  # fmt: skip
    assert back.runs == table.runs
    text = path.read_text(encoding="utf-8")
    shuffled = data.draw(st.permutations(table.entries))
    assert table_text(table.model_copy(update={"entries": shuffled})) == text
    assert table_text(back) == text


# Merging


def test_update_replaces_the_same_problem_only(tmp_path: Path) -> None:
    first = update_table(tmp_path, table_of(make_entry(8), make_entry(16)))
    assert (first.added, first.replaced, first.kept, first.warnings) == (2, 0, 0, ())
    second = update_table(tmp_path, table_of(make_entry(16, warps=8), make_entry(32)))
    assert (second.added, second.replaced, second.kept) == (1, 1, 0)
    table = read_table(second.path)
    assert table == second.table
    found = {entry.problem["tokens"]: entry.config["num_warps"] for entry in table.entries}
    assert found == {8: 4, 16: 8, 32: 4}


def test_predicted_never_replaces_measured(tmp_path: Path) -> None:
    update_table(tmp_path, table_of(make_entry(8)))
    offered = [make_entry(8, warps=2, predicted=True), make_entry(16, warps=2, predicted=True)]
    update = update_table(tmp_path, table_of(*offered, run=make_run("predicted")))
    assert (update.added, update.replaced, update.kept) == (1, 0, 1)
    entries = {entry.problem["tokens"]: entry for entry in update.table.entries}
    assert entries[8].config == {"num_warps": 4}
    # Both runs were named "r": the second has another name, each entry its own provenance.
    provenance = {t: update.table.runs[e.run].provenance for t, e in entries.items()}
    assert provenance == {8: "measured", 16: "predicted"}
    update = update_table(tmp_path, table_of(make_entry(16, warps=1)))
    assert (update.added, update.replaced) == (0, 1)
    assert set(update.table.runs) == {"r"}  # nothing refers to the predicted run any more


def test_predicted_only_keeps_nothing_it_did_not_add(tmp_path: Path) -> None:
    update_table(tmp_path, table_of(make_entry(8)))
    predicted = table_of(make_entry(8, predicted=True), run=make_run("predicted"))
    update = update_table(tmp_path, predicted)
    assert (update.added, update.replaced, update.kept) == (0, 0, 1)
    assert [run.provenance for run in update.table.runs.values()] == ["measured"]


def test_a_session_that_saves_often_is_one_run(tmp_path: Path) -> None:  # case 16
    early, late = "2026-01-31T10:00:00Z", "2026-01-31T11:00:00Z"
    for tokens, finished_at in ((8, early), (16, late), (32, early)):
        update = update_table(
            tmp_path, table_of(make_entry(tokens), run=make_run(finished_at=finished_at))
        )
    assert {name: run.finished_at for name, run in update.table.runs.items()} == {"r": late}
    assert len(update.table.entries) == 3


def test_nothing_found_writes_nothing(tmp_path: Path) -> None:  # case 16
    update = update_table(tmp_path, table_of())
    assert not update.path.exists()
    update_table(tmp_path, table_of(make_entry(8)))
    before = update.path.read_text()
    update = update_table(tmp_path, table_of())
    assert update.path.read_text() == before
    assert len(update.table.entries) == 1


@pytest.mark.parametrize("kind", ["text", "folder", "other device", "newer"])
def test_broken_files_are_moved_aside(tmp_path: Path, kind: str) -> None:  # case 9
    path = table_path(tmp_path, DEVICE, "residual_norm")
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "other device":
        other = make_run(device="NVIDIA H100 80GB HBM3")
        write_table(path, table_of(make_entry(8), run=other))
    else:
        path.write_text("{" if kind == "text" else '{"schema": 9}')
    for count in (1, 2):
        update = update_table(tmp_path, table_of(make_entry(16)))
        (warning,) = update.warnings
        assert str(path) in warning
        assert "moved aside to residual_norm.json.broken-20" in warning
        assert len(read_table(path).entries) == 1
        asides = list(path.parent.glob("residual_norm.json.broken-*Z*"))
        assert len(asides) == count
        path.write_text("{")
    tables = TableSet.load(tmp_path, DEVICE)
    assert len(tables.faults) == 1  # the file just broken, not those aside


def test_disk_faults_are_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "t.json", table_of(make_entry(8)))
    before = (tmp_path / "t.json").read_text()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TableError, match=r"t\.json: cannot be written: No space left on device"):
        write_table(tmp_path / "t.json", table_of(make_entry(16)))
    assert (tmp_path / "t.json").read_text() == before
    assert os.listdir(tmp_path) == ["t.json"]
    with pytest.raises(TableError, match="cannot be written"):
        update_table(tmp_path / "t.json", table_of(make_entry(16)))  # the root is a file


# Several processes


def _write_many(root: str, first: int, count: int) -> None:
    for tokens in range(first, first + count):
        run = make_run(python=f"3.11.{first}")
        update_table(root, table_of(make_entry(tokens), run=run))


def test_two_tuners_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_write_many, args=(str(tmp_path), first, 20)) for first in (1, 101)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    table = read_table(table_path(tmp_path, DEVICE, "residual_norm"))
    tokens = [entry.problem["tokens"] for entry in table.entries]
    assert tokens == [*range(1, 21), *range(101, 121)]
    for entry in table.entries:  # each still says where it comes from
        expected = "3.11.1" if entry.problem["tokens"] < 100 else "3.11.101"
        assert table.runs[entry.run].python == expected


def _stop_before_rename(root: str, ready: Any) -> None:
    def stop(_: int) -> None:
        ready.set()
        time.sleep(600)

    os.fsync = stop  # type: ignore[assignment]
    update_table(root, table_of(make_entry(16)))


def test_a_writer_killed_in_mid_write_harms_nothing(tmp_path: Path) -> None:  # case 9
    path = update_table(tmp_path, table_of(make_entry(8))).path
    before = path.read_bytes()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    writer = context.Process(target=_stop_before_rename, args=(str(tmp_path), ready), daemon=True)
    writer.start()
    assert ready.wait(60)
    with pytest.raises(TableError, match="held by another gemma-tune"):
        update_table(tmp_path, table_of(make_entry(32)), lock_seconds=0.1)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(60)
    assert path.read_bytes() == before
    (leftover,) = path.parent.glob("*.tmp")
    assert TableSet.load(tmp_path, DEVICE).faults == ()
    update_table(tmp_path, table_of(make_entry(32)))
    assert leftover.exists()  # young: it could belong to a living writer
    old = time.time() - 2 * STALE_SECONDS
    os.utime(leftover, (old, old))
    update = update_table(tmp_path, table_of(make_entry(64)))
    assert not leftover.exists()
    assert [entry.problem["tokens"] for entry in update.table.entries] == [8, 32, 64]


@pytest.mark.slow
def test_writers_killed_at_random_leave_whole_tables(tmp_path: Path) -> None:  # case 9
    path = update_table(tmp_path, table_of(make_entry(1))).path
    context = multiprocessing.get_context("spawn")
    chance = random.Random(9)
    for first in (100, 1100, 2100, 3100):
        args = (str(tmp_path), first, 900)
        writer = context.Process(target=_write_many, args=args, daemon=True)
        writer.start()
        before = path.stat().st_mtime_ns
        deadline = time.monotonic() + 60
        while path.stat().st_mtime_ns == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.random() / 2)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(60)
        tokens = [entry.problem["tokens"] for entry in read_table(path).entries]
        mine = [count for count in tokens if count >= first]
        assert mine == list(range(first, first + len(mine)))
        assert mine


def test_written_tables_are_found_from_a_fresh_process(tmp_path: Path) -> None:
    update_table(tmp_path, table_of(make_entry(8, warps=2)))
    code = (
        "import sys; from tuned_configs import TableSet; "
        "tables = TableSet.load(sys.argv[1], 'NVIDIA H200'); "
        "match = tables.lookup('residual_norm', {'tokens': 8, 'hidden': 1536}, 'abc'); "
        "print(match.config, match.exact)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    output = subprocess.check_output(command, cwd=REPOSITORY, text=True)
    assert output.strip() == "{'num_warps': 2} True"
