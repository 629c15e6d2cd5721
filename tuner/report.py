"""What the user sees: live progress, decisions as they fall, and a summary; all of it on stderr
except the summary's figures."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tuned_configs.schema import Entry

from .run import Job, Progress, Summary, counted
from .trial import Outcome, Status

#: Most different reasons of rejected candidates that the summary lists.
REASONS_SHOWN = 12


class ConsoleReporter:
    """Progress on a terminal: a live panel there, one line per decided problem everywhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._total = 0
        self._finished = 0
        self._deadline: float | None = None
        self._start = time.monotonic()
        self._state: Progress | None = None
        self._rejected: collections.Counter[str] = collections.Counter()
        self._trials = 0

    def __enter__(self) -> ConsoleReporter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def begin(self, total: int, deadline: float | None) -> None:
        self._total, self._deadline, self._start = total, deadline, time.monotonic()
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self._panel, console=self.console, refresh_per_second=4,
                transient=True,
            )  # fmt: skip
            self._live.start()

    def progress(self, state: Progress, outcome: Outcome | None) -> None:
        self._state = state
        if outcome is not None:
            self._trials += 1
            if outcome.status is not Status.OK:
                self._rejected[outcome.status.value] += 1

    def decided(self, job: Job, entry: Entry, reused: bool, notes: Sequence[str]) -> None:
        self._finished += 1
        text = Text(f"[{self._finished:>{len(str(self._total))}}/{self._total}] ", style="dim")
        text.append(f"{job.template.name} ", style="bold")
        text.append(f"{job.kind}, {counted(job.problem.tokens)}: ")
        text.append(verdict(entry), style="green" if entry.verdict == "tuned" else "")
        if reused:
            text.append(" (reused)", style="dim")
        for note in notes:
            text.append(f"; {note}", style="yellow")
        self.console.print(text, highlight=False, soft_wrap=True)

    def undecided(self, job: Job, reason: str) -> None:
        self._finished += 1
        self.console.print(
            Text(
                f"{job.title}: no result: {reason}",
                style="red",
            ),
            soft_wrap=True,
        )

    def say(self, message: str) -> None:
        self.console.print(Text(message, style="yellow"), soft_wrap=True)

    def _panel(self) -> RenderableType:
        now = time.monotonic()
        if self._deadline is not None:
            left = f"{clock(max(0.0, self._deadline - now))} left"
        elif self._finished:
            left = f"about {clock((now - self._start) * (self._total / self._finished - 1))} left"
        else:
            left = ""
        head = Table.grid(padding=(0, 1))
        head.add_row(
            ProgressBar(total=max(1, self._total), completed=self._finished, width=30),
            f"{self._finished} of {self._total} problems, {self._trials} trials, "
            f"{clock(now - self._start)} gone {left}",
        )
        lines: list[RenderableType] = [head]
        if (state := self._state) is not None:
            lines.append(Text(current(state)))
        if self._rejected:
            counts = ", ".join(f"{n} {status}" for status, n in self._rejected.most_common())
            lines.append(Text(f"rejected: {counts}", style="dim"))
        return Group(*lines)


def current(state: Progress) -> str:
    """The problem being tuned in one line."""
    search = state.search
    text = f"{state.job.title}: trial {len(search.outcomes)} of {min(search.budget, search.size)}"
    best, default = state.best_us, state.default_us
    if best is not None:
        text += f", best {us(best)}"
        if default is not None:
            text += f" (default {us(default)}, {default / best:.2f}x)"
    return text


def verdict(entry: Entry) -> str:
    """An entry's result in words: what was chosen, its time, and what it is compared with."""
    word = "tuned" if entry.verdict == "tuned" else "default kept, no gain"
    if entry.verdict == "default" and entry.trials < 2:
        word = "default kept, nothing else was tried"
    if entry.time_us is None:
        assert entry.predicted_us is not None
        config, default = entry.predicted_us.config, entry.predicted_us.default
        return f"{word}, predicted {us(config)}, default {us(default)} ({default / config:.2f}x)"
    text = f"{word}, {us(entry.time_us.median)}"
    parts = [
        f"{name} {us(other.median)}, {other.median / entry.time_us.median:.2f}x"
        for name, other in (("default", entry.default_us), ("stock", entry.stock_us))
        if other is not None
    ]
    return f"{text} ({'; '.join(parts)})" if parts else text


def summary_tables(summary: Summary) -> Iterable[RenderableType]:
    """The run's results: one row per kind of problem, then what was rejected and why."""
    if summary.decided:
        yield _kinds(summary)
    if summary.reasons:
        table = Table("rejected", "candidates", "reason", title="Rejected candidates")
        ordered = sorted(summary.reasons.items(), key=lambda item: -item[1])
        for (status, reason), count in ordered[:REASONS_SHOWN]:
            table.add_row(status, str(count), Text(reason))
        if len(ordered) > REASONS_SHOWN:
            rest = sum(count for _, count in ordered[REASONS_SHOWN:])
            table.add_row("...", str(rest), f"{len(ordered) - REASONS_SHOWN} more reasons")
        yield table


def _kinds(summary: Summary) -> Table:
    predicted = any(entry.time_us is None for _, entry in summary.decided)
    title = "Predicted (nothing was measured)" if predicted else "Measured"
    table = Table(title=title)
    for name in ("template", "problem"):
        table.add_column(name, overflow="fold")
    for name in ("tokens", "tuned", "vs. default", "best at", "vs. stock"):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str], list[Entry]] = {}
    for job, entry in summary.decided:
        groups.setdefault((job.template.name, job.kind), []).append(entry)
    for (name, kind), entries in groups.items():
        counts = [entry.problem.get("tokens", 0) for entry in entries]
        gains = {entry.problem.get("tokens", 0): gain(entry) for entry in entries}
        best = max(gains, key=lambda tokens: gains[tokens])
        stock = [peer / time for time, _, peer in map(times, entries) if peer is not None]
        table.add_row(
            name,
            kind,
            f"{min(counts)}-{max(counts)}",
            f"{sum(entry.verdict == 'tuned' for entry in entries)}/{len(entries)}",
            f"{geomean(gains.values()):.2f}x",
            f"{gains[best]:.2f}x at {best}",
            f"{geomean(stock):.2f}x" if stock else "-",
        )
    return table


def times(entry: Entry) -> tuple[float, float | None, float | None]:
    """Microseconds of the entry's config, of the default and of stock, measured or predicted."""
    if entry.predicted_us is not None:
        return entry.predicted_us.config, entry.predicted_us.default, None
    assert entry.time_us is not None  # the schema's rule for measured entries
    return (
        entry.time_us.median,
        entry.default_us.median if entry.default_us else None,
        entry.stock_us.median if entry.stock_us else None,
    )


def gain(entry: Entry) -> float:
    """Default's time over the entry's; 1 where there is nothing to compare with."""
    time, default, _ = times(entry)
    return 1.0 if default is None else default / time


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; 1 for no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def us(value: float) -> str:
    """Microseconds with three significant digits: ``1.53 us``."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{digits}f} us"


def clock(seconds: float) -> str:
    """``3:07`` for 187 seconds, hours in front when there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def config_text(config: dict[str, Any]) -> str:
    """A config as ``rows=1 block=2048 ...``."""
    return " ".join(f"{name}={value}" for name, value in config.items())
