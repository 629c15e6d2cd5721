"""Which config to launch with: look-up in the tables of one GPU, on plain Python values.

One field of a problem, ``tokens``, is rounded to the nearest tuned count; the others must match
exactly.  A GPU uses the tables in the folder of its own driver name and no other: a MIG slice or a
sister model never borrows.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .faults import TableError
from .keys import BUCKET, problem_key
from .naming import folder_name
from .schema import Entry, Run, Table
from .store import read_table

#: A token count farther than this factor outside the tuned range gets the default config.
REACH = 4

_log = logging.getLogger("gemma_tune.tuned_configs")


@dataclass(frozen=True)
class Match:
    """A look-up's answer.  ``tokens`` is the tuned count (None for a problem without tokens),
    ``exact`` whether it is the one asked for, ``path`` the table's file."""

    config: dict[str, Any]
    entry: Entry
    run: Run
    path: Path
    exact: bool
    tokens: int | None
    reason: str


@dataclass(frozen=True)
class Loaded:
    """A table in use."""

    path: Path
    table: Table


@dataclass(frozen=True)
class _Row:
    tokens: int | None
    entry: Entry
    run: Run
    path: Path


class TableSet:
    """All usable tables of one GPU.  Make one with :meth:`load`.

    ``faults`` holds one message per table that could not be used, ``tables`` those in use,
    ``folders`` where was looked, ``reasons`` what :meth:`lookup` has said.
    """

    def __init__(
        self,
        device_name: str,
        folders: Iterable[Path],
        tables: Iterable[Loaded],
        faults: Iterable[str] = (),
        measured_only: bool = True,
        on_reason: Callable[[str], None] = _log.warning,
    ) -> None:
        self.device_name = device_name
        self.folders = tuple(folders)
        self.tables = tuple(tables)
        self.faults = tuple(faults)
        self.measured_only = measured_only
        self.reasons: list[str] = []
        self._on_reason = on_reason
        self._said: set[Any] = set()
        self._kinds = _rows_by_kind(self.tables, measured_only)
        self._templates = {loaded.table.template for loaded in self.tables}

    @classmethod
    def load(
        cls,
        root: Path | str | Iterable[Path | str],
        device_name: str,
        measured_only: bool = True,
        on_reason: Callable[[str], None] = _log.warning,
    ) -> TableSet:
        """Read the tables of a GPU under one root or several, the later roots preferred.

        Never raises for what it finds there: a table that cannot be used becomes a fault, and the
        others are used.  ``on_reason`` is told, once per kind of problem, why a look-up failed.
        """
        roots = [root] if isinstance(root, (str, Path)) else list(root)
        faults: list[str] = []
        try:
            folders = [Path(each) / folder_name(device_name) for each in roots]
        except ValueError as error:
            return cls(device_name, [], [], [str(error)], measured_only, on_reason)
        tables: list[Loaded] = []
        for folder in folders:
            for path in _table_files(folder, faults):
                try:
                    tables.append(Loaded(path, _read_of_device(path, device_name)))
                except TableError as error:
                    faults.append(f"{error}; not used, other tables are")
        return cls(device_name, folders, tables, faults, measured_only, on_reason)

    def lookup(
        self, template: str, problem: Mapping[str, Any], source_hash: str | None = None
    ) -> Match | None:
        """The tuned config for a problem, or None: take the default.

        ``source_hash`` is that of the running template: entries tuned for another kernel are not
        used.  Why there is none is said once per kind of problem.
        """
        match, reason, topic = self._find(template, problem, source_hash)
        if match is None:
            said = (template, problem_key(problem, without=BUCKET), topic)
            if said not in self._said:
                self._said.add(said)
                self.reasons.append(reason)
                self._on_reason(reason)
        return match

    def explain(
        self, template: str, problem: Mapping[str, Any], source_hash: str | None = None
    ) -> str:
        """Why :meth:`lookup` answers what it does; says nothing to ``on_reason``."""
        return self._find(template, problem, source_hash)[1]

    def version_notes(self, running: Mapping[str, Any]) -> list[str]:
        """:func:`version_notes` of every table in use, each with its file; unused runs left out."""
        return [
            f"{loaded.path}: {note}"
            for loaded in self.tables
            for note in version_notes(self._used_part(loaded.table), running)
        ]

    def _used_part(self, table: Table) -> Table:
        if not self.measured_only:
            return table
        runs = {name: run for name, run in table.runs.items() if run.provenance == "measured"}
        return table.model_copy(update={"runs": runs})

    def _find(
        self, template: str, problem: Mapping[str, Any], source_hash: str | None
    ) -> tuple[Match | None, str, str]:
        """The match, why, and the topic of the reason if there is none."""
        rows = self._kinds.get((template, problem_key(problem, without=BUCKET)))
        if rows is None:
            return None, f"{self._nothing_for(template, problem)}; default used", "absent"
        if source_hash is not None:
            usable = [row for row in rows if row.entry.source_hash == source_hash]
            if not usable:
                others = ", ".join(sorted({row.entry.source_hash for row in rows}))
                reason = (
                    f"{template}: tuned for another kernel source ({others}) than the running one "
                    f"({source_hash}); default used, tune again"
                )
                return None, reason, "source"
            rows = usable
        return _nearest(template, rows, problem.get(BUCKET))

    def _nothing_for(self, template: str, problem: Mapping[str, Any]) -> str:
        if template in self._templates:
            rest = {name: value for name, value in problem.items() if name != BUCKET}
            kind = "measured entry" if self.measured_only else "entry"
            return f"{template}: no {kind} for {rest} on {self.device_name}"
        if not self.folders:
            return f"{template}: no folder of tables to search for {self.device_name!r}"
        wanted = f"{self.folders[0].name}/{template}.json"
        searched = ", ".join(str(folder.parent) for folder in self.folders)
        return (
            f"{template}: no usable table {wanted} in {searched}; "
            "`gemma-tune` on this GPU would make one"
        )


