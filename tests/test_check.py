"""The judge itself: what must fail fails, what must pass passes, and memory is watched."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from kernel_templates.base import Inputs, out
from tuner.check import (
    Verdict,
    changed_operands,
    compare,
    gaps_untouched,
    poison,
    snapshot,
    touched_gaps,
)

HALVES = [torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def judge(
    found: torch.Tensor, right: torch.Tensor, same: torch.Tensor | None = None, **options: object
) -> Verdict:
    same = right.to(found.dtype) if same is None else same
    return compare({"y": found}, {"y": right}, {"y": same}, **options)  # type: ignore[arg-type]


def ulps(right: torch.Tensor, count: float, dtype: torch.dtype) -> torch.Tensor:
    """The correctly rounded result, its largest element moved up by that many units there."""
    found = right.to(dtype)
    at = int(right.abs().argmax())
    unit = torch.finfo(dtype).eps * 2 ** math.floor(math.log2(float(right.flatten()[at].abs())))
    found.flatten()[at] += count * unit
    return found


@pytest.mark.parametrize("dtype", HALVES)
def test_the_rounded_result_passes_and_three_units_fail(dtype: torch.dtype) -> None:
    right = draw(16, 64)
    verdict = judge(right.to(dtype), right)
    assert verdict.ok, verdict.reason
    assert verdict.worst_ratio < 2
    wrong = judge(ulps(right, 3, dtype), right)
    assert not wrong.ok
    assert wrong.worst_ratio > 2
    assert wrong.reason is not None
    assert wrong.reason.startswith("y: 1 elements wrong, first at [")
    at = int(right.abs().argmax())
    assert wrong.outputs["y"].first_bad == (at // 64, at % 64)
    assert "limit" in wrong.reason
    assert "same-dtype reference" in wrong.reason


def test_pytorchs_own_error_is_the_yardstick() -> None:
    right = draw(16, 64)
    peer = ulps(right, 3, torch.bfloat16)
    assert judge(ulps(right, 3, torch.bfloat16), right, peer).ok
    assert judge(ulps(right, 5, torch.bfloat16), right, peer).ok
    assert not judge(ulps(right, 9, torch.bfloat16), right, peer).ok


def test_many_small_errors_fail_where_one_may_pass() -> None:
    right = torch.ones(64, 64)
    peer = right.to(torch.bfloat16)
    peer[0, 0] += 2**-6  # one large error of the peer lets single elements be off by as much
    one = right.to(torch.bfloat16)
    one[3, 4] += 2**-6
    assert judge(one, right, peer).ok
    verdict = judge(right.to(torch.bfloat16) + 2**-6, right, peer)
    assert verdict.outputs["y"].bad == 0
    assert verdict.reason is not None
    assert "RMS error" in verdict.reason


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_nan_fails_except_where_the_exact_result_is_nan(dtype: torch.dtype) -> None:
    right = draw(8, 8)
    found = right.to(dtype, copy=True)
    found[2, 5] = math.nan
    verdict = judge(found, right)
    assert not verdict.ok
    assert verdict.outputs["y"].first_bad == (2, 5)
    assert verdict.max_error == math.inf
    # Even where the same-dtype reference has one too.
    assert not judge(found, right, found.clone()).ok
    right[2, 5] = math.nan
    assert judge(found, right).ok
    found[2, 5] = 0.0
    assert not judge(found, right).ok


def test_all_nan_fails() -> None:
    right = draw(4, 4)
    assert not judge(torch.full_like(right, math.nan), right).ok


def test_infinities() -> None:
    right = draw(4, 4)
    right[0, 0], right[0, 1] = math.inf, 1e6  # the latter overflows float16
    good = right.to(torch.float16)
    assert good[0, 1] == math.inf
    assert judge(good, right).ok
    for place, value in (((0, 0), -math.inf), ((0, 0), 65504.0), ((0, 1), -math.inf)):
        bad = good.clone()
        bad[place] = value
        assert not judge(bad, right).ok, (place, value)
    invented = good.clone()
    invented[1, 1] = math.inf
    assert not judge(invented, right).ok
    # The reference overflowed in between, as in a square of a large value.
    assert judge(invented, right, invented.clone()).ok


def test_float32_leaks_are_seen() -> None:  # case 35
    right = draw(4, 4)
    verdict = judge(right, right, right.to(torch.bfloat16))
    assert verdict.reason == "y: dtype torch.float32, reference torch.bfloat16"
    assert math.isnan(verdict.worst_ratio)
    assert math.isnan(verdict.max_error)


def test_shapes_and_names_must_agree() -> None:
    right = draw(4, 4)
    assert "shape (4, 3)" in str(judge(right[:, :3], right, right).reason)
    missing = compare({}, {"y": right}, {"y": right})
    assert missing.reason == "y: the kernel has no such output"
    extra = compare({"y": right, "z": right}, {"y": right}, {"y": right})
    assert extra.reason == "z: the reference has no such output"


def test_exact_outputs() -> None:
    right = torch.arange(12).view(3, 4)
    assert judge(right.clone(), right).ok
    wrong = right.clone()
    wrong[1, 2] += 1  # integers are exact without being declared
    verdict = judge(wrong, right)
    assert verdict.outputs["y"].first_bad == (1, 2)
    assert (verdict.outputs["y"].found, verdict.outputs["y"].wanted) == (7.0, 6.0)
    values = draw(4, 4)
    values[0, 0] = math.nan
    assert judge(values.clone(), values, exact_outputs=("y",)).ok
    nudged = values.clone()
    nudged[3, 3] = torch.nextafter(nudged[3, 3], torch.tensor(math.inf))
    assert judge(nudged, values).ok
    assert not judge(nudged, values, exact_outputs=("y",)).ok


def test_one_bad_output_of_two_is_named() -> None:
    right = draw(4, 4)
    good, bad = right.to(torch.bfloat16), -right.to(torch.bfloat16)
    exact, same = {"a": right, "b": right}, {"a": good, "b": good}
    verdict = compare({"a": good, "b": bad}, exact, same)
    assert verdict.outputs["a"].ok
    assert str(verdict.reason).startswith("b: ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_empty_outputs_pass(dtype: torch.dtype) -> None:
    verdict = judge(torch.empty(0, 64, dtype=dtype), torch.empty(0, 64))
    assert verdict.ok
    assert (verdict.max_error, verdict.worst_ratio) == (0.0, 0.0)
    assert compare({}, {}, {}).ok


def test_zeros_must_be_zeros() -> None:
    right = torch.zeros(4, 4)
    assert judge(right.to(torch.bfloat16), right).ok
    wrong = right.to(torch.bfloat16)
    wrong[0, 3] = 1e-30
    assert judge(wrong, right).outputs["y"].first_bad == (0, 3)


# Memory around operands and outputs


@dataclass
class Padded(Inputs):
    x: torch.Tensor
    y: torch.Tensor | None = out()
    ids: torch.Tensor | None = out()


def padded() -> tuple[Padded, torch.Tensor]:
    """Inputs whose output rows have gaps, and the whole memory of the output."""
    whole = torch.zeros(4, 20, dtype=torch.bfloat16)
    x = draw(4, 24).to(torch.bfloat16)[:, :16]
    return Padded(x, whole[:, :16], torch.zeros(4, dtype=torch.int32)), whole


def test_poison_fills_outputs_and_gaps_and_spares_operands() -> None:
    inputs, whole = padded()
    before = snapshot(inputs)
    poison(inputs)
    assert inputs.y is not None
    assert inputs.ids is not None
    assert whole.isnan().all()
    assert (inputs.ids != 0).all()
    assert (inputs.ids != -1).all()
    assert changed_operands(inputs, before) == []
    inputs.y.copy_(inputs.x)
    inputs.ids.fill_(0)
    assert gaps_untouched(inputs)


@pytest.mark.parametrize("place", [(0, 16), (2, 18), (3, 19)])
def test_writes_between_rows_are_seen(place: tuple[int, int]) -> None:
    inputs, whole = padded()
    poison(inputs)
    whole[place] = 1.0
    assert not gaps_untouched(inputs)
    assert touched_gaps(inputs) == {"y": 2 * (20 * place[0] + place[1])}


def test_a_nan_of_another_pattern_in_a_gap_is_seen() -> None:
    inputs, whole = padded()
    poison(inputs)
    whole[1, 17] = math.nan
    assert not gaps_untouched(inputs)


@pytest.mark.parametrize("place", [(0, 0), (3, 15), (1, 20)])
def test_changed_operands_and_their_gaps_are_seen(place: tuple[int, int]) -> None:
    inputs, _ = padded()
    before = snapshot(inputs)
    torch.as_strided(inputs.x, (4, 24), (24, 1))[place] = 5.0
    assert changed_operands(inputs, before) == ["x"]


def test_in_place_outputs_keep_their_values() -> None:
    x = draw(4, 16)
    inputs = Padded(x, x)
    before = snapshot(inputs)
    poison(inputs)
    assert torch.equal(x, draw(4, 16))
    x.mul_(2)
    assert changed_operands(inputs, before) == []
    assert gaps_untouched(inputs)
