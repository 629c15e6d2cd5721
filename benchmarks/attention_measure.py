"""One row of the attention benchmark: every contestant checked, then timed in turn."""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernel_templates.attention_problem import NO_BLOCK, AttentionInputs
from kernel_templates.base import KernelTemplate, record_to_dict
from tuner.check import poison
from tuner.timing import LEAST_GAIN, Comparison, Timing, compare_paired
from tuner.trial import Bench

from . import flash_attention, unified_attention
from .attention_rows import CONTESTANTS, OURS, PEERS, Case, Row
from .measure import ContextLostError, Launches, Measurer, Picks
from .unified_attention import Constants

#: Largest error of a (token, head) vector, relative to its length.  Probabilities and results in
#: bf16 cost 0.0025; one key too many or too few in a window of 1024 costs 0.024 or more in the
#: worst of 8 vectors, and more in that of many (simulated with normally distributed scores).
TOLERANCE = 0.01
WRONG = "wrong result"
#: Inputs of more bytes are cold after a launch of their own: one set is enough.
LARGE = 1 << 29
#: A longer copy is measured on so many bytes, and its time scaled.
COPY_MOST = 1 << 30
#: Needed beside the inputs: pieces of the reference, the copy, peers' scratch.
RESERVE = 6 << 30
#: (microseconds of the slowest launch, samples of each contestant from there on).
FEW = ((5000.0, 5), (200.0, 11))


class Peers:
    """The peers that can run here.  ``absent`` has the reason of each one that cannot."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self.absent: dict[str, str] = {}
        for peer in PEERS:
            reason = None if peer in wanted else "not asked for"
            if reason is None:
                reason = _import_error(peer)
            if reason is not None:
                self.absent[peer] = reason

    def __contains__(self, peer: str) -> bool:
        return peer not in self.absent


def _import_error(peer: str) -> str | None:
    try:
        if peer == "fa4":
            return flash_attention.unavailable()
        importlib.import_module(unified_attention.MODULE)
    # A package for another machine fails in ways of its own: a library, an operator, a driver.
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


class RowMeasurer:
    """Measures row after row in this process."""

    SEED = 0

    def __init__(self, bench: Bench, peers: Peers, rounds: int) -> None:
        self.bench, self.peers, self.rounds = bench, peers, rounds
        self.base = Measurer(bench, rounds, inductor=False)
        self._disk = True

    def measure(self, case: Case, picks: Picks) -> Row:
        """All contestants of one case, interleaved and paired; MemoryError with the figures."""
        template, problem = case.job.template, case.job.problem
        meta = template.make_inputs(problem, 0, torch.device("meta"), 0)
        self._refuse_if_too_large(meta.nbytes())
        sets = self._inputs(case, meta.nbytes())
        exact = template.reference(sets[0].upcast())["attended"]
        contest = _Contest(self.base, sets[0], exact, dict(self.peers.absent))
        same: dict[str, str] = {}
        contest.absent |= {name: picks.absent[name] for name in OURS if name in picks.absent}
        for name, config in ((name, picks.configs[name]) for name in OURS if name in picks.configs):
            equal = [other for other, found in contest.configs.items() if found == config]
            if equal:
                same[name] = equal[0]
            elif contest.enter(name, functools.partial(_ours, template, config), sets):
                contest.configs[name] = config
        for inputs in sets:
            make_readable(inputs)
        self._peers(contest, case, sets)
        longest = max(contest.once.values(), default=0.0)
        fewest = next((count for least, count in FEW if longest >= least), self.rounds)
        rounds = min(self.rounds, fewest)
        cost = template.cost(problem)
        samples = self._samples(contest, cost.bytes, len(sets), rounds)
        samples |= {name: samples[other] for name, other in same.items()}
        configs = {name: record_to_dict(found) for name, found in contest.configs.items()}
        configs |= {name: configs[other] for name, other in same.items()}
        return Row(
            case=case,
            bytes=cost.bytes,
            flops=cost.flops,
            times={name: Timing.of(samples[name]) for name in CONTESTANTS if name in samples},
            configs=configs,
            absent=contest.absent,
            errors=contest.errors,
            against=_against(samples),
            rounds=rounds,
            table_tokens=picks.table_tokens,
        )

    def _refuse_if_too_large(self, nbytes: int) -> None:
        if self.bench.device.type != "cuda":
            return
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.bench.device)
        if nbytes + RESERVE > free:
            # Errors of an earlier row may keep its inputs alive in a cycle.
            gc.collect()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.bench.device)
        if nbytes + RESERVE > free:
            raise MemoryError(
                f"{nbytes / 2**30:.1f} GiB of inputs and {RESERVE / 2**30:.0f} GiB beside them, "
                f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
            )

    def _inputs(self, case: Case, nbytes: int) -> list[Any]:
        count = 1 if nbytes > LARGE else self.bench.clock.sets_wanted(nbytes)
        make, problem = case.job.template.make_inputs, case.job.problem
        return [make(problem, self.SEED + i, self.bench.device, 0) for i in range(count)]

    def _peers(self, contest: _Contest, case: Case, sets: Sequence[Any]) -> None:
        problem = case.peer
        if "vllm" in self.peers:
            contest.enter("vllm", functools.partial(_unified, problem), sets)
        if "vllm_best" in self.peers:
            if case.workload.phase == "prefill":
                self._best(contest, case, sets)
            else:
                contest.absent["vllm_best"] = "swept in prefill only"
        if "fa4" in self.peers:
            enter = functools.partial(
                contest.enter, "fa4", functools.partial(flash_attention.launch, problem), sets
            )
            if not enter() and not contest.absent["fa4"].startswith(WRONG) and self._disk:
                # Once: the kernels on the disk may not be loadable here.
                self._disk = False
                flash_attention.forget_disk()
                enter()

    def _best(self, contest: _Contest, case: Case, sets: Sequence[Any]) -> None:
        """The fastest of the constants that work here; vLLM's own are among them."""
        tried: dict[Constants, tuple[float, float, Launches]] = {}
        for constants in unified_attention.candidates(case.peer):
            make = functools.partial(_swept, case.peer, constants)
            if contest.enter("vllm_best", make, sets):
                tried[constants] = contest.taken("vllm_best")
        if tried:
            best = min(tried, key=lambda constants: tried[constants][0])
            contest.configs["vllm_best"] = best
            contest.take("vllm_best", *tried[best])

    def _samples(
        self, contest: _Contest, nbytes: int, count: int, rounds: int
    ) -> dict[str, list[float]]:
        """Interleaved samples of all contestants and of the faster copy."""
        part = min(nbytes, COPY_MOST)
        ways = self.base.copies(part, count)
        values = self.bench.clock.interleave([*contest.launches.values(), *ways.values()], rounds)
        samples = dict(zip([*contest.launches, *ways], values, strict=True))
        fastest = min(ways, key=lambda way: Timing.of(samples[way]).median)
        samples["copy"] = [sample * nbytes / part for sample in samples[fastest]]
        return samples


