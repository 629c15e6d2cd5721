"""The attention report as text to read: the Markdown file, the end of the terminal output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tuner.report import clock

from .attention_rows import CONTESTANTS, OURS, PEERS, PHASES, Report, Row, groups, summary
from .render import DRY_RUN

LABELS = {"vllm_best": "vllm best"}


def markdown(report: Report) -> str:
    """The whole report."""
    phases = (line for phase in PHASES for line in _phase(phase, report.of(phase)))
    return "\n".join([*_head(report), *_summary(report), *phases, *_end(report)]) + "\n"


def _head(report: Report) -> Iterator[str]:
    facts = report.environment
    yield f"# Attention on {facts['device']}"
    yield ""
    if report.dry_run:
        yield from (f"**{DRY_RUN}.**", "")
    yield (
        "Made by `python -m benchmarks.attention`; do not edit. All of it was measured by that "
        "script in one process on one device, interleaved and paired. docs/benchmarks.md says "
        "who takes part and what each column means."
    )
    yield from ("", "| | |", "|---|---|")
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        yield f"| {name.replace('_', ' ')} | {_cell(text)} |"
    yield f"| duration | {clock(report.seconds)} |"
    yield ""


def _summary(report: Report) -> Iterator[str]:
    yield from ("## Summary", "")
    yield "Speed-up of ours over each peer: geometric mean (least)."
    yield ""
    heads = [f"vs {_label(peer)}" for peer in PEERS]
    yield f"| phase | layers | rows | {' | '.join(heads)} | TFLOP/s | of copy |"
    yield "|---|---|---:|" + "---:|" * (len(PEERS) + 2)
    for phase, layers, rows in groups(report.rows):
        found = summary(rows)
        cells = [_mean(found[peer]) for peer in PEERS]
        tflops = _range(found["tflops"], "{:.0f}") if phase == "prefill" else "-"
        cells += [tflops, _range(found["copy_share"], "{:.0%}")]
        yield f"| {phase} | {layers} | {len(rows)} | {' | '.join(cells)} |"
    yield ""


def _phase(phase: str, rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield from (f"## {phase.capitalize()}", "")
    for kind in dict.fromkeys(row.case.kind for row in rows):
        yield from _table(phase, kind, [row for row in rows if row.case.kind == kind])


def _table(phase: str, kind: str, rows: Sequence[Row]) -> Iterator[str]:
    yield from (f"### {kind}", "")
    models = dict.fromkeys(name for row in rows for name in row.case.job.models)
    yield f"Models: {', '.join(models)}. Blocks of {rows[0].case.peer.block_size}."
    yield ""
    names = [name for name in CONTESTANTS if any(name in row.times for row in rows)]
    if all(row.configs.get("stock") == row.configs.get("default") for row in rows):
        names = [name for name in names if name != "stock"]
    peers = [peer for peer in PEERS if peer in names]
    rate = "TFLOP/s" if phase == "prefill" else "TB/s"
    head = ["batch", "ours"] + [f"vs {_label(peer)}" for peer in peers]
    head += [f"{rate}: ours, {', '.join(map(_label, peers))}" if peers else rate]
    head += ["of copy"] * (phase == "decode") + [f"{_label(name)} us" for name in names]
    yield f"| {' | '.join(head)} |"
    yield "|---|---|" + "---:|" * (len(head) - 2)
    for row in rows:
        cells = [row.case.workload.name, row.ours or "-"]
        for peer in peers:
            mark = "**" if peer in row.slower_than() else ""
            cells.append(f"{mark}{_format(row.speedup(peer), '{:.2f}x')}{mark}")
        rates = row.tflops if phase == "prefill" else row.tb_per_s
        form = "{:.0f}" if phase == "prefill" else "{:.2f}"
        cells.append(", ".join(_format(rates(name), form) for name in (row.ours or "", *peers)))
        if phase == "decode":
            cells.append(_format(row.speedup("copy"), "{:.0%}"))
        cells += [_us(row, name) for name in names]
        yield f"| {' | '.join(cells)} |"
    yield ""
    notes = [*_configs(rows), *_absences(rows)]
    yield from [*notes, ""] if notes else []


def _configs(rows: Sequence[Row]) -> Iterator[str]:
    for name in ("tuned", "vllm_best"):
        found: dict[str, list[str]] = {}
        for row in rows:
            if name in row.configs and name in row.times:
                text = json.dumps(row.configs[name])
                if not any(row.configs[name].values()):
                    text = "vLLM's own"
                found.setdefault(text, []).append(row.case.workload.name)
        for text, where in found.items():
            yield f"- {_label(name)} ({', '.join(where)}): `{text}`"


def _absences(rows: Sequence[Row]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in row.absent.items():
            found.setdefault(f"{_label(name)}: {reason}", []).append(row.case.workload.name)
    for text, names in found.items():
        where = "" if len(names) == len(rows) else f" ({', '.join(names)})"
        yield f"- not measured{where}: {text}"


def _end(report: Report) -> Iterator[str]:
    yield from ("## Behind", "")
    yield "Where a peer beats ours by more than the noise of the paired samples."
    yield ""
    yield from [f"- {line}" for line in report.behind()] or ["None."]
    for title, lines in (
        ("Errors", [f"{row}: {reason}" for row, reason in report.errors]),
        ("Skipped: too large", [f"{row}: {reason}" for row, reason in report.skipped]),
        (f"Not reached within the budget ({len(report.left)})", report.left),
        ("Notes", report.notes),
    ):
        if lines:
            yield from ("", f"## {title}", "", *(f"- {line}" for line in lines))


def closing(report: Report) -> Iterator[str]:
    """The end of the terminal output: a line per group, then what went wrong."""
    if report.dry_run:
        yield DRY_RUN
    for phase, layers, rows in groups(report.rows):
        found = summary(rows)
        peers = [f"{_mean(found[peer])} vs {_label(peer)}" for peer in PEERS if found[peer]]
        if phase == "prefill":
            peers.append(f"{_range(found['tflops'], '{:.0f}')} TFLOP/s")
        peers.append(f"{_range(found['copy_share'], '{:.0%}')} of copy")
        tuned = sum(OURS[0] in row.times for row in rows)
        yield f"{phase}, {layers}: {len(rows)} rows, {tuned} tuned; {', '.join(peers)}"
    lines = report.behind()
    yield f"behind: {len(lines) or 'nowhere'}"
    yield from (f"  {line}" for line in lines)
    yield from (f"error: {row}: {reason}" for row, reason in report.errors)
    yield from (f"skipped: {row}: {reason}" for row, reason in report.skipped)
    if report.left:
        yield f"the budget ended before {len(report.left)} rows, first: {report.left[0]}"


def _label(name: str) -> str:
    return LABELS.get(name, name)


def _us(row: Row, name: str) -> str:
    found = row.times.get(name)
    return "-" if found is None else f"{found.median:.2f} ± {found.spread:.2f}"


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _mean(found: Any) -> str:
    return "-" if found is None else f"{found['mean']:.2f}x ({found['least']:.2f}x)"


def _range(found: Any, form: str) -> str:
    return "-" if found is None else " to ".join(form.format(value) for value in found)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
