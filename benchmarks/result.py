"""What a run of the benchmark found: rows, what is derived from them, and their JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.report import geomean
from tuner.timing import Comparison, Timing

#: What the tuned config is compared with, in the order of the tables' columns.
PEERS = ("default", "inductor", "stock", "fixed")
#: Everything that is timed: a copy of as many bytes is the floor.
CONTESTANTS = ("tuned", *PEERS, "copy")
#: Format of the JSON; raised when a field changes its meaning.
SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One problem at one token count.

    ``times`` (microseconds a call), ``configs`` and ``kernels`` (launches a call) are by name of
    the :data:`CONTESTANTS`; ``absent`` has the reason of each one missing.
    ``against`` compares tuned with each peer, paired.  ``table_tokens`` is the tuned token count
    that the look-up answered with.
    """

    template: str
    kind: str
    problem: Mapping[str, Any]
    models: tuple[str, ...]
    bytes: int
    times: Mapping[str, Timing]
    configs: Mapping[str, Mapping[str, Any]]
    kernels: Mapping[str, int]
    absent: Mapping[str, str]
    against: Mapping[str, Comparison]
    table_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return int(self.problem.get("tokens", 0))

    def speedup(self, peer: str) -> float | None:
        """The peer's median time over the tuned one's; None when either is missing."""
        if "tuned" not in self.times or peer not in self.times:
            return None
        return self.times[peer].median / self.times["tuned"].median

    @property
    def gb_per_s(self) -> float | None:
        """Least bytes of the problem over the tuned time."""
        tuned = self.times.get("tuned")
        return None if tuned is None else self.bytes / tuned.median / 1e3

    @property
    def copy_share(self) -> float | None:
        """A copy's time for the same number of bytes over the tuned time."""
        return self.speedup("copy")

    @property
    def slower_than(self) -> list[str]:
        """Peers that beat the tuned config by more than the noise."""
        return [peer for peer in PEERS if peer in self.against and self.against[peer].slower]

    def to_dict(self) -> dict[str, Any]:
        derived = {
            "gb_per_s": _short(self.gb_per_s),
            "copy_share": _short(self.copy_share),
            "speedup": {peer: _short(self.speedup(peer)) for peer in PEERS if peer in self.times},
            "slower_than": self.slower_than,
        }
        return {
            "template": self.template,
            "kind": self.kind,
            "problem": dict(self.problem),
            "models": list(self.models),
            "bytes": self.bytes,
            "table_tokens": self.table_tokens,
            "times_us": {
                name: {"median": _short(time.median), "spread": _short(time.spread)}
                for name, time in self.times.items()
            },
            "configs": {name: dict(config) for name, config in self.configs.items()},
            "kernels": dict(self.kernels),
            "absent": dict(self.absent),
            "paired": {
                peer: {"gain": _short(found.gain), "noise": _short(found.noise)}
                for peer, found in self.against.items()
            },
            **derived,
        }


@dataclass
class Report:
    """A whole run.

    ``environment`` has the device, driver, versions and settings; ``copy`` is the machine's figure:
    a copy of ``copy_bytes``.  ``errors`` are (problem, reason), ``left`` the problems that the
    budget did not reach, ``notes`` what a reader must know.
    """

    environment: dict[str, Any]
    dry_run: bool
    copy_bytes: int = 0
    copy: Timing | None = None
    rows: list[Row] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def copy_gb_per_s(self) -> float | None:
        """Bytes read and written a second by the large copy."""
        return None if self.copy is None else 2 * self.copy_bytes / self.copy.median / 1e3

    def regressions(self) -> list[str]:
        """One line per row and peer that beats the tuned config beyond the noise."""
        lines = []
        for row in self.rows:
            for peer in row.slower_than:
                found, tuned = row.against[peer], row.times["tuned"].median
                lines.append(
                    f"{row.template}, {row.kind}, {row.tokens} tokens: slower than {peer} by "
                    f"{-found.gain:.1%} (noise {found.noise:.1%}; {tuned:.2f} against "
                    f"{row.times[peer].median:.2f} us)"
                )
        return lines

    def by_template(self) -> dict[str, list[Row]]:
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.template, []).append(row)
        return groups

    def to_dict(self) -> dict[str, Any]:
        copy = None
        if self.copy is not None:
            copy = {
                "bytes": self.copy_bytes,
                **{name: _short(value) for name, value in dataclasses.asdict(self.copy).items()},
                "gb_per_s": _short(self.copy_gb_per_s),
            }
        return {
            "schema": SCHEMA,
            "benchmark": "hot_paths",
            "dry_run": self.dry_run,
            "environment": self.environment,
            "large_copy": copy,
            "summary": {
                name: summary(rows, PEERS) for name, rows in self.by_template().items()
            },
            "regressions": self.regressions(),
            "errors": [list(error) for error in self.errors],
            "left_by_budget": self.left,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
            "rows": [row.to_dict() for row in self.rows],
        }  # fmt: skip


def summary(rows: Iterable[Row], peers: Iterable[str]) -> dict[str, Any]:
    """Geometric means of the speed-ups, and of the copy share at each kind's largest count."""
    rows = list(rows)
    found: dict[str, Any] = {"rows": len(rows), "tuned": sum("tuned" in r.times for r in rows)}
    for peer in peers:
        values = [value for row in rows if (value := row.speedup(peer)) is not None]
        found[peer] = round(geomean(values), 3) if values else None
    shares = [share for row in largest(rows) if (share := row.copy_share) is not None]
    found["copy_share_at_largest"] = round(geomean(shares), 3) if shares else None
    return found


def largest(rows: Iterable[Row]) -> list[Row]:
    """The row of each kind with the most tokens."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        best = found.get((row.template, row.kind))
        if best is None or row.tokens > best.tokens:
            found[(row.template, row.kind)] = row
    return list(found.values())


def _short(value: float | None) -> float | None:
    """Four significant digits: what a reader of a diff can use."""
    return None if value is None else float(f"{value:.4g}")
