"""What ``gemma-tune bench`` writes: a JSON of everything, a Markdown report, a table, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from .bench import Outcome, spread

SCHEMA = 1


class Row(BaseModel):
    """One variant on one workload.  Speeds are tokens per second, times seconds.

    ``ratio`` is the median over rounds of this variant's speed over the first variant's in the same
    round, ``noise`` half the distance between that ratio's quartiles.
    """

    model_config = ConfigDict(extra="forbid")

    workload: str
    variant: str
    unit: str
    speeds: list[float]
    speed: float
    spread: float
    ratio: float | None
    noise: float | None
    first_token_s: dict[str, float] | None
    between_tokens_s: dict[str, float] | None
    kernels: dict[str, Any] | None


class Result(BaseModel):
    """A whole run."""

    model_config = ConfigDict(extra="forbid")

    version: int = SCHEMA
    date: str
    model: str
    settings: dict[str, Any]
    facts: dict[str, dict[str, Any]]
    summaries: dict[str, list[str]]
    failed: dict[str, str]
    notes: list[str]
    rows: list[Row]

    @classmethod
    def of(cls, outcome: Outcome, model: str, settings: dict[str, Any]) -> Result:
        rows = [
            _row(outcome, workload, variant.text)
            for workload in outcome.workloads
            for variant in outcome.variants
            if (variant.text, workload.name) in outcome.measured
            and outcome.measured[variant.text, workload.name].runs
        ]
        return cls(
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            model=model,
            settings=settings,
            facts=outcome.facts,
            summaries=outcome.summaries,
            failed=outcome.failed,
            notes=outcome.notes,
            rows=rows,
        )

    def write(self, folder: Path) -> list[Path]:
        """``serving.json`` and ``serving.md`` in ``folder``, each replaced as a whole."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, text in (
            ("serving.json", self.model_dump_json(indent=1) + "\n"),
            ("serving.md", markdown(self)),
        ):
            path = folder / name
            partial = path.with_suffix(path.suffix + ".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
            paths.append(path)
        return paths


def _row(outcome: Outcome, workload: Any, variant: str) -> Row:
    measured = outcome.measured[variant, workload.name]
    speeds = measured.speeds(workload)
    base = outcome.measured.get((outcome.variants[0].text, workload.name))
    ratio = noise = None
    if base is not None and base.runs and variant != outcome.variants[0].text:
        pairs = [own / other for own, other in zip(speeds, base.speeds(workload), strict=False)]
        ratio, noise = statistics.median(pairs), spread(pairs)

    def median(field: str) -> dict[str, float] | None:
        found = [run[field] for run in measured.runs if run.get(field)]
        if not found:
            return None
        return {key: statistics.median(each[key] for each in found) for key in found[0]}

    return Row(
        workload=workload.name,
        variant=variant,
        unit="prompt tok/s" if workload.counts_prompts else "output tok/s",
        speeds=speeds,
        speed=statistics.median(speeds),
        spread=spread(speeds),
        ratio=ratio,
        noise=noise,
        first_token_s=median("first_token_s"),
        between_tokens_s=median("between_tokens_s"),
        kernels=measured.kernels,
    )


def _verdict(row: Row) -> str:
    if row.ratio is None or row.noise is None:
        return "-"
    text = f"{row.ratio:.2f}x"
    return f"{text} (noise)" if abs(row.ratio - 1) <= row.noise else text


def _ms(times: dict[str, float] | None) -> str:
    if times is None:
        return "-"
    return " / ".join(f"{1e3 * times[key]:.3g}" for key in ("p50", "p95", "p99"))


_HEADS = ("workload", "variant", "tok/s", "vs first", "first token ms", "between tokens ms")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.workload,
        row.variant,
        f"{row.speed:,.0f} ± {row.spread:,.0f} {row.unit.split()[0]}",
        _verdict(row),
        _ms(row.first_token_s),
        _ms(row.between_tokens_s),
    )


def table(result: Result) -> Table:
    """For the terminal."""
    made = Table(title=f"vLLM serving {result.model}: p50 / p95 / p99 of times")
    for head in _HEADS:
        made.add_column(head, justify="left" if head in _HEADS[:2] else "right")
    before = None
    for row in result.rows:
        if before not in (None, row.workload):
            made.add_section()
        before = row.workload
        made.add_row(*_cells(row))
    return made


