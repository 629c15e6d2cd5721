"""Where tables and records lie, and what the nearest GPU's tables suggest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernel_templates.base import DeviceInfo
from tuned_configs.faults import TableError
from tuned_configs.naming import folder_name
from tuned_configs.roots import shipped_root as shipped_root
from tuned_configs.roots import user_root as user_root
from tuned_configs.schema import Entry
from tuned_configs.store import read_table

from .device import known_gpus
from .run import Job, seeds_from_entries

#: Where a tuning run keeps its record of trials, beside what the user is working on.
STATE_FOLDER = Path(".gemma-tune")


def roots() -> list[Path]:
    """Where tables are looked for, the preferred last."""
    return [shipped_root(), user_root()]


def tables(searched: list[Path]) -> Iterator[Path]:
    """Every table file under the roots."""
    for root in searched:
        yield from sorted(path for path in root.glob("*/*.json") if not path.name.startswith("."))


def devices_with_tables(searched: list[Path]) -> dict[str, list[Path]]:
    """Table files by the driver's name of their GPU; broken ones under the name that their folder
    stands for, by a sound table in it or a known GPU, else under the folder's own."""
    names = {folder_name(gpu.name): gpu.name for gpu in known_gpus()}
    devices: dict[Path, str | None] = {}
    for path in tables(searched):
        try:
            devices[path] = read_table(path).device
        except TableError:
            devices[path] = None
    names |= {path.parent.name: name for path, name in devices.items() if name is not None}
    found: dict[str, list[Path]] = {}
    for path, name in devices.items():
        folder = path.parent.name
        found.setdefault(name or names.get(folder, folder), []).append(path)
    return found


def nearest_seeds(device: DeviceInfo) -> Callable[[Job], Iterator[Any]]:
    """Configs of the tables at hand, of this GPU first and then by likeness of the numbers.

    Distance is in the logarithm of bandwidth, multiprocessors and L2; measured before predicted.
    """
    known = {gpu.name: gpu for gpu in known_gpus()}
    ranked: list[tuple[float, Path]] = []
    for path in tables(roots()):
        try:
            table = read_table(path)
        except TableError:
            continue
        other = device if table.device == device.name else known.get(table.device)
        if other is not None:
            predicted = any(run.provenance == "predicted" for run in table.runs.values())
            ranked.append((_distance(device, other) + 0.1 * predicted, path))
    entries: dict[str, list[Entry]] = {}
    for _, path in sorted(ranked):
        table = read_table(path)
        entries.setdefault(table.template, []).extend(table.entries)
    return seeds_from_entries(entries)


def _distance(one: DeviceInfo, other: DeviceInfo) -> float:
    pairs = (
        (one.bandwidth, other.bandwidth),
        (one.sms, other.sms),
        (one.l2_bytes, other.l2_bytes),
    )
    return math.sqrt(sum(math.log(a / b) ** 2 for a, b in pairs))
