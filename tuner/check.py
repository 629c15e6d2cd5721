"""Is a kernel's result right?  Compared with float32, judged by PyTorch's own error.

The yardstick is what PyTorch loses in the same dtype: an output passes when its maximum error
against the exact (float32) result, and its RMS error, are each at most :data:`RATIO` times those of
the same-dtype result, plus a floor.  The floor is half a unit in the last place of the output's
dtype, so that a correctly rounded result always passes, plus :data:`FLOAT32_ULPS` units of float32,
because the exact result is itself a float32 sum in some order; both are taken at the largest
magnitude of the exact output.  Integers, and outputs declared exact, must agree bit for bit (NaN
agrees with NaN).

Everything here is torch only, runs on the tensors' device, and copies to the host once a call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernel_templates.base import Inputs

#: Largest allowed ratio of our error to the same-dtype reference's.
RATIO = 2.0
#: Part of the floor that covers the order of float32 sums in the exact result itself.
FLOAT32_ULPS = 16
_FLOAT32_EPS = torch.finfo(torch.float32).eps
# All bits set is NaN in every floating-point format; for integers a pattern that is no likely
# result (-1 is one: it marks padding).
_FLOAT_POISON, _INTEGER_POISON = 0xFF, 0xA5


@dataclass(frozen=True)
class OutputError:
    """How far one output is from the exact result.

    ``limit`` and ``rms_limit`` are what was allowed, ``yardstick`` and ``rms_yardstick`` the
    same-dtype reference's own errors.  ``bad`` counts the elements beyond ``limit``; ``first_bad``
    are the coordinates of the first, where ``found`` stood instead of ``wanted``.
    """

    name: str
    max_error: float
    rms_error: float
    yardstick: float
    rms_yardstick: float
    limit: float
    rms_limit: float
    bad: int
    first_bad: tuple[int, ...] | None
    found: float
    wanted: float
    fault: str | None = None

    @property
    def ok(self) -> bool:
        return self.reason is None

    @property
    def ratio(self) -> float:
        """Max error in units of the same-dtype reference's, floor included; 2 is the limit."""
        if self.fault is not None:
            return math.nan
        if self.limit == 0:
            return 0.0 if self.max_error == 0 else math.inf
        return RATIO * self.max_error / self.limit

    @property
    def reason(self) -> str | None:
        """What is wrong, with the numbers, or None."""
        if self.fault is not None:
            return f"{self.name}: {self.fault}"
        if self.bad:
            return (
                f"{self.name}: {self.bad} elements wrong, first at {list(self.first_bad or ())}: "
                f"{self.found:g}, wanted {self.wanted:g}; "
                f"max error {self.max_error:.3g}, limit {self.limit:.3g} "
                f"(same-dtype reference {self.yardstick:.3g}); RMS error {self.rms_error:.3g}"
            )
        # Negated so that a NaN fails.
        if not self.rms_error <= self.rms_limit:
            return (
                f"{self.name}: RMS error {self.rms_error:.3g}, limit {self.rms_limit:.3g} "
                f"(same-dtype reference {self.rms_yardstick:.3g}); max error {self.max_error:.3g}"
            )
        return None


@dataclass(frozen=True)
class Verdict:
    """The comparison of all outputs; ``reason`` is None when ``ok``."""

    outputs: Mapping[str, OutputError]

    @property
    def ok(self) -> bool:
        return self.reason is None

    @property
    def reason(self) -> str | None:
        reasons = [error.reason for error in self.outputs.values() if error.reason is not None]
        return "; ".join(reasons) if reasons else None

    @property
    def max_error(self) -> float:
        """Largest error of any output; NaN when one could not be compared."""
        return _largest([error.max_error for error in self.outputs.values()])

    @property
    def worst_ratio(self) -> float:
        """Largest :attr:`OutputError.ratio`; NaN when an output could not be compared."""
        return _largest([error.ratio for error in self.outputs.values()])