def markdown(result: Result) -> str:
    """The report: who ran, speeds, GPU time by hot path."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Result) -> Iterator[str]:
    yield f"# vLLM serving {result.model}\n"
    yield (
        "Made by `gemma-tune bench`; do not edit.  Weights are drawn by a seed unless the model is "
        "a checkpoint; prompts are random, the same for every variant and new in every round; no "
        "prefix cache.  Variants are engines of their own on one GPU, one at work at a time, in "
        "turn.\n"
    )
    yield "| | |\n|---|---|"
    for name, value in (("date", result.date), *sorted(result.settings.items())):
        yield f"| {name} | {value} |"
    for variant, facts in result.facts.items():
        shown = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "ready")
        yield f"| {variant} | {shown} |"
    yield ""
    for variant, reason in result.failed.items():
        yield f"**{variant} failed**: {reason.splitlines()[0]}\n"
    for note in result.notes:
        yield f"- {note}\n"
    yield "## Speed\n"
    yield (
        "Medians over rounds ± half the distance between quartiles; times are p50 / p95 / p99; "
        "'noise': within the spread of the paired rounds.\n"
    )
    yield f"| {' | '.join(_HEADS)} |"
    yield "|---|---|---:|---:|---:|---:|"
    for row in result.rows:
        yield f"| {' | '.join(_cells(row))} |"
    yield ""
    yield from _gpu_time(result)
    for variant, lines in result.summaries.items():
        if lines:
            yield f"## What the plugin said: {variant}\n"
            yield "```"
            yield from (line.strip() for line in lines)
            yield "```\n"


def _gpu_time(result: Result) -> Iterator[str]:
    for workload in dict.fromkeys(row.workload for row in result.rows):
        rows = [row for row in result.rows if row.workload == workload and row.kernels]
        if not rows:
            continue
        yield f"## GPU time by hot path: {workload}\n"
        yield (
            "Milliseconds of a pass like it under the profiler (fewer prompts or tokens), "
            "launches in brackets; 'idle' is wall time in which no kernel ran.\n"
        )
        yield "| hot path | " + " | ".join(row.variant for row in rows) + " |"
        yield "|---|" + "---:|" * len(rows)
        tables = [row.kernels or {} for row in rows]
        paths: dict[str, float] = {}
        for each in tables:
            for path, used in each["paths"].items():
                paths[path] = max(paths.get(path, 0.0), used["us"])
        for path in sorted(paths, key=lambda name: -paths[name]):
            found = [each["paths"].get(path) for each in tables]
            shown = [
                f"{used['us'] / 1e3:.2f} ({used['launches']:.0f})" if used else "-"
                for used in found
            ]
            yield f"| {path} | {' | '.join(shown)} |"
        for name, cells in (
            ("busy", [f"{each['busy_us'] / 1e3:.2f} ({each['launches']})" for each in tables]),
            ("idle", [f"{(each['wall_us'] - each['busy_us']) / 1e3:.2f}" for each in tables]),
            (
                "kernels a step",
                [f"{each['launches'] / max(1, each['steps']):.0f}" for each in tables],
            ),
        ):
            yield f"| **{name}** | {' | '.join(cells)} |"
        yield ""


def plot(result: Result, path: Path) -> None:
    """Bars of every variant relative to the first, by workload; ImportError without matplotlib."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    variants = list(dict.fromkeys(row.variant for row in result.rows))
    workloads = list(dict.fromkeys(row.workload for row in result.rows))
    figure = Figure(figsize=(1.5 + 1.8 * len(workloads), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(variants))
    for index, variant in enumerate(variants):
        own = {row.workload: row for row in result.rows if row.variant == variant}
        base = {row.workload: row.speed for row in result.rows if row.variant == variants[0]}
        at = [place + index * width for place, name in enumerate(workloads) if name in own]
        shown = [own[name] for name in workloads if name in own]
        heights = [row.speed / base.get(row.workload, row.speed) for row in shown]
        bars = axes.bar(at, heights, width, label=variant)
        axes.bar_label(bars, [f"{row.speed:,.0f}" for row in shown], rotation=90, padding=3)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(workloads))], workloads)
    axes.set_ylabel(f"speed over {variants[0]}" if variants else "speed")
    axes.margins(y=0.3)
    axes.legend(fontsize="small")
    device = next(iter(result.facts.values()), {}).get("device", "?")
    axes.set_title(f"{result.model} on {device}; labels: tokens/s")
    figure.savefig(path)
