"""One problem measured: who takes part, and their interleaved samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_templates.base import DeviceInfo, record_from_dict, record_to_dict
from tuned_configs.lookup import TableSet
from tuner.compile import template_module
from tuner.run import Job
from tuner.timing import LEAST_GAIN, Comparison, Timing, compare_paired
from tuner.trial import Bench, WrongResultError, compile_stock
from tuner.worker import Fatal

from .fixed import NoFixedLaunchError, fixed
from .result import CONTESTANTS, PEERS, Row

Launches = Sequence[Callable[[], Any]]


class ContextLostError(Exception):
    """The GPU answers nothing but an error any more: this process cannot measure on."""


@dataclass
class Picks:
    """The configs that take part in one problem, by contestant, and why others do not."""

    configs: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    table_tokens: int | None = None


def pick(job: Job, device: DeviceInfo, tables: TableSet) -> Picks:
    """The tuned config that a server would look up, the default, the stock and the fixed one."""
    template, problem = job.template, job.problem
    picks = Picks()
    values = record_to_dict(problem)
    match = tables.lookup(template.name, values, template.source_hash)
    if match is None:
        picks.absent["tuned"] = tables.explain(template.name, values, template.source_hash)
    else:
        try:
            picks.configs["tuned"] = record_from_dict(template.config, match.config)
            picks.table_tokens = match.tokens
        except ValueError as error:
            picks.absent["tuned"] = f"{match.path}: {error}"
    picks.configs["default"] = template.default(problem, device)
    if template.stock_config is not None:
        picks.configs["stock"] = template.stock_config(problem)
    else:
        picks.absent["stock"] = "a server has no kernel of its own here: inductor is the peer"
    try:
        picks.configs["fixed"] = fixed(template.name, problem, device)
    except NoFixedLaunchError as error:
        picks.absent["fixed"] = str(error)
    return picks


class Measurer:
    """Measures problem after problem in this process.

    ``inductor`` adds the compiled reference where it is a server's peer, ``inductor_moe`` also
    where the server has a kernel of its own.  ``check`` verifies every config before timing.
    """

    SEED = 0

    def __init__(
        self,
        bench: Bench,
        rounds: int = 31,
        inductor: bool = True,
        inductor_moe: bool = False,
        check: bool = True,
    ) -> None:
        self.bench, self.rounds, self.check = bench, rounds, check
        self.inductor, self.inductor_moe = inductor, inductor_moe
        #: By kind: the compiled reference and its kernels, or why there is none.
        self._compiled: dict[Any, tuple[Callable[[Any], Any], int] | str] = {}

    def large_copy(self, nbytes: int, samples: int = 15) -> Timing:
        """A device-to-device copy of so many bytes, the faster of the two ways."""
        ways = self.copies(2 * nbytes, 1).values()
        timings = [Timing.of(self.bench.clock.measure(way, samples)) for way in ways]
        return min(timings, key=lambda timing: timing.median)

    def measure(self, job: Job, picks: Picks) -> Row:
        """All contestants of one problem, interleaved and paired."""
        template, bench = job.template, self.bench
        bench.prepare(template_module(template), record_to_dict(job.problem), self.SEED)
        absent = dict(picks.absent)
        contestants: dict[str, Launches] = {}
        kernels: dict[str, int] = {}
        same: dict[str, str] = {}
        first: dict[Any, str] = {}
        for name, config in picks.configs.items():
            if config in first:
                same[name] = first[config]
            elif reason := self._unusable(config):
                absent[name] = reason
                continue
            else:
                first[config] = name
                contestants[name] = [
                    functools.partial(template.launch, inputs, config) for inputs in bench.sets
                ]
            kernels[name] = len(template.calls(bench.sets[0], config))
        found = self._peer(job)
        if isinstance(found, str):
            absent["inductor"] = found
        else:
            compiled, generated = found
            if generated:  # zero: the graph came from a cache that does not say
                kernels["inductor"] = generated
            contestants["inductor"] = [functools.partial(compiled, x) for x in bench.sets]
        nbytes = template.cost(job.problem).bytes
        ways = self.copies(nbytes, len(bench.sets))
        values = bench.clock.interleave([*contestants.values(), *ways.values()], self.rounds)
        samples = dict(zip([*contestants, *ways], values, strict=True))
        # The floor is whichever copies faster: the driver's copy is 1.5x slower at some sizes.
        fastest = min(ways, key=lambda way: Timing.of(samples[way]).median)
        samples["copy"] = samples[fastest]
        samples |= {name: samples[other] for name, other in same.items()}
        return Row(
            template=template.name,
            kind=job.kind,
            problem=record_to_dict(job.problem),
            models=job.models,
            bytes=nbytes,
            times={name: Timing.of(samples[name]) for name in CONTESTANTS if name in samples},
            configs={
                name: record_to_dict(config)
                for name, config in picks.configs.items()
                if name in samples
            },
            kernels=kernels,
            absent=absent,
            against=_against(samples, same),
            table_tokens=picks.table_tokens,
        )

    def _unusable(self, config: Any) -> str | None:
        """Why a config cannot take part: it fails, or its result is wrong."""
        template = self.bench.template
        assert template is not None
        try:
            if self.check:
                self.bench.check(record_to_dict(config))
            else:
                template.launch(self.bench.sets[0], config)
        except WrongResultError as error:
            return f"wrong result: {error}"
        except Exception as error:
            return self.reason(error)
        return None

    def _peer(self, job: Job) -> tuple[Callable[[Any], Any], int] | str:
        """The reference as inductor compiles it, once per kind, and the kernels it generated."""
        if not self.inductor:
            return "not asked for"
        if job.template.stock_config is not None and not self.inductor_moe:
            return "the stock peer is a kernel of the server's own; --inductor-moe adds inductor"
        key = (job.template.name, job.template.kernel_problem(job.problem))
        if key not in self._compiled:
            from torch._inductor import metrics

            before = metrics.generated_kernel_count
            try:
                compiled = compile_stock(job.template, job.problem, self.bench.device)
                kernels = int(metrics.generated_kernel_count) - before
                self._compiled[key] = (compiled, kernels)
            except Exception as error:
                self._compiled[key] = self.reason(error)
        return self._compiled[key]

    def copies(self, nbytes: int, count: int) -> dict[str, Launches]:
        """Two ways to move ``nbytes``, in ``count`` places: half is read, half is written.

        ``driver copy`` is a copy node of the graph, ``kernel copy`` an elementwise kernel.
        """
        words = max(1, -(-nbytes // 8))
        driver: list[Callable[[], Any]] = []
        kernel: list[Callable[[], Any]] = []
        for _ in range(count):
            # Random, as the inputs are: what a bit costs depends on how often it changes.
            source = torch.empty(words, dtype=torch.int32, device=self.bench.device).random_()
            target = torch.empty_like(source)
            driver.append(functools.partial(target.copy_, source))
            kernel.append(functools.partial(torch.bitwise_not, source, out=target))
        return {"driver copy": driver, "kernel copy": kernel}

    def reason(self, error: Exception) -> str:
        """An error in one line; ContextLostError when nothing can be measured after it."""
        try:
            return self.bench.classify(error)[1]
        except Fatal as lost:
            raise ContextLostError(str(lost)) from error


def _against(samples: dict[str, list[float]], same: dict[str, str]) -> dict[str, Comparison]:
    """Tuned against every peer; a peer with the same config is equal by definition."""
    if "tuned" not in samples:
        return {}
    return {
        peer: Comparison(0.0, LEAST_GAIN)
        if same.get(peer) == "tuned"
        else compare_paired(samples["tuned"], samples[peer])
        for peer in PEERS
        if peer in samples
    }