def _largest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def compare(
    outputs: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    same_dtype: Mapping[str, torch.Tensor],
    exact_outputs: Collection[str] = (),
) -> Verdict:
    """Judge a kernel's ``outputs`` by the exact result and the same-dtype reference's error.

    All three map output names to tensors of equal shapes; ``exact`` is computed in float32.  The
    outputs' dtypes must be those of ``same_dtype``, so that a float32 scalar which leaks into the
    residual stream is a fault.  Where the exact result is NaN the output must be NaN; anywhere else
    a NaN is an error.  An infinity is right where the exact result is that infinity or overflows to
    it in the output's dtype, or where the same-dtype reference overflowed.
    """
    faults: dict[str, str] = {}
    rows: dict[str, torch.Tensor] = {}
    for name in {**same_dtype, **outputs}:
        fault = _structural_fault(name, outputs, exact, same_dtype)
        if fault is not None:
            faults[name] = fault
        elif outputs[name].numel():
            found, right, same = outputs[name], exact[name], same_dtype[name]
            strict = name in exact_outputs or not found.is_floating_point()
            rows[name] = _strict_row(found, right) if strict else _error_row(found, right, same)
    measured = (
        dict(zip(rows, torch.stack(list(rows.values())).tolist(), strict=True)) if rows else {}
    )
    errors = {}
    for name in {**same_dtype, **outputs}:
        if name in faults:
            values = [math.nan] * 6 + [0, 0, math.nan, math.nan]
        else:
            values = measured.get(name, [0.0] * 10)
        bad = int(values[6])
        first = _coordinates(int(values[7]), outputs[name].shape) if bad else None
        errors[name] = OutputError(
            name=name,
            max_error=values[0],
            rms_error=values[1],
            yardstick=values[2],
            rms_yardstick=values[3],
            limit=values[4],
            rms_limit=values[5],
            bad=bad,
            first_bad=first,
            found=values[8],
            wanted=values[9],
            fault=faults.get(name),
        )
    return Verdict(errors)


def _structural_fault(
    name: str,
    outputs: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    same_dtype: Mapping[str, torch.Tensor],
) -> str | None:
    if name not in outputs:
        return "the kernel has no such output"
    if name not in same_dtype or name not in exact:
        return "the reference has no such output"
    found, same = outputs[name], same_dtype[name]
    for other in (same, exact[name]):
        if found.shape != other.shape:
            return f"shape {tuple(found.shape)}, reference {tuple(other.shape)}"
    if found.dtype != same.dtype:
        return f"dtype {found.dtype}, reference {same.dtype}"
    return None


def _row(*values: torch.Tensor | float) -> torch.Tensor:
    """One float64 row of the table that is copied to the host (indices stay exact to 2^53)."""
    device = next(v.device for v in values if isinstance(v, torch.Tensor))
    return torch.stack(
        [torch.as_tensor(v, dtype=torch.float64, device=device).reshape(()) for v in values]
    )


