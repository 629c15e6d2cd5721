"""What every benchmark needs: the GPU that is meant, what runs on it, a report as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer

import tuner
from kernel_templates.base import DeviceInfo, templates
from tuned_configs.lookup import TableSet
from tuner.console import NO_GPU, fail
from tuner.device import DeviceError, attached_gpus, matches, same_model

#: Options of the command lines.
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")]
Only = Annotated[
    str | None, typer.Option("--templates", help="Only these kernels, separated by commas.")
]
Configs = Annotated[
    Path | None, typer.Option(help="Folder of the tuned tables.  [default: shipped and user's]")
]
Out = Annotated[Path, typer.Option(help="Folder of the results.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Compile workers.  [default: cores, at most 16]")
]
RESULTS = Path("benchmarks/results")


def interpreter_fits(dry_run: bool) -> None:
    interpreted = bool(triton.knobs.runtime.interpret)
    if dry_run and not interpreted:
        fail("a dry run needs TRITON_INTERPRET=1 in the environment")
    if interpreted and not dry_run:
        fail("TRITON_INTERPRET is set: that would time the interpreter; unset it, or --dry-run")


def names_of(text: str | None) -> list[str]:
    """The templates of a comma-separated list, all for None."""
    known = list(templates())
    if text is None:
        return known
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            fail(f"no template {name!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def attached(gpu: str) -> tuple[DeviceInfo, int]:
    """The attached GPU that is meant, and its index in this process."""
    try:
        found = attached_gpus()
    except DeviceError as error:
        fail(f"{error}; --dry-run needs no GPU", NO_GPU)
    fitting = [index for index, device in enumerate(found) if matches(gpu, device.name)]
    if not fitting:
        names = ", ".join(device.name for device in found) or "none"
        fail(f"no attached GPU matches {gpu!r}; attached: {names}", NO_GPU)
    return same_model([found[index] for index in fitting]), fitting[0]


def environment(device: DeviceInfo, dry_run: bool) -> dict[str, Any]:
    return {
        "device": f"{device.name} (dry run)" if dry_run else device.name,
        "capability": ".".join(map(str, device.capability)),
        "sms": device.sms,
        "driver": device.driver or "unknown",
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "gemma_tune": tuner.__version__,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }


def stamps(tables: TableSet, device: DeviceInfo) -> Iterator[str]:
    """Which tables were used, and how their stamps differ from what runs."""
    for loaded in tables.tables:
        yield f"table {loaded.path.parent.name}/{loaded.path.name}: {', '.join(loaded.table.runs)}"
    yield from tables.version_notes(
        {
            "triton": triton.__version__,
            "torch": str(torch.__version__),
            "driver": device.driver,
            "gpu": device.name,
            "sms": device.sms,
        }
    )


def lines_of(values: dict[str, Any]) -> str:
    """A report as JSON, one row a line, so that two runs can be compared line by line."""
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in values.pop("rows"))
    head = json.dumps(values, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{head},\n "rows": [\n{rows}\n ]\n}}\n'
