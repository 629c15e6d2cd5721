"""``gemma-tune confirm``: turn this GPU's predicted tables into measured ones."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kernel_templates.base import DeviceInfo, ModelShape
from tuned_configs import TableSet, roots
from tuned_configs.faults import TableError

from .confirm import GOOD, Confirmed, Confirmer, Fate, Prediction, Result, compiling, predictions
from .confirm import stock_ratio as mean_ratio
from .console import FAILED, INTERRUPTED, LOG, NO_GPU, OUT, fail, seconds_of
from .device import DeviceError, matches, probe, same_model
from .evaluate import EvaluatorBroken, Limits, Measuring
from .lock import Busy, exclusive
from .model import ModelConfigError, load_model
from .report import clock

#: Samples per contestant: half again fewer than a tuning run's finals, for three contestants only.
ROUNDS = 15


def confirm(
    gpu: Annotated[
        str | None,
        typer.Option(help="The attached GPU, by any part of its name.", show_default="the only one"),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Preset or path of a Gemma 4 config.json; may be repeated.",
                     show_default="every kind in the tables"),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    budget: Annotated[str, typer.Option(help="Time for all: 90s, 2m.")] = "2m",
    configs: Annotated[
        Path | None,
        typer.Option(help="Folder of the predicted tables.", show_default="shipped and user's"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the measured tables.",
                     show_default="~/.local/share/gemma-tune/tuned_configs"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Compile workers.", show_default="one per core"),
    ] = None,
) -> None:  # fmt: skip
    """Check and time predicted entries on this GPU; those that hold become measured tables.

    Exit codes: 0 done; 1 nothing to confirm, or nothing held; 2 wrong usage; 3 no such GPU.
    """
    seconds = seconds_of(budget)
    if configs is not None and not configs.is_dir():
        fail(f"{configs} is no folder")
    try:
        models = [load_model(spec, tp) for spec in dict.fromkeys(model or [])]
        device = _attached(gpu)
    except (ModelConfigError, DeviceError) as error:
        fail(str(error))
    target = out or roots.user_root()
    # Measured entries already in the target count as done, also when it is no root of the plugin.
    searched = [configs] if configs is not None else roots.roots()
    wanted = _wanted([*searched, target], device, models)
    if not wanted:
        LOG.print(f"nothing to confirm for {device.name}: {_why(searched)}", soft_wrap=True)
        raise typer.Exit(FAILED)
    LOG.print(
        f"confirming {len(wanted)} predictions on {device.name} within {clock(seconds)}; measured "
        f"tables go to {target}",
        highlight=False,
        soft_wrap=True,
    )
    raise typer.Exit(_confirm(device, wanted, target, seconds, jobs))


def _attached(gpu: str | None) -> DeviceInfo:
    """The GPU in this machine; exits with code 3 where there is none that ``gpu`` means."""
    found = probe()
    fitting = [each for each in found.devices if gpu is None or matches(gpu, each.name)]
    if not fitting:
        others = ", ".join(dict.fromkeys(each.name for each in found.devices))
        reason = f"the attached GPU is {others}" if others else f"no GPU here ({found.reason})"
        fail(f"{f'no attached GPU matches {gpu!r}: ' if gpu else ''}{reason}", NO_GPU)
    return same_model(fitting)


def _wanted(
    searched: Sequence[Path], device: DeviceInfo, models: Sequence[ModelShape]
) -> list[Prediction]:
    tables = TableSet.load(dict.fromkeys(searched), device.name, measured_only=False)
    for fault in tables.faults:
        LOG.print(Text(fault, style="yellow"), soft_wrap=True)
    return predictions(tables, models)


def _why(searched: Sequence[Path]) -> str:
    return (
        "no predicted entry without a measured one for the running kernels in "
        f"{', '.join(map(str, searched))}"
    )


def _confirm(
    device: DeviceInfo, wanted: Sequence[Prediction], out: Path, seconds: float, jobs: int | None
) -> int:
    """Confirm, print what came of it, and return the exit code."""
    judge = Measuring(
        {"device": "cuda", "l2_bytes": device.l2_bytes},
        {"CUDA_VISIBLE_DEVICES": device.uuid} if device.uuid else None,
        device.uuid,
        Limits(rounds=ROUNDS, finals_seconds=90.0),
    )
    confirmer = Confirmer(device, judge, out, seconds, _say)
    code = 0
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(exclusive(device.uuid or device.name))
            stack.callback(judge.close)
            confirmer.run(wanted, stack.enter_context(compiling(device, jobs)))
    except KeyboardInterrupt:
        LOG.print("\ninterrupted: what was confirmed is saved, the same command goes on from here")
        code = INTERRUPTED
    except (EvaluatorBroken, TableError, Busy, OSError) as error:
        LOG.print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
        code = FAILED
    done = confirmer.done
    summarise(done)
    return code or (0 if done.count(*GOOD) else FAILED)


def _say(result: Result, number: int, total: int) -> None:
    style = {Fate.HELD: "green", Fate.DEFAULT: "", Fate.UNDECIDED: "yellow"}
    each = result.prediction
    text = Text(f"[{number}/{total}] ", style="dim")
    text.append(f"{each.kind}, {each.entry.problem.get('tokens', '-')} tokens: ")
    text.append(result.fate.value, style=style.get(result.fate, "red"))
    text.append(f": {result.reason}")
    LOG.print(text, highlight=False, soft_wrap=True)


def summarise(done: Confirmed) -> None:
    """The table by kind, then the counts, notes and files."""
    if done.results:
        fates = list(Fate)
        table = Table("kind", *(fate.value for fate in fates), "stock's time over ours")
        for kind in dict.fromkeys(each.prediction.kind for each in done.results):
            rows = [each for each in done.results if each.prediction.kind == kind]
            ratio = mean_ratio(rows)
            counts = (sum(each.fate is fate for each in rows) for fate in fates)
            table.add_row(
                Text(kind), *(str(n or "") for n in counts), f"{ratio:.2f}x" if ratio else ""
            )
        OUT.print(table)
    rejected = done.count(Fate.SLOWER, Fate.WRONG, Fate.CRASHED)
    OUT.print(
        f"{done.count(Fate.HELD)} of {len(done.results)} predictions held, "
        f"{done.count(Fate.DEFAULT)} gave way to the default config, {rejected} rejected "
        f"({done.count(Fate.WRONG)} wrong, {done.count(Fate.SLOWER)} slower than stock, "
        f"{done.count(Fate.CRASHED)} crashed or unfit), {done.count(Fate.UNDECIDED)} could not be "
        f"timed, {done.left} not reached in time; {clock(done.seconds)}",
        highlight=False,
        soft_wrap=True,
    )
    if done.remembered:
        OUT.print(
            f"{done.remembered} were rejected by an earlier run with these versions",
            highlight=False,
            soft_wrap=True,
        )
    for note in [*done.warnings, *sorted(f"times are doubtful: {each}" for each in done.notes)]:
        OUT.print(note, style="yellow", highlight=False, soft_wrap=True)
    if done.left:
        OUT.print("run the same command to go on", style="yellow", soft_wrap=True)
    for path in sorted(done.files):
        OUT.print(f"wrote {path}", highlight=False, soft_wrap=True)