def _error_row(found: torch.Tensor, exact: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    """Max and RMS error, yardsticks, limits, wrong elements, first wrong one, found, wanted."""
    wide, right, peer = found.float(), exact.float(), same.float()
    overflow = right.to(found.dtype).float()
    usual = wide.isfinite() & right.isfinite()
    allowed = torch.where(
        right.isfinite(),
        wide.isinf() & ((wide == overflow) | (wide == peer)),
        (wide == right) | (wide.isnan() & right.isnan()),
    )
    error = torch.where(usual, (wide - right).abs(), torch.where(allowed, 0.0, torch.inf))
    comparable = peer.isfinite() & right.isfinite()
    own = torch.where(comparable, (peer - right).abs(), 0.0)
    magnitude = torch.where(right.isfinite(), right.abs(), 0.0).max().double()
    floor = magnitude * (torch.finfo(found.dtype).eps / 2 + FLOAT32_ULPS * _FLOAT32_EPS)
    yardstick, rms_yardstick = own.max().double(), _rms(own)
    limit, rms_limit = RATIO * yardstick + floor, RATIO * rms_yardstick + floor
    wrong = (error > limit).flatten()
    first = wrong.to(torch.uint8).argmax()
    return _row(
        error.max(), _rms(error), yardstick, rms_yardstick, limit, rms_limit,
        wrong.count_nonzero(), first, wide.flatten()[first], right.flatten()[first],
    )  # fmt: skip


def _rms(error: torch.Tensor) -> torch.Tensor:
    return error.square().mean(dtype=torch.float64).sqrt()


def _strict_row(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    right = exact.to(found.dtype)
    wrong = (found != right) & ~((found != found) & (right != right))
    error = torch.where(wrong, (found.double() - right.double()).abs(), 0.0)
    first = wrong.flatten().to(torch.uint8).argmax()
    return _row(
        error.max(), _rms(error), 0.0, 0.0, 0.0, 0.0,
        wrong.count_nonzero(), first, found.flatten()[first], right.flatten()[first],
    )  # fmt: skip


def _coordinates(index: int, shape: torch.Size) -> tuple[int, ...]:
    coordinates = []
    for size in reversed(shape):
        coordinates.append(index % size)
        index //= size
    return tuple(reversed(coordinates))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, gaps between its rows and what lies around it included."""
    storage: Any = tensor.untyped_storage()
    raw: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return raw


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _poisoned(inputs: Inputs) -> Iterator[tuple[int, list[tuple[str, torch.Tensor]]]]:
    """Fill byte and outputs of every storage that holds outputs and no operand."""
    read = {_storage_key(operand) for operand in inputs.operands().values()}
    groups: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, output in inputs.outputs().items():
        key = _storage_key(output)
        if key and key not in read:
            groups.setdefault(key, []).append((name, output))
    for group in groups.values():
        floating = group[0][1].is_floating_point()
        yield _FLOAT_POISON if floating else _INTEGER_POISON, group


def poison(inputs: Inputs) -> None:
    """Fill outputs, the gaps between their rows and scratch: NaN, or a sentinel in integers.

    An output that shares its memory with an operand (in place) is left as it is.
    """
    for fill, group in _poisoned(inputs):
        _raw(group[0][1]).fill_(fill)
    for tensor in inputs.scratches().values():
        _raw(tensor).fill_(_FLOAT_POISON if tensor.is_floating_point() else _INTEGER_POISON)


def touched_gaps(inputs: Inputs) -> dict[str, int]:
    """Outputs with a changed byte in the memory around them, and the first such byte's offset.

    Call after :func:`poison` and a launch.  Outputs that share one storage count as one, under the
    first one's name.
    """
    names, firsts = [], []
    for fill, group in _poisoned(inputs):
        bytes_ = _raw(group[0][1])
        if sum(output.numel() * output.element_size() for _, output in group) == len(bytes_):
            continue
        changed = bytes_ != fill
        for _, output in group:
            size = output.element_size()
            changed.as_strided(
                (*output.shape, size),
                (*(stride * size for stride in output.stride()), 1),
                output.storage_offset() * size,
            ).fill_(False)
        first = changed.to(torch.uint8).argmax()
        names.append(group[0][0])
        firsts.append(torch.where(changed[first], first, -1))
    offsets = torch.stack(firsts).tolist() if firsts else []
    return {name: offset for name, offset in zip(names, offsets, strict=True) if offset >= 0}


def gaps_untouched(inputs: Inputs) -> bool:
    """Whether the memory around all outputs still holds what :func:`poison` left there."""
    return not touched_gaps(inputs)


def snapshot(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Copies of all bytes behind the operands, for :func:`changed_operands`."""
    return {name: _raw(operand).clone() for name, operand in inputs.operands().items()}


def changed_operands(inputs: Inputs, before: Mapping[str, torch.Tensor]) -> list[str]:
    """Operands whose memory differs from the snapshot; those shared with an output may."""
    written = {_storage_key(output) for output in inputs.outputs().values()}
    kept: dict[str, Any] = {
        name: (_raw(operand) != before[name]).any()
        for name, operand in inputs.operands().items()
        if _storage_key(operand) not in written
    }
    flags = torch.stack(list(kept.values())).tolist() if kept else []
    return [name for name, changed in zip(kept, flags, strict=True) if changed]