class _Contest:
    """The contestants of a row as they are admitted: each must be right and must run."""

    def __init__(
        self, base: Measurer, first: Any, exact: torch.Tensor, absent: dict[str, str]
    ) -> None:
        self.base, self.first, self.exact, self.absent = base, first, exact, absent
        self.launches: dict[str, Launches] = {}
        self.configs: dict[str, Any] = {}
        self.errors: dict[str, float] = {}
        self.once: dict[str, float] = {}

    def enter(
        self, name: str, make: Callable[[Any], Callable[[], Any]], sets: Sequence[Any]
    ) -> bool:
        """Check the launch on the first inputs and time it once; False with the reason noted."""
        try:
            launches = [make(inputs) for inputs in sets]
            poison(self.first)
            launches[0]()
            error = relative_error(self.first.attended, self.exact)
            if not error <= TOLERANCE:
                self.absent[name] = f"{WRONG}: relative error {error:.3g}, limit {TOLERANCE}"
                return False
            once = Timing.of(self.base.bench.clock.measure(launches, 3)).median
        except ContextLostError:
            raise
        except Exception as failure:
            self.absent[name] = self.base.reason(failure)
            return False
        self.take(name, once, error, launches)
        return True

    def take(self, name: str, once: float, error: float, launches: Launches) -> None:
        """Admit a contestant whose launches are known to be right."""
        self.absent.pop(name, None)
        self.once[name], self.errors[name], self.launches[name] = once, error, launches

    def taken(self, name: str) -> tuple[float, float, Launches]:
        """What :meth:`take` was given: microseconds of a launch, relative error, launches."""
        return self.once[name], self.errors[name], self.launches[name]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest length of an error over that of the exact vector, of all (token, head) pairs.

    NaN where anything is: compare so that a NaN fails.
    """
    difference = torch.linalg.vector_norm(found.float() - exact.float(), dim=-1)
    return float((difference / torch.linalg.vector_norm(exact.float(), dim=-1)).max())


def make_readable(inputs: AttentionInputs) -> None:
    """Zeros where no query looks, and blocks that exist.

    The templates' inputs hold NaN there, and name no block, which shows that our kernels read
    neither; the peers count on the finite values and the valid block ids that a server has.
    """
    inputs.keys.nan_to_num_(nan=0.0)
    inputs.values.nan_to_num_(nan=0.0)
    inputs.block_table.masked_fill_(inputs.block_table == NO_BLOCK, 0)


def _ours(
    template: KernelTemplate[Any, Any], config: Any, inputs: AttentionInputs
) -> Callable[[], Any]:
    return functools.partial(template.launch, inputs, config)


def _unified(problem: unified_attention.Problem, inputs: AttentionInputs) -> Callable[[], Any]:
    module = importlib.import_module(unified_attention.MODULE)
    arguments = unified_attention.operands(problem, inputs)
    return functools.partial(module.unified_attention, **arguments)


def _swept(
    problem: unified_attention.Problem, constants: Constants, inputs: AttentionInputs
) -> Callable[[], Any]:
    calls = unified_attention.launches(unified_attention.operands(problem, inputs), constants)

    def run() -> None:
        for call in calls:
            call.run()

    return run


def _against(samples: dict[str, list[float]]) -> dict[str, Comparison]:
    ours = next((name for name in OURS if name in samples), None)
    if ours is None:
        return {}
    return {
        peer: Comparison(0.0, LEAST_GAIN)
        if samples[peer] is samples[ours]
        else compare_paired(samples[ours], samples[peer])
        for peer in (*OURS, *PEERS)
        if peer in samples and peer != ours
    }
