"""Timing without a GPU: summaries, paired decisions on synthetic samples, the order of rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from tuner.timing import (
    LEAST_GAIN,
    LEAST_GAIN_US,
    CudaClock,
    HostClock,
    Timing,
    compare_paired,
    interleave_samples,
)

ROUNDS = 21


def noisy(mean: float, deviation: float, seed: int, rounds: int = ROUNDS) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, deviation) for _ in range(rounds)]


def share_faster(pair: Callable[[int], tuple[list[float], list[float]]], seeds: int = 400) -> float:
    return sum(compare_paired(*pair(seed)).faster for seed in range(seeds)) / seeds


def test_noise_is_no_gain() -> None:  # case 11
    assert not compare_paired(noisy(23.49, 0.4, 1), noisy(23.52, 0.4, 2)).faster
    # Three standard errors: about one comparison in a hundred may still be wrong.
    wrong = share_faster(lambda seed: (noisy(23.49, 0.4, seed), noisy(23.52, 0.4, -seed - 1)))
    assert wrong <= 0.02


def test_a_real_gain_is_taken() -> None:  # case 11
    for seed in range(50):
        found = compare_paired(noisy(394, 8, seed), noisy(545, 8, seed + 1000))
        assert found.faster
        assert not found.slower
        assert found.gain == pytest.approx(1 - 394 / 545, abs=0.02)
        back = compare_paired(noisy(545, 8, seed), noisy(394, 8, seed + 1000))
        assert back.slower
        assert not back.faster


def test_a_gain_of_less_than_a_process_moves_is_none() -> None:
    flat = [2.0] * ROUNDS
    assert not compare_paired([2.0 - 0.9 * LEAST_GAIN_US] * ROUNDS, flat).faster
    assert compare_paired([2.0 - 1.1 * LEAST_GAIN_US] * ROUNDS, flat).faster


def test_a_small_gain_is_seen_through_small_noise() -> None:
    assert share_faster(lambda seed: (noisy(97, 1, seed), noisy(100, 1, -seed - 1))) > 0.95


def test_equal_samples_and_less_than_the_least_gain_are_no_gain() -> None:
    flat = [10.0] * ROUNDS
    assert compare_paired(flat, flat).gain == 0
    assert not compare_paired(flat, flat).faster
    almost = [10.0 * (1 - 0.9 * LEAST_GAIN)] * ROUNDS
    assert not compare_paired(almost, flat).faster
    assert compare_paired([10.0 * (1 - 1.1 * LEAST_GAIN)] * ROUNDS, flat).faster


def test_a_clock_that_jumps_between_two_speeds_wins_nothing() -> None:
    def pair(seed: int) -> tuple[list[float], list[float]]:
        draw = random.Random(seed)
        jumps = [draw.choice((95.0, 105.0)) * draw.gauss(1, 0.002) for _ in range(ROUNDS)]
        return jumps, noisy(100, 0.2, -seed - 1)

    assert share_faster(pair) < 0.04
    # The barest majority of fast rounds: MAD is 0 here and says nothing.
    assert not compare_paired([95.0] * 11 + [105.0] * 10, [100.0] * ROUNDS).faster


def test_jumps_that_both_see_do_not_hide_a_gain() -> None:
    draw = random.Random(3)
    clock = [draw.choice((0.8, 1.0)) for _ in range(ROUNDS)]
    ours = [95 * speed * draw.gauss(1, 0.003) for speed in clock]
    theirs = [100 * speed * draw.gauss(1, 0.003) for speed in clock]
    # Two separate medians could not tell: their spread is larger than the gain.
    assert Timing.of(ours).spread > 5
    assert compare_paired(ours, theirs).faster


def test_disturbed_rounds_do_not_decide() -> None:
    ours, theirs = noisy(97, 0.3, 1), noisy(100, 0.3, 2)
    for number in (3, 8, 15):  # another process was on the GPU
        ours[number] *= 6
    assert compare_paired(ours, theirs).faster
    ours, theirs = noisy(100, 0.3, 1), noisy(100, 0.3, 2)
    for number in (3, 8, 15):
        theirs[number] *= 6
    assert not compare_paired(ours, theirs).faster


def test_unpaired_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare_paired([1.0, 2.0], [1.0])


def test_a_nan_never_wins() -> None:
    found = compare_paired([float("nan")] * 5, [1.0] * 5)
    assert not found.faster
    assert not found.slower


def test_summary_of_samples() -> None:
    assert Timing.of([5.0]) == Timing(5.0, 0.0)
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == Timing(4.0, 2.0)
    # One lucky and one spoiled sample move neither figure.
    assert Timing.of([0.1, *[4.0] * 7, 900.0]) == Timing(4.0, 0.0)
    assert Timing.of([3.0, 1.0, 2.0]).median == 2.0
    with pytest.raises(ValueError, match="data"):
        Timing.of([])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_order_rotates_by_round(count: int) -> None:
    asked: list[int] = []

    def sample(contestant: int) -> float:
        asked.append(contestant)
        return float(len(asked))

    rounds = 2 * count
    samples = interleave_samples(range(count), sample, rounds)
    order = [asked[i : i + count] for i in range(0, len(asked), count)]
    assert len(order) == rounds + 1  # one untimed
    for number, places in enumerate(order):
        assert sorted(places) == list(range(count))
        assert places[0] == number % count
    assert [len(one) for one in samples] == [rounds] * count
    # Paired by round, and the untimed round is in none.
    for number in range(rounds):
        assert {int((one[number] - 1) // count) for one in samples} == {number + 1}


def test_drift_favours_nobody() -> None:
    # The clock gets slower by 1 % with every sample: whoever is asked first would win.
    ticks = iter(range(10**6))
    samples = interleave_samples([0, 1, 2], lambda _: 100 * 1.01 ** next(ticks), 21)
    for one in samples:
        for other in samples:
            assert not compare_paired(one, other).faster


def test_host_clock_times_what_it_is_given() -> None:
    runs: list[str] = []
    clock = HostClock()
    assert len(clock.measure([lambda: runs.append("a")], samples=9)) == len(runs) == 3
    both = clock.interleave([[lambda: runs.append("a")], [lambda: runs.append("b")]], rounds=21)
    assert [len(one) for one in both] == [5, 5]
    assert runs.count("b") == 6
    assert all(value > 0 for one in both for value in one)
    assert statistics.median(clock.measure([lambda: sum(range(10**5))])) > 100


@pytest.mark.parametrize(
    ("nbytes", "free", "wanted"),
    [
        (1 << 10, 64 << 30, 32),  # small: one set for every launch of a replay
        (16 << 20, 64 << 30, 13),  # four times a 50 MiB L2
        (1 << 30, 64 << 30, 2),  # large: two, so that no launch meets its own output
        (1 << 30, 5 << 30, 1),  # a quarter of what is free
        (1 << 30, 1 << 20, 1),
        (0, 1 << 30, 32),
    ],
)
def test_sets_follow_the_cache_and_the_memory(
    nbytes: int, free: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = CudaClock.__new__(CudaClock)
    clock.device, clock.l2_bytes = None, 50 << 20
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 80 << 30))
    assert clock.sets_wanted(nbytes) == wanted
