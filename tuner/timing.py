"""Time launches on a GPU: CUDA graphs, cold inputs, medians, paired comparisons.

One timed sample is the replay of a CUDA graph that runs the kernel once on each of several input
sets; the L2 cache is flushed before each replay, outside the timed region, and within a replay
every launch meets inputs that no earlier launch of that replay has touched (as far as memory
allows).  So every launch reads its operands from device memory, as a server's does after a matrix
product has streamed its weights through the cache, and launch gaps are those of a captured graph.

Decisions between configs come from :func:`compare_paired` on interleaved samples, never from two
separate medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: A gain below this share of the default's time is never called a gain: clocks, temperature and
#: placement in memory move medians by as much between two runs of the same binary.
LEAST_GAIN = 0.01

#: Nor is one below so many microseconds.  Of 37 kernels under 6 us on an H200, each with a gain
#: beyond the noise of its own process (0.08 us on average), the gains in a second process were 0
#: on average, with a standard deviation of 0.09 us; gains of kernels above 6 us came again.
LEAST_GAIN_US = 0.1


@dataclass(frozen=True)
class Timing:
    """Time of one launch in microseconds: median and spread (half the interquartile range)."""

    median: float
    spread: float

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """Summary of raw samples; ValueError when there are none."""
        if len(samples) < 2:
            return Timing(statistics.median(samples), 0.0)
        low, _, high = statistics.quantiles(samples, n=4)
        return Timing(statistics.median(samples), (high - low) / 2)


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of a candidate with a baseline.

    ``gain`` is the median share of the baseline's time that the candidate saves (negative: slower),
    ``noise`` the share below which a gain means nothing.
    """

    gain: float
    noise: float

    @property
    def faster(self) -> bool:
        return self.gain > self.noise

    @property
    def slower(self) -> bool:
        return -self.gain > self.noise


def compare_paired(candidate: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Compare samples taken in the same rounds, in microseconds.

    The gain is the median of the per-round gains; the noise is three standard errors of that
    median (1.2533 x 1.4826 x MAD / sqrt(n), the normal approximation), at least
    :data:`LEAST_GAIN` and :data:`LEAST_GAIN_US`.  Medians make both insensitive to a few disturbed
    rounds.  Gains that fall into two clusters (a clock that jumps) have a MAD of 0; hence the noise
    also reaches from the median to the gain that is two standard deviations of a binomial away, so
    that whoever wins has won about three rounds out of four.
    """
    gains = sorted(1.0 - c / b for c, b in zip(candidate, baseline, strict=True))
    gain = statistics.median(gains)
    deviation = statistics.median(abs(g - gain) for g in gains)
    error = 1.2533 * 1.4826 * deviation / len(gains) ** 0.5
    away = max(0, int(len(gains) / 2 - len(gains) ** 0.5))
    reach = gain - gains[away] if gain > 0 else gains[-1 - away] - gain
    least = max(LEAST_GAIN, LEAST_GAIN_US / statistics.median(baseline))
    return Comparison(gain, max(least, 3.0 * error, reach))


class CudaClock:
    """Timer for kernels on the current CUDA device."""

    #: Launches per replay where memory allows; enough to make the replay's own start-up small.
    LAUNCHES = 32
    #: Longest replay worth having, in microseconds; big kernels get fewer launches.
    REPLAY_US = 1500.0

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        self.device = device
        # Written, not read, so that dirty lines of the previous work are pushed out too.
        self._flush = torch.empty(max(4 * l2_bytes, 64 << 20), dtype=torch.uint8, device=device)
        self.l2_bytes = l2_bytes

    def sets_wanted(self, nbytes: int) -> int:
        """How many input sets of that size make every launch of a replay find its inputs cold."""
        free, _ = torch.cuda.mem_get_info(self.device)
        affordable = max(1, int(free * 0.25) // max(1, nbytes))
        # Past four times the L2 further sets change nothing: rotation alone evicts.
        enough = max(2, min(self.LAUNCHES, -(-4 * self.l2_bytes // max(1, nbytes))))
        return min(affordable, enough)

    def graph(self, launches: Sequence[Callable[[], Any]]) -> ReplayGraph:
        """Capture the launches, after two warm-up runs of the first."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            launches[0]()
            begin, end = _events()
            begin.record()
            launches[0]()
            end.record()
            end.synchronize()
            once = max(1.0, begin.elapsed_time(end) * 1e3)
            wanted = max(1, min(self.LAUNCHES, int(self.REPLAY_US / once)))
            repeats = [launches[i % len(launches)] for i in range(wanted)]
            graph = torch.cuda.CUDAGraph()
            # Not `with torch.cuda.graph(...)`, which collects garbage and empties the allocator's
            # cache each time: far longer than the capture itself.
            graph.capture_begin()
            try:
                for launch in repeats:
                    launch()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return ReplayGraph(graph, wanted)

    def sample(self, replay: ReplayGraph) -> float:
        """One timed replay after a flush of the cache: microseconds per launch."""
        begin, end = _events()
        self._flush.fill_(1)
        begin.record()
        replay.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / replay.launches

    def measure(self, launches: Sequence[Callable[[], Any]], samples: int = 9) -> list[float]:
        """Microseconds per launch, ``samples`` times, after two untimed replays."""
        replay = self.graph(launches)
        for _ in range(2):
            self.sample(replay)
        return [self.sample(replay) for _ in range(samples)]

    def interleave(
        self, contestants: Sequence[Sequence[Callable[[], Any]]], rounds: int = 21
    ) -> list[list[float]]:
        """Time several kernels in turn, ``rounds`` times, in an order that rotates by round.

        Returns one list of samples per contestant, paired by round.
        """
        return interleave_samples(
            [self.graph(launches) for launches in contestants], self.sample, rounds
        )


@dataclass(frozen=True)
class ReplayGraph:
    """A captured graph and how many launches it replays."""

    graph: Any
    launches: int


class HostClock:
    """Timer for kernels that run on the host (the interpreter): tests only, never emitted."""

    def sets_wanted(self, nbytes: int) -> int:
        return 1

    def measure(self, launches: Sequence[Callable[[], Any]], samples: int = 9) -> list[float]:
        return [self._once(launches[0]) for _ in range(min(samples, 3))]

    def interleave(
        self, contestants: Sequence[Sequence[Callable[[], Any]]], rounds: int = 21
    ) -> list[list[float]]:
        return interleave_samples(
            [launches[0] for launches in contestants], self._once, min(rounds, 5)
        )

    @staticmethod
    def _once(launch: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        launch()
        return (time.perf_counter() - begin) * 1e6


def interleave_samples(
    contestants: Sequence[Any], sample: Callable[[Any], float], rounds: int
) -> list[list[float]]:
    """Sample contestants round by round in a rotating order, after one untimed round."""
    samples: list[list[float]] = [[] for _ in contestants]
    count = len(contestants)
    for number in range(rounds + 1):
        for place in range(count):
            index = (place + number) % count
            value = sample(contestants[index])
            if number:
                samples[index].append(value)
    return samples


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
