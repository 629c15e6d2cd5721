"""Stock and tuned vLLM side by side: same weights, same prompts, rounds in turn.

Every variant is an engine in a process of its own that stays alive; rounds of all variants follow
each other, in an order that rotates, so that a clock that drifts meets all of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .engine import Engine, EngineFailed

#: Seconds until an engine must have started, and until it must have answered.
START_SECONDS, ANSWER_SECONDS = 1800.0, 900.0

PLUGIN = {"stock": "0", "tuned": "1"}


@dataclass(frozen=True)
class Variant:
    """``PLUGIN[:BACKEND][+fast|+nofast][+blockN]``: what an engine is started with.

    ``fast`` is fast prefill: None leaves it to vLLM and the plugin.
    """

    text: str
    plugin: str
    backend: str | None = None
    fast: bool | None = None
    block_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Variant:
        """ValueError naming the part that is none."""
        head, *extras = text.split("+")
        plugin, _, backend = head.partition(":")
        if plugin not in PLUGIN:
            raise ValueError(f"variant {text!r} begins with {plugin!r}, wanted stock or tuned")
        if backend and not re.fullmatch(r"[A-Z][A-Z0-9_]*", backend):
            raise ValueError(
                f"variant {text!r} has backend {backend!r}, wanted a name such as TRITON_ATTN"
            )
        fast: bool | None = None
        block: int | None = None
        for extra in extras:
            if extra in ("fast", "nofast"):
                fast = extra == "fast"
            elif match := re.fullmatch(r"block(\d{1,4})", extra):
                block = int(match[1])
            else:
                raise ValueError(
                    f"variant {text!r} has +{extra}, wanted +fast, +nofast or +block64"
                )
        return cls(text, plugin, backend or None, fast, block)

    def settings(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        found: dict[str, Any] = {}
        if self.backend:
            found["attention_config"] = {"backend": self.backend}
        if self.fast:
            found["kv_sharing_fast_prefill"] = True
        if self.block_size:
            found["block_size"] = self.block_size
        return found

    def environment(self) -> dict[str, str]:
        # A cache of compiled graphs of its own: engines side by side may have equal keys.
        cache = os.environ.get("VLLM_CACHE_ROOT") or os.path.expanduser("~/.cache/vllm")
        found = {
            "GEMMA_TUNE": PLUGIN[self.plugin],
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": os.path.join(cache, "gemma-tune-bench", slug(self.text)),
        }
        if self.fast is False:
            found["GEMMA_TUNE_FAST_PREFILL"] = "0"
        return found


def slug(text: str) -> str:
    """A variant's name as a file's."""
    return re.sub(r"\W+", "_", text)


@dataclass(frozen=True)
class Workload:
    """``sequences`` prompts of ``prompt_tokens`` at once, ``new_tokens`` answered to each.

    ``profiled`` is the same with less to do, for the one pass under the profiler.
    """

    name: str
    sequences: int
    prompt_tokens: int
    new_tokens: int

    @property
    def counts_prompts(self) -> bool:
        """Whether its speed is that of prompt tokens, else of new ones."""
        return self.new_tokens == 1

    def profiled(self) -> Workload:
        if self.counts_prompts:
            fewer = max(1, min(self.sequences, 65536 // self.prompt_tokens))
            return Workload(self.name, fewer, self.prompt_tokens, 1)
        return Workload(self.name, self.sequences, self.prompt_tokens, min(self.new_tokens, 33))


WORKLOADS = {
    "prefill": Workload("prefill", 256, 1024, 1),
    "prefill4096": Workload("prefill4096", 64, 4096, 1),
    **{f"decode{n}": Workload(f"decode{n}", n, 128, 256) for n in (1, 8, 32, 256)},
}


def parse_workload(text: str) -> Workload:
    """A name of :data:`WORKLOADS`, or ``SEQUENCESxPROMPT+NEW``; ValueError for neither."""
    if text in WORKLOADS:
        return WORKLOADS[text]
    match = re.fullmatch(r"(\d{1,5})x(\d{1,6})\+(\d{1,6})", text)
    numbers = [int(group) for group in match.groups()] if match else []
    if not numbers or min(numbers) < 1:
        names = ", ".join(WORKLOADS)
        raise ValueError(f"workload {text!r}, wanted {names} or SEQUENCESxPROMPT+NEW: 16x512+64")
    return Workload(text, *numbers)


@dataclass
class Measured:
    """What one variant did with one workload: a run per round, and one under the profiler."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    kernels: dict[str, Any] | None = None

    def speeds(self, workload: Workload) -> list[float]:
        """Tokens per second of each round."""
        key = "prompt_tokens" if workload.counts_prompts else "new_tokens"
        return [run[key] / run["seconds"] for run in self.runs]


