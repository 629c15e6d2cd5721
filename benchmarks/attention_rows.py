"""What the attention benchmark measures, and what it found."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_templates import attention_decode, attention_prefill
from kernel_templates.attention_problem import BLOCK_SIZES, Problem, problem_kinds
from kernel_templates.base import ModelShape, record_to_dict, template
from search_spaces.base import spaces
from tuner.report import geomean
from tuner.run import Job
from tuner.timing import Comparison, Timing

from . import unified_attention

PHASES = ("prefill", "decode")
#: Contestants of our own, best first: the first that took part is "ours".
OURS = ("tuned", "default", "stock")
PEERS = ("vllm", "vllm_best", "fa4")
CONTESTANTS = (*OURS, *PEERS, "copy")
#: Format of the JSON; raised when a field changes its meaning.
SCHEMA = 1


@dataclass(frozen=True)
class Workload:
    """A batch: ``sequences`` with ``new`` queries each, after ``context`` keys."""

    phase: str
    sequences: int
    new: int
    context: int

    @property
    def name(self) -> str:
        if self.phase == "decode":
            return f"{self.sequences} on {self.context}"
        return f"{self.sequences} x {self.new}" + (f" on {self.context}" if self.context else "")


PREFILL = tuple(
    Workload("prefill", *sizes)
    for sizes in ((8, 1024, 0), (2, 4096, 0), (1, 8192, 0), (1, 2048, 6144))
)
DECODE = tuple(
    Workload("decode", sequences, 1, context)
    for sequences, context in itertools.product((1, 8, 32, 256), (512, 4096, 32768))
)
#: For a dry run: sizes that the interpreter can bear.
TINY = (
    Workload("prefill", 2, 20, 0),
    Workload("prefill", 1, 8, 24),
    Workload("decode", 1, 1, 40),
    Workload("decode", 3, 1, 20),
)
#: Window and type of a dry run, whose contexts are short and whose bf16 is not that of a GPU.
TINY_WINDOW, TINY_DTYPE = 16, "float32"


@dataclass(frozen=True)
class Case:
    """A row to measure: a workload of one kind of layer."""

    workload: Workload
    job: Job
    #: The same problem as the peers see it.
    peer: unified_attention.Problem

    @property
    def asked(self) -> Job:
        """The job with the problem that a server would look up."""
        modules = {"prefill": attention_prefill, "decode": attention_decode}
        problem = modules[self.workload.phase].asked(self.job.problem)
        return dataclasses.replace(self.job, problem=problem)

    @property
    def layers(self) -> str:
        return "sliding" if self.peer.window else "full"

    @property
    def kind(self) -> str:
        problem = self.peer
        window = f", window {problem.window}" if problem.window else ""
        heads = f"{problem.query_heads} Q on {problem.kv_heads} KV"
        blocks = f"blocks of {problem.block_size}"
        return f"{self.layers}, head {problem.head_dim}, {heads}{window}, {blocks}"

    @property
    def name(self) -> str:
        return f"{self.workload.phase} {self.workload.name}, {self.kind}"


def plan(
    models: Sequence[ModelShape],
    phases: Sequence[str],
    blocks: Sequence[int] = BLOCK_SIZES,
    tiny: bool = False,
) -> list[Case]:
    """Every workload of every kind of layer, once, however many models have it."""
    found: dict[tuple[Workload, unified_attention.Problem], list[str]] = {}
    workloads = TINY if tiny else (*PREFILL, *DECODE)
    for phase, slots, model in itertools.product(phases, blocks, models):
        sliding = [layer for layer in model.layers if layer.window] or model.layers
        kv_heads = max(layer.kv_heads for layer in sliding)
        for fields in problem_kinds(model, [slots]):
            for workload in workloads:
                if workload.phase != phase:
                    continue
                tokens = workload.sequences * workload.new
                problem = Problem(tokens, workload.new, workload.context, **fields)  # type: ignore[arg-type]
                if tiny:
                    window = min(problem.window, TINY_WINDOW)
                    problem = dataclasses.replace(problem, window=window, dtype=TINY_DTYPE)
                peer = unified_attention.Problem.of(problem, kv_heads)
                found.setdefault((workload, peer), []).append(model.name)
    return [
        Case(workload, _job(workload.phase, peer, tuple(names)), peer)
        for (workload, peer), names in found.items()
    ]


def _job(phase: str, peer: unified_attention.Problem, models: tuple[str, ...]) -> Job:
    name = f"attention_{phase}"
    values = record_to_dict(peer)
    del values["split_up_to"]
    return Job(template(name), spaces()[name], Problem(**values), models)


@dataclass(frozen=True)
class Row:
    """One case's times in microseconds, by contestant, and why others have none.

    ``configs`` are ours and the constants of ``vllm_best``; ``errors`` the largest relative error
    of any (token, head) of each contestant; ``against`` compares ours with each peer, paired.
    ``table_tokens`` is the tuned token count that the look-up answered with.
    """

    case: Case
    bytes: int
    flops: int
    times: Mapping[str, Timing]
    configs: Mapping[str, Mapping[str, Any]]
    absent: Mapping[str, str]
    errors: Mapping[str, float]
    against: Mapping[str, Comparison]
    rounds: int
    table_tokens: int | None = None

    @property
    def ours(self) -> str | None:
        """The contestant that stands for us."""
        return next((name for name in OURS if name in self.times), None)

    def speedup(self, peer: str) -> float | None:
        """The peer's median time over ours; None when either is missing."""
        if self.ours is None or peer not in self.times:
            return None
        return self.times[peer].median / self.times[self.ours].median

    def tflops(self, name: str) -> float | None:
        """10^12 operations a second of a contestant."""
        return self.flops / self.times[name].median / 1e6 if name in self.times else None

    def tb_per_s(self, name: str) -> float | None:
        """Least bytes of the problem over the contestant's time, 10^12 a second."""
        return self.bytes / self.times[name].median / 1e6 if name in self.times else None

    def slower_than(self) -> list[str]:
        """Peers that beat ours by more than the noise."""
        return [peer for peer in PEERS if peer in self.against and self.against[peer].slower]

    def to_dict(self) -> dict[str, Any]:
        return {
            "phase": self.case.workload.phase,
            "workload": self.case.workload.name,
            "kind": self.case.kind,
            "models": list(self.case.job.models),
            "problem": record_to_dict(self.case.peer),
            "bytes": self.bytes,
            "flops": self.flops,
            "ours": self.ours,
            "table_tokens": self.table_tokens,
            "rounds": self.rounds,
            "times_us": {
                name: {"median": short(time.median), "spread": short(time.spread)}
                for name, time in self.times.items()
            },
            "tflops": {name: short(self.tflops(name)) for name in self.times if name != "copy"},
            "tb_per_s": {name: short(self.tb_per_s(name)) for name in self.times},
            "copy_share": short(self.speedup("copy")),
            "speedup": {peer: short(self.speedup(peer)) for peer in PEERS if peer in self.times},
            "paired": {
                peer: {"gain": short(found.gain), "noise": short(found.noise)}
                for peer, found in self.against.items()
            },
            "slower_than": self.slower_than(),
            "configs": {name: dict(config) for name, config in self.configs.items()},
            "relative_errors": {name: short(value) for name, value in self.errors.items()},
            "absent": dict(self.absent),
        }