def version_notes(table: Table, running: Mapping[str, Any]) -> list[str]:
    """How the stamps of a table differ from what is running, for a person to read.

    ``running`` has keys ``triton``, ``torch``, ``driver``, ``gpu`` and ``sms``; one that is absent
    or None is unknown.  An empty list means that everything is known and equal.
    """
    notes: list[str] = []
    for name, run in sorted(table.runs.items()):
        stamps = {
            "triton": ("Triton", run.triton),
            "torch": ("torch", run.torch),
            "driver": ("driver", run.device.driver),
            "gpu": ("GPU", run.device.name),
            "sms": ("SM count", run.device.sms),
        }
        for key, (label, stamp) in stamps.items():
            now = running.get(key)
            if stamp is None or now is None:
                missing = " and ".join(
                    side for side, value in (("table", stamp), ("running", now)) if value is None
                )
                notes.append(
                    f"{table.template}, run {name}: {label} unknown ({missing}), cannot compare"
                )
            elif stamp != now:
                notes.append(
                    f"{table.template}, run {name}: tuned with {label} {stamp}, {now} is running; "
                    "its configs may no longer be the fastest, check with `gemma-tune confirm`"
                )
    return notes


def _table_files(folder: Path, faults: list[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if _is_table_name(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        faults.append(f"{folder}: cannot be searched: {error.strerror or error}")
        return []


def _is_table_name(name: str) -> bool:
    # vLLM's own fused-MoE tables lie in the same folder: see ``vllm_moe``.
    return name.endswith(".json") and not name.startswith((".", "E="))


def _read_of_device(path: Path, device_name: str) -> Table:
    table = read_table(path)
    if table.device != device_name:
        raise TableError(path, f"device: found {table.device!r}, wanted {device_name!r}")
    if table.template != path.stem:
        raise TableError(path, f"template: found {table.template!r}, wanted {path.stem!r}")
    return table


def _rows_by_kind(tables: Iterable[Loaded], measured_only: bool) -> dict[Any, list[_Row]]:
    """Rows of each (template, problem without tokens), by tokens, the preferred ones first.

    Measured before predicted, then later tables before earlier ones.
    """
    kinds: dict[Any, list[_Row]] = {}
    for loaded in reversed(list(tables)):
        for entry in loaded.table.entries:
            run = loaded.table.runs[entry.run]
            if measured_only and run.provenance != "measured":
                continue
            kind = (loaded.table.template, problem_key(entry.problem, without=BUCKET))
            row = _Row(entry.problem.get(BUCKET), entry, run, loaded.path)
            kinds.setdefault(kind, []).append(row)
    for rows in kinds.values():  # stable: the order of tables stays within equal keys
        rows.sort(key=lambda row: (row.tokens or 0, row.run.provenance != "measured"))
    return kinds


def _nearest(template: str, rows: list[_Row], tokens: int | None) -> tuple[Match | None, str, str]:
    """The row of the nearest token count in log scale; ties go up."""
    if tokens is None:
        plain = [row for row in rows if row.tokens is None]
        if plain:
            return _matched(plain[0], True, "exact"), "exact", ""
        return None, f"{template}: tuned by tokens, but the problem has none; default used", "none"
    rows = [row for row in rows if row.tokens is not None]
    if not rows:
        return None, f"{template}: tuned without tokens, asked with; default used", "none"
    counts = [row.tokens or 0 for row in rows]
    low, high = counts[0], counts[-1]
    if tokens * REACH < low or tokens > high * REACH:
        reason = (
            f"{template}: {tokens} tokens are more than {REACH}x outside the tuned range "
            f"{low} to {high}; default used"
        )
        return None, reason, "below" if tokens < low else "above"
    above = bisect.bisect_left(counts, tokens)
    if above == len(counts):
        nearest = high
    elif above == 0 or counts[above] == tokens:
        nearest = counts[above]
    else:
        # tokens / below >= above / tokens, without rounding
        below = counts[above - 1]
        nearest = counts[above] if tokens * tokens >= below * counts[above] else below
    row = rows[bisect.bisect_left(counts, nearest)]
    exact = nearest == tokens
    reason = "exact" if exact else f"nearest tuned count {nearest} for {tokens} tokens"
    return _matched(row, exact, reason), reason, ""


def _matched(row: _Row, exact: bool, reason: str) -> Match:
    return Match(dict(row.entry.config), row.entry, row.run, row.path, exact, row.tokens, reason)