@dataclass
class Outcome:
    """Everything measured; ``failed`` says why a variant is missing or incomplete."""

    variants: list[Variant]
    workloads: list[Workload]
    measured: dict[tuple[str, str], Measured] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    summaries: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def measure(
    variants: Sequence[Variant],
    workloads: Sequence[Workload],
    settings: dict[str, Any],
    logs: Path,
    rounds: int,
    budget: float | None = None,
    profile: bool = True,
    say: Callable[[str], None] = print,
    start: Callable[..., Engine] = Engine,
) -> Outcome:
    """Start all variants at once, then let them work in turn.

    ``settings`` go to every engine.  No further round is begun after ``budget`` seconds, starts not
    counted.  A variant that fails is left out from then on and the others go on.
    """
    outcome = Outcome(list(variants), list(workloads))
    with _engines(outcome, settings, logs, say, start) as engines:
        began = time.monotonic()
        for index in range(rounds + 1):  # round 0 warms up and is not counted
            if index > 1 and budget is not None and time.monotonic() - began > budget:
                outcome.notes.append(f"the budget ended after {index - 1} of {rounds} rounds")
                break
            for workload in workloads:
                for name in _rotated(list(engines), index):
                    _round(outcome, engines, name, workload, index)
            if index:
                say(f"round {index} of {rounds} done, {time.monotonic() - began:.0f} s")
        for workload in workloads if profile else ():
            for name in list(engines):
                _profile(outcome, engines, name, workload)
    return outcome


@contextlib.contextmanager
def _engines(
    outcome: Outcome,
    settings: dict[str, Any],
    logs: Path,
    say: Callable[[str], None],
    start: Callable[..., Engine],
) -> Iterator[dict[str, Engine]]:
    """The engines that started, by variant; all are ended in the end."""
    logs.mkdir(parents=True, exist_ok=True)
    started: dict[str, Engine] = {}
    try:
        for variant in outcome.variants:
            path = logs / f"{slug(variant.text)}.log"
            started[variant.text] = start(
                variant.text, {**settings, **variant.settings()}, variant.environment(), path
            )
        began = time.monotonic()

        def wait(name: str) -> tuple[str, dict[str, Any] | str]:
            try:
                return name, started[name].answer(START_SECONDS)
            except EngineFailed as error:
                return name, str(error)

        with ThreadPoolExecutor(max(1, len(started))) as threads:
            for future in [threads.submit(wait, name) for name in started]:
                name, answer = future.result()
                if isinstance(answer, str):
                    outcome.failed[name] = answer
                    say(answer)
                    continue
                outcome.facts[name] = answer
                outcome.summaries[name] = started[name].said()
                say(f"{name}: ready after {time.monotonic() - began:.0f} s")
        for name in outcome.failed:
            started[name].close()
        yield {name: each for name, each in started.items() if name not in outcome.failed}
    finally:
        for engine in started.values():
            engine.close(0.5)


def _rotated(names: list[str], turn: int) -> list[str]:
    at = turn % len(names) if names else 0
    return names[at:] + names[:at]


def _request(workload: Workload, seed: str, do: str) -> dict[str, Any]:
    return {
        "do": do,
        "sequences": workload.sequences,
        "prompt_tokens": workload.prompt_tokens,
        "new_tokens": workload.new_tokens,
        "seed": seed,
    }


def _round(
    outcome: Outcome, engines: dict[str, Engine], name: str, workload: Workload, index: int
) -> None:
    # The same prompts for every variant, other ones in every round.
    answer = _ask(outcome, engines, name, _request(workload, f"{workload.name} {index}", "run"))
    if answer is not None and index:
        outcome.measured.setdefault((name, workload.name), Measured()).runs.append(answer)


def _profile(outcome: Outcome, engines: dict[str, Engine], name: str, workload: Workload) -> None:
    request = _request(workload.profiled(), f"{workload.name} profile", "profile")
    answer = _ask(outcome, engines, name, request)
    if answer is not None and answer.get("kernels"):
        kernels = {**answer["kernels"], "steps": answer["steps"]}
        outcome.measured.setdefault((name, workload.name), Measured()).kernels = kernels


def _ask(
    outcome: Outcome, engines: dict[str, Engine], name: str, request: dict[str, Any]
) -> dict[str, Any] | None:
    try:
        return engines[name].ask(request, ANSWER_SECONDS)
    except EngineFailed as error:
        outcome.failed[name] = str(error)
        engines.pop(name).close()
        return None


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, half the range of fewer than four values."""
    if len(values) < 4:
        return (max(values) - min(values)) / 2
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2
