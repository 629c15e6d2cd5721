"""What is wrong or doubtful in tables: our own, and vLLM's fused-MoE files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .faults import Fault, TableError, fault_at
from .jsontext import Position, Where, positions
from .keys import BUCKET, problem_key
from .lookup import REACH
from .naming import folder_name
from .schema import Device, Entry, Table
from .store import read_table_and_text
from .vllm_moe import ACCEPTED_METADATA, is_moe_table, read_moe_table

Severity = Literal["error", "warning", "note"]

#: ``(template, problem, config, device)`` to what is wrong with that config, None if nothing.
Validate = Callable[[str, dict[str, Any], dict[str, Any], Device], str | None]

#: A template's name to the least and the most tokens that it is asked for; None: no limit.
Served = Callable[[str], tuple[int, int | None]]


@dataclass(frozen=True)
class Finding:
    """An ``error`` makes a table or an entry unusable, a ``warning`` may cost speed, a ``note`` is
    information.  ``line`` is None where a file could not be read."""

    severity: Severity
    path: Path
    line: int | None
    message: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{place}: {self.severity}: {self.message}"


def lint(
    path_or_folder: Path | str,
    max_num_batched_tokens: int = 8192,
    validate: Validate | None = None,
    served: Served = lambda template: (1, None),
) -> list[Finding]:
    """All findings in a table, or in every table below a folder, by path and line.

    ``validate`` judges single configs (the tuner's predicate, which needs torch); without it only
    what a file itself tells is checked.  ``served`` says which token counts a template is for.
    """
    path = Path(path_or_folder)
    try:
        if not path.exists():
            return [Finding("error", path, None, "no such file or folder")]
    except OSError as error:
        return [Finding("error", path, None, f"cannot be read: {error.strerror or error}")]
    findings: list[Finding] = []
    for file in _files(path):
        try:
            if is_moe_table(file):
                found = _lint_moe(file, max_num_batched_tokens)
            else:
                found = _lint_table(file, max_num_batched_tokens, validate, served)
        except TableError as error:
            found = [("error", fault) for fault in error.faults]
        findings += [
            Finding(severity, file, fault.line, _without_line(fault)) for severity, fault in found
        ]
    return sorted(findings, key=lambda each: (each.path, each.line or 0))


_Found = list[tuple[Severity, Fault]]


def _files(path: Path) -> list[Path]:
    if path.is_file() or path.suffix == ".json":
        return [path]
    return sorted(file for file in path.rglob("*.json") if not file.name.startswith("."))


def _without_line(fault: Fault) -> str:
    return f"{fault.key}: {fault.message}" if fault.key else fault.message


def _lint_table(path: Path, max_tokens: int, validate: Validate | None, served: Served) -> _Found:
    table, text = read_table_and_text(path)
    least, most = served(table.template)
    at = positions(text)
    found: _Found = []
    folder = path.resolve().parent.name
    if folder != folder_name(table.device):
        message = (
            f"found {table.device!r}, which is read from the folder {folder_name(table.device)}, "
            f"in the folder {folder}: no GPU reads it here"
        )
        found.append(("error", fault_at(at, ("device",), message)))
    if path.stem != table.template:
        message = f"found {table.template!r} in a file named {path.name}"
        found.append(("error", fault_at(at, ("template",), message)))
    found += _unknown_versions(table, at)
    for index, entry in enumerate(table.entries):
        where: Where = ("entries", index)
        if _no_gain(entry):
            message = f'{_no_gain(entry)}; keep the default (verdict "default") or tune again'
            found.append(("warning", fault_at(at, (*where, "verdict"), message)))
        device = table.runs[entry.run].device
        wrong = validate and validate(table.template, entry.problem, entry.config, device)
        if wrong:
            found.append(("error", fault_at(at, (*where, "config"), wrong)))
    for index, counts in _counts_by_kind(table):
        rest = {k: v for k, v in table.entries[index].problem.items() if k != BUCKET}
        for message in _coverage(
            counts, max_tokens if most is None else min(most, max_tokens), least
        ):
            fault = fault_at(at, ("entries", index, "problem", BUCKET), f"{message}, for {rest}")
            found.append(("warning", fault))
    return found


def _unknown_versions(table: Table, at: Mapping[Where, Position]) -> _Found:
    found: _Found = []
    for name, run in table.runs.items():
        unknown: list[Where] = [
            (stamp,) for stamp in ("gemma_tune", "triton", "torch") if getattr(run, stamp) is None
        ]
        if run.device.driver is None and run.provenance == "measured":
            unknown.append(("device", "driver"))
        for where in unknown:
            message = "unknown version: nobody can tell whether this table is out of date"
            found.append(("warning", fault_at(at, ("runs", name, *where), message)))
    return found


def _no_gain(entry: Entry) -> str | None:
    if entry.verdict != "tuned" or not entry.default_us or not entry.time_us:
        return None
    ours, default = entry.time_us.median, entry.default_us.median
    if ours < default:
        return None
    return f"marked tuned with no gain: {ours:g} us against {default:g} us of the default"


def _counts_by_kind(table: Table) -> Iterable[tuple[int, list[int]]]:
    """Per kind of problem, the index of its first entry and its sorted token counts."""
    kinds: dict[Any, tuple[int, list[int]]] = {}
    for index, entry in enumerate(table.entries):
        if BUCKET in entry.problem:
            kind = problem_key(entry.problem, without=BUCKET)
            kinds.setdefault(kind, (index, []))[1].append(entry.problem[BUCKET])
    return [(index, sorted(counts)) for index, counts in kinds.values()]


def _coverage(counts: list[int], max_tokens: int, least: int = 1) -> list[str]:
    """Warnings when the tuned counts do not reach what a server asks for."""
    messages = []
    if counts[-1] * REACH < max_tokens:
        messages.append(
            f"the largest tuned count is {counts[-1]}, less than a quarter of the "
            f"{max_tokens} batched tokens that are served"
        )
    if counts[0] > REACH * least:
        asked = "the single token of one sequence's decode" if least == 1 else f"the least, {least}"
        messages.append(f"the smallest tuned count is {counts[0]}, more than {REACH} times {asked}")
    return messages


def _lint_moe(path: Path, max_tokens: int) -> _Found:
    rows, notes = read_moe_table(path)
    found: _Found = []
    for note in notes:
        found.append(("note" if note.key == ACCEPTED_METADATA else "warning", note))
    snaps = "vLLM takes the nearest key however far it is"
    for message in _coverage(list(rows), max_tokens):
        found.append(("warning", Fault(f"{message}; {snaps}", "", 1, 1)))
    return found