@dataclass
class Report:
    """A whole run.  ``errors`` are (row, reason), ``left`` the rows that the budget did not reach,
    ``skipped`` (row, reason) those that do not fit the memory."""

    environment: dict[str, Any]
    dry_run: bool
    rows: list[Row] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, phase: str) -> list[Row]:
        return [row for row in self.rows if row.case.workload.phase == phase]

    def behind(self) -> list[str]:
        """One line per row and peer that beats ours beyond the noise."""
        lines = []
        for row in self.rows:
            for peer in row.slower_than():
                found, ours = row.against[peer], row.times[row.ours or ""].median
                lines.append(
                    f"{row.case.name}: slower than {peer} by {-found.gain:.1%} (noise "
                    f"{found.noise:.1%}; {ours:.2f} against {row.times[peer].median:.2f} us)"
                )
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "benchmark": "attention",
            "dry_run": self.dry_run,
            "environment": self.environment,
            "summary": [
                {"phase": phase, "layers": layers, **summary(rows)}
                for phase, layers, rows in groups(self.rows)
            ],
            "behind": self.behind(),
            "errors": [list(error) for error in self.errors],
            "skipped": [list(error) for error in self.skipped],
            "left_by_budget": self.left,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
            "rows": [row.to_dict() for row in self.rows],
        }


def groups(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """(phase, sliding or full, rows), none of them empty."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.case.workload.phase, row.case.layers), []).append(row)
    return [(*key, members) for key, members in found.items()]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric means and least values of the speed-ups; the range of ours in TFLOP/s and of the
    copy share."""
    found: dict[str, Any] = {"rows": len(rows)}
    for peer in PEERS:
        values = [value for row in rows if (value := row.speedup(peer)) is not None]
        mean = {"mean": short(geomean(values)), "least": short(min(values))} if values else None
        found[peer] = mean
    tflops = [value for row in rows if row.ours and (value := row.tflops(row.ours))]
    shares = [value for row in rows if (value := row.speedup("copy"))]
    found["tflops"] = [short(min(tflops)), short(max(tflops))] if tflops else None
    found["copy_share"] = [short(min(shares)), short(max(shares))] if shares else None
    return found


def short(value: float | None) -> float | None:
    """Four significant digits: what a reader of a diff can use."""
    return None if value is None else float(f"{value:.4g}")
