"""Reading and writing tables: ``<root>/<folder of the GPU>/<template>.json``.

A reader sees a whole table or none: a table is written beside its place, flushed to the disk and
renamed.  Writers of one table take turns by a lock file, so that two tuners lose nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from .faults import Fault, TableError, fault_at, schema_faults
from .files import aside_of, locked, remove_stale, replace_file
from .jsontext import JsonError, parse, positions, read_text, shown
from .keys import problem_key, sort_key
from .naming import folder_name
from .schema import Entry, Run, Table, parse_utc

SCHEMA_VERSION: Literal[1] = 1
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Update:
    """What an update did: the table as written, the problems that were ``added`` and ``replaced``,
    those ``kept`` because a measured entry stands where a predicted one was offered, and warnings
    to show."""

    path: Path
    table: Table
    added: int
    replaced: int
    kept: int
    warnings: tuple[str, ...] = ()


def table_path(root: Path | str, device_name: str, template: str) -> Path:
    """Where the table of a template on the GPU with that driver name lies."""
    return Path(root) / folder_name(device_name) / f"{template}.json"


def read_table(path: Path | str) -> Table:
    """The table in a file; TableError names file, key, line, column, found and wanted."""
    return read_table_and_text(path)[0]


def read_table_and_text(path: Path | str) -> tuple[Table, str]:
    """:func:`read_table`, with the text for those who report lines of their own."""
    path = Path(path)
    value, text = read_strict(path)
    return _table(path, value, text), text


def read_strict(path: Path) -> tuple[Any, str]:
    """The value and text of a strict JSON file; TableError for everything else."""
    try:
        text = read_text(path)
        return parse(text), text
    except JsonError as error:
        fault = Fault(str(error), error.key, error.line, error.column)
        raise TableError.of(path, [fault]) from error
    except OSError as error:
        raise TableError(path, f"cannot be read: {error.strerror or error}") from error


def _table(path: Path, value: Any, text: str) -> Table:
    if not isinstance(value, dict):
        fault = Fault(f"found {shown(value)}, wanted a JSON object", "", 1, 1)
        raise TableError.of(path, [fault])
    version = value.get("schema", SCHEMA_VERSION)
    message = f"found {shown(version)}, wanted {SCHEMA_VERSION}"
    # Python takes true and 1.0 for 1.
    known = isinstance(version, int) and not isinstance(version, bool)
    if known and version > SCHEMA_VERSION:
        message += ": made by a newer gemma-tune; update gemma-tune or tune again"
    if not known or version != SCHEMA_VERSION:
        raise TableError.of(path, [fault_at(positions(text), ("schema",), message)])
    try:
        return Table.model_validate(value)
    except ValidationError as error:
        raise TableError.of(path, schema_faults(text, error)) from error


def make_table(template: str, run_name: str, run: Run, entries: Iterable[Entry]) -> Table:
    """A table of one run's entries, each of which names ``run_name`` as its run."""
    return Table(
        schema=SCHEMA_VERSION,
        template=template,
        device=run.device.name,
        runs={run_name: run},
        entries=list(entries),
    )


def table_text(table: Table) -> str:
    """A table as it is written: sorted, one run or entry per line, null figures left out."""
    entries = sorted(table.entries, key=lambda entry: sort_key(entry.problem))
    runs = [
        f"    {_line(name)}: {_line(table.runs[name].model_dump())}" for name in sorted(table.runs)
    ]
    rows = [f"    {_line(_entry_fields(entry))}" for entry in entries]
    return (
        "{\n"
        f'  "schema": {table.schema_version},\n'
        f'  "template": {_line(table.template)},\n'
        f'  "device": {_line(table.device)},\n'
        f'  "runs": {_block("{", runs, "}")},\n'
        f'  "entries": {_block("[", rows, "]")}\n'
        "}\n"
    )


def write_table(path: Path | str, table: Table) -> None:
    """Write a table atomically; a reader or a crash at any moment sees the old or the new one.

    TableError, with nothing touched, when the table could not be read back or the disk refuses.
    """
    path = Path(path)
    text = table_text(table)
    _table(path, parse(text), text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise TableError(path, f"cannot be written: {error.strerror or error}") from error


def update_table(root: Path | str, table: Table, *, lock_seconds: float = LOCK_SECONDS) -> Update:
    """Merge a table into the one on disk, under a lock.

    An entry replaces the one of the same problem, but a predicted one never replaces a measured
    one.  Runs no entry refers to are dropped.  An existing file that cannot be used is moved aside
    to ``<name>.broken-<UTC time>``, with a warning.  Nothing is written when ``table`` has no
    entries.  TableError when the lock is not free within ``lock_seconds`` or the disk refuses.
    """
    path = table_path(root, table.device, table.template)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, lock_seconds):
            return _update(path, table)
    except OSError as error:
        raise TableError(path, f"cannot be written: {error.strerror or error}") from error


def _update(path: Path, table: Table) -> Update:
    old, warnings = _existing(path, table)
    if not table.entries:
        return Update(path, old or table, 0, 0, 0, tuple(warnings))
    remove_stale(path)
    runs = dict(old.runs) if old else {}
    merged = {problem_key(entry.problem): entry for entry in old.entries} if old else {}
    names = {name: _add_run(runs, name, run) for name, run in sorted(table.runs.items())}
    added = replaced = kept = 0
    for entry in table.entries:
        key = problem_key(entry.problem)
        present = merged.get(key)
        measured = table.runs[entry.run].provenance == "measured"
        if present and not measured and runs[present.run].provenance == "measured":
            kept += 1
            continue
        added, replaced = added + (present is None), replaced + (present is not None)
        merged[key] = entry.model_copy(update={"run": names[entry.run]})
    used = {entry.run for entry in merged.values()}
    result = Table(
        schema=SCHEMA_VERSION,
        template=table.template,
        device=table.device,
        runs={name: runs[name] for name in sorted(used)},
        entries=sorted(merged.values(), key=lambda entry: sort_key(entry.problem)),
    )
    write_table(path, result)
    return Update(path, result, added, replaced, kept, tuple(warnings))


def _existing(path: Path, table: Table) -> tuple[Table | None, list[str]]:
    """The usable table at ``path``; anything else there is moved aside with a warning."""
    if not os.path.lexists(path):
        return None, []
    try:
        old = read_table(path)
        if (old.template, old.device) != (table.template, table.device):
            raise TableError(
                path,
                f"found a table of {old.template!r} on {old.device!r}, "
                f"wanted {table.template!r} on {table.device!r}",
            )
        return old, []
    except TableError as error:
        aside = aside_of(path)
        path.rename(aside)
        return None, [f"{error}; moved aside to {aside.name}, a new table is begun"]


def _add_run(runs: dict[str, Run], name: str, run: Run) -> str:
    """Add a run and return its name: another one when that name means another run.

    One session that saves after every problem differs from itself only in ``finished_at``; the
    later time stays.
    """
    base, count = name, 1
    while name in runs:
        present = runs[name]
        if present.model_copy(update={"finished_at": run.finished_at}) == run:
            run = max(present, run, key=lambda each: parse_utc(each.finished_at))
            break
        count += 1
        name = f"{base}-{count}"
    runs[name] = run
    return name


def _entry_fields(entry: Entry) -> dict[str, Any]:
    fields = entry.model_dump(exclude_none=True)
    for name in ("problem", "config", "rejected"):
        fields[name] = dict(sorted(fields[name].items()))
    return fields


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _block(opening: str, lines: list[str], closing: str) -> str:
    return opening + "\n" + ",\n".join(lines) + f"\n  {closing}" if lines else opening + closing
