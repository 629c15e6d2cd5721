"""A report as text to read: the Markdown file, the end of the terminal output, the plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tuner.report import clock

from .result import PEERS, Report, Row, largest, summary

DRY_RUN = "DRY RUN on the CPU's interpreter: no figure here is a GPU's"


def markdown(report: Report) -> str:
    """The whole report."""
    return "\n".join([*_head(report), *_summary(report), *_tables(report), *_end(report)]) + "\n"


def _head(report: Report) -> Iterator[str]:
    facts = report.environment
    yield f"# Hot paths on {facts['device']}"
    yield ""
    if report.dry_run:
        yield f"**{DRY_RUN}.**"
        yield ""
    yield (
        "Made by `python -m benchmarks.hot_paths`; do not edit. All of it was measured by that "
        "script in one process on one device, interleaved and paired. docs/benchmarks.md says "
        "what each column means."
    )
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in facts.items():
        yield f"| {name.replace('_', ' ')} | {_cell(value)} |"
    if report.copy is not None:
        size = _bytes(report.copy_bytes)
        yield f"| copy of {size} | {report.copy_gb_per_s:,.0f} GB/s read + written |"
    yield f"| duration | {clock(report.seconds)} |"
    yield ""


def _summary(report: Report) -> Iterator[str]:
    yield "## Summary"
    yield ""
    yield "Geometric means over the rows of a kernel; the copy share over its largest token counts."
    yield ""
    yield (
        "| kernel | rows with a tuned config | vs default | vs inductor | vs stock | vs fixed "
        "| share of copy bandwidth at the largest count |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, rows in report.by_template().items():
        found = summary(rows, PEERS)
        peers = " | ".join(_times(found[peer]) for peer in PEERS)
        share = _percent(found["copy_share_at_largest"])
        yield f"| {name} | {found['tuned']} of {len(rows)} | {peers} | {share} |"
    yield ""


def _tables(report: Report) -> Iterator[str]:
    for template, rows in report.by_template().items():
        yield f"## {template}"
        yield ""
        for kind in dict.fromkeys(row.kind for row in rows):
            yield from _table(kind, [row for row in rows if row.kind == kind])


def _table(kind: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"### {kind}"
    yield ""
    yield f"Models: {', '.join(dict.fromkeys(name for row in rows for name in row.models))}."
    yield ""
    peers = [peer for peer in PEERS if any(peer in row.times for row in rows)]
    head = ["tokens", "tuned us", "GB/s", "of copy"]
    head += [f"vs {peer}" for peer in peers] + [f"{peer} us" for peer in peers]
    head += ["copy us", "kernels"]
    yield f"| {' | '.join(head)} |"
    yield "|" + "---:|" * len(head)
    for row in sorted(rows, key=lambda row: row.tokens):
        cells = [str(row.tokens), _us(row, "tuned"), _number(row.gb_per_s)]
        cells.append(_percent(row.copy_share))
        for peer in peers:
            mark = "**" if peer in row.slower_than else ""
            cells.append(f"{mark}{_times(row.speedup(peer))}{mark}")
        cells += [_us(row, peer) for peer in [*peers, "copy"]]
        ours = row.kernels.get("tuned", row.kernels.get("default", "-"))
        theirs = row.kernels.get("inductor")
        cells.append(f"{ours}" if theirs is None else f"{ours} / {theirs}")
        yield f"| {' | '.join(cells)} |"
    yield ""
    reasons: dict[str, list[int]] = {}
    for row in rows:
        for name, reason in row.absent.items():
            if name != "stock":
                reasons.setdefault(f"{name}: {reason}", []).append(row.tokens)
    for reason, counts in reasons.items():
        where = "" if len(counts) == len(rows) else f" ({', '.join(map(str, sorted(counts)))})"
        yield f"- not measured{where}: {reason}"
    if reasons:
        yield ""


def _end(report: Report) -> Iterator[str]:
    yield "## Regressions"
    yield ""
    yield "Where a peer beats the tuned config by more than the noise of the paired samples."
    yield ""
    yield from [f"- {line}" for line in report.regressions()] or ["None."]
    if report.errors:
        yield from ["", "## Errors", ""]
        yield from (f"- {problem}: {reason}" for problem, reason in report.errors)
    if report.left:
        yield from ["", f"## Not reached within the budget ({len(report.left)})", ""]
        yield from (f"- {problem}" for problem in report.left)
    if report.notes:
        yield from ["", "## Notes", ""]
        yield from (f"- {note}" for note in report.notes)


def closing(report: Report) -> Iterator[str]:
    """The end of the terminal output: a line per kernel, then what went wrong."""
    if report.dry_run:
        yield DRY_RUN
    if report.copy_gb_per_s is not None:
        yield f"copy of {_bytes(report.copy_bytes)}: {report.copy_gb_per_s:,.0f} GB/s"
    for name, rows in report.by_template().items():
        found = summary(rows, PEERS)
        peers = ", ".join(f"{_times(found[peer])} vs {peer}" for peer in PEERS if found[peer])
        top = ", ".join(f"{_percent(row.copy_share)} at {row.tokens}" for row in largest(rows))
        count = f"{found['tuned']} of {len(rows)} rows tuned"
        yield f"{name}: {count}; {peers or 'no figures'}; of copy: {top}"
    lines = report.regressions()
    yield f"regressions: {len(lines) or 'none'}"
    yield from (f"  {line}" for line in lines)
    yield from (f"error: {problem}: {reason}" for problem, reason in report.errors)
    if report.left:
        yield f"the budget ended before {len(report.left)} problems, first: {report.left[0]}"


def plot(report: Report, path: Path) -> None:
    """Speed-ups against inductor (or the stock kernel) and copy shares, by token count.

    ImportError without matplotlib; the format follows the file's ending.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    groups = report.by_template()
    figure = Figure(figsize=(4.5 * max(1, len(groups)), 7.5), layout="constrained")
    title = f"{report.environment['device']}, {report.environment['date']}"
    figure.suptitle(f"{DRY_RUN}\n{title}" if report.dry_run else title)
    axes = figure.subplots(2, max(1, len(groups)), squeeze=False, sharex="col")
    for column, (template, rows) in enumerate(groups.items()):
        top, bottom = axes[0][column], axes[1][column]
        peer = "stock" if any("stock" in row.times for row in rows) else "inductor"
        top.set(title=template, ylabel=f"speed-up against {peer}", xscale="log")
        bottom.set(xlabel="tokens", ylabel="share of copy bandwidth", xscale="log")
        top.axhline(1.0, color="grey", linewidth=0.8)
        bottom.axhline(1.0, color="grey", linewidth=0.8)
        for kind in dict.fromkeys(row.kind for row in rows):
            line = sorted((row for row in rows if row.kind == kind), key=lambda row: row.tokens)
            _curve(top, line, [row.speedup(peer) for row in line], kind)
            _curve(bottom, line, [row.copy_share for row in line], kind)
        top.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def _curve(axis: Any, rows: Sequence[Row], values: Sequence[float | None], label: str) -> None:
    found = [(r.tokens, v) for r, v in zip(rows, values, strict=True) if v is not None]
    axis.plot([t for t, _ in found], [v for _, v in found], marker="o", markersize=3, label=label)


def _us(row: Row, name: str) -> str:
    found = row.times.get(name)
    return "-" if found is None else f"{found.median:.2f} ± {found.spread:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _bytes(count: int) -> str:
    return f"{count / 2**30:g} GiB" if count >= 2**30 else f"{count / 2**20:g} MiB"


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text.replace("|", "\\|")
