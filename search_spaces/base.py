"""What may vary: the type of a search space and the checks that all spaces share."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernel_templates.base import DeviceInfo, KernelTemplate, template

#: Values of one field, by the field's name in the template's ``Config``.
Choices = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class SearchSpace:
    """The candidates of one template.

    ``choices(problem, device)`` lists the values of every field of the config.
    ``infeasible(problem, config, device)`` is the only validity predicate: it gives the reason why
    a config cannot run or cannot be worth running there, with the numbers, or None.  It must hold
    for the default config of every problem on every supported GPU, or that GPU is unsupported.
    ``likely`` are configs that did well on some GPU, to be tried early where they are feasible.
    """

    template: str
    choices: Callable[[Any, DeviceInfo], Choices]
    infeasible: Callable[[Any, Any, DeviceInfo], str | None]
    likely: tuple[Any, ...] = ()

    @property
    def kernel(self) -> KernelTemplate[Any, Any]:
        return template(self.template)

    def configs(self, problem: Any, device: DeviceInfo) -> Iterator[Any]:
        """Every feasible config, in the order of the choices."""
        choices = self.choices(problem, device)
        for values in itertools.product(*choices.values()):
            config = self.kernel.config(**dict(zip(choices, values, strict=True)))
            if self.infeasible(problem, config, device) is None:
                yield config

    def starts(self, problem: Any, device: DeviceInfo) -> list[Any]:
        """The feasible ones of ``likely``."""
        return [c for c in self.likely if self.infeasible(problem, c, device) is None]

    def neighbours(self, problem: Any, config: Any, device: DeviceInfo) -> list[Any]:
        """Feasible configs that differ from ``config`` in one field, by one step."""
        choices = self.choices(problem, device)
        found = []
        for name, values in choices.items():
            here = getattr(config, name)
            if here not in values:
                continue
            at = values.index(here)
            for step in (at - 1, at + 1):
                if 0 <= step < len(values):
                    other = dataclasses.replace(config, **{name: values[step]})
                    if self.infeasible(problem, other, device) is None:
                        found.append(other)
        return found


def thread_limits(num_warps: int, device: DeviceInfo) -> str | None:
    """Reason why a block of that many warps cannot run, or None."""
    threads = 32 * num_warps
    return (
        f"{threads} threads per block, limit 1024"
        if threads > min(1024, device.threads_per_sm)
        else None
    )


def tile_limits(
    elements: int, vector: int, num_warps: int, live_values: int, device: DeviceInfo
) -> str | None:
    """Reason why a tile of ``elements`` does not suit ``num_warps`` warps, or None.

    ``live_values`` is the number of 32-bit values kept per element at the same time: a thread that
    needs more than its 255 registers spills.  A thread must have at least one ``vector`` to access.
    """
    per_thread = elements / (32 * num_warps)
    if per_thread < vector:
        return f"{per_thread:g} elements per thread, less than the vector of {vector}"
    if per_thread * live_values > 255:
        return (
            f"{per_thread:g} elements x {live_values} live values exceed 255 registers per thread"
        )
    registers = per_thread * live_values * 32 * num_warps
    if registers > device.registers_per_sm:
        return f"{registers:g} registers per block, limit {device.registers_per_sm}"
    return None


def shared_limit(needed: int, device: DeviceInfo, arithmetic: str) -> str | None:
    """Reason naming the arithmetic when ``needed`` bytes of shared memory do not fit, or None."""
    if needed > device.shared_per_block:
        return f"{needed} B of shared memory ({arithmetic}), limit {device.shared_per_block}"
    return None


@functools.cache
def spaces() -> Mapping[str, SearchSpace]:
    """Every space of this package by its template's name, found by importing its modules."""
    package = importlib.import_module(__package__)
    found: dict[str, SearchSpace] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{__package__}.{info.name}")
        space = getattr(module, "SPACE", None)
        if space is not None:
            found[space.template] = space
    return types.MappingProxyType(found)
