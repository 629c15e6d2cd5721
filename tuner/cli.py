"""The command line: ``gemma-tune --gpu a100`` tunes; ``list``, ``show``, ``lint`` and ``explain``
read what was found.

Exit codes: 0 done; 1 nothing valid was found or held, or lint or doctor found something; 2 wrong
usage; 3 a GPU was required and there is none; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import enum
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from optuna.exceptions import OptunaError
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from kernel_templates.base import DeviceInfo, ModelShape, templates
from tuned_configs import roots
from tuned_configs.faults import TableError
from tuned_configs.tokens import token_counts

from . import __version__, cli_serving, places, queries
from .confirm_command import confirm
from .console import FAILED, INTERRUPTED, LOG, NO_GPU, OUT, fail, seconds_of
from .device import DeviceError, from_data_file, known_gpus, matches, probe, same_model
from .doctor_command import doctor
from .evaluate import Evaluator, EvaluatorBroken, Measuring, Predicting
from .lock import Busy, exclusive
from .model import ModelConfigError, load_model, preset_names
from .report import ConsoleReporter, clock, summary_tables
from .run import Settings, Summary, Tuner, plan
from .search import StorageError, open_storage

app = typer.Typer(
    name="gemma-tune",
    help="Find, check and emit the fastest launch configurations of Gemma 4's Triton kernels.\n\n"
    "Run it again to go on after an interruption: finished trials and problems are reused.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
#: What the benchmarks' programs take from here too.
__all__ = ["FAILED", "LOG", "NO_GPU", "OUT", "app", "fail", "main", "seconds_of"]

#: Rows times columns, and times the experts of a token, must stay within int64.
MOST_TOKENS = 2**40


class Measure(str, enum.Enum):
    """Whether candidates are timed on a GPU."""

    AUTO = "auto"
    REQUIRE = "require"
    NEVER = "never"


def counts_of(text: str) -> tuple[int, ...]:
    """``1,8,64`` or ``1-8192`` (powers of two of that range) as token counts."""
    counts: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?", part)
        if not found or int(found[1]) < 1 or (found[2] and int(found[2]) < int(found[1])):
            raise typer.BadParameter(
                f"{part!r} is no token count; wanted for example 1,8,64 or 1-8192"
            )
        low, high = int(found[1]), int(found[2] or found[1])
        if high > MOST_TOKENS:
            raise typer.BadParameter(f"{high} tokens are more than the {MOST_TOKENS} of any launch")
        powers = {1 << shift for shift in range(high.bit_length())}
        counts |= {low, high} | {power for power in powers if low <= power <= high}
    return tuple(sorted(counts))


def _show_version(wanted: bool) -> None:
    if wanted:
        OUT.print(f"gemma-tune {__version__}", highlight=False)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def tune(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU family to tune for: a100, a100-40gb, h100, h200, l4, rtx4090, b200, "
                     "or any part of an attached GPU's name."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Preset (e2b, e4b, 12b, 26b-a4b, 31b) or path of a Gemma 4 config.json; "
                     "may be repeated.", show_default="e2b"),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    templates_: Annotated[
        str | None,
        typer.Option("--templates", help="Only these kernels, separated by commas."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Token counts: 1,8,64 or a range 1-8192 (its powers of two).",
                     show_default="1-8192"),
    ] = None,
    draft_tokens: Annotated[
        int,
        typer.Option(min=0, help="Draft tokens of speculative decoding: adds the token counts of "
                     "its verifying steps."),
    ] = 0,
    budget: Annotated[
        str | None,
        typer.Option(help="Time for the whole run: 90s, 10m, 1h.", show_default="no limit"),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Most candidates per problem.")] = 64,
    measure: Annotated[
        Measure,
        typer.Option(help="auto: measure where the GPU is attached, else predict; require: fail "
                     "without it; never: predict."),
    ] = Measure.AUTO,
    storage: Annotated[
        str | None,
        typer.Option(help="Optuna storage URL for the trials.",
                     show_default="a file in .gemma-tune"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the tables.",
                     show_default="~/.local/share/gemma-tune/tuned_configs"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Compile workers.", show_default="one per core"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the search.")] = 0,
) -> None:  # fmt: skip
    """Tune every kernel of the models for a GPU."""
    if context.invoked_subcommand is not None:
        if gpu is not None:
            fail(f"--gpu goes behind {context.invoked_subcommand!r}")
        return
    if gpu is None:
        fail("--gpu is missing; wanted for example --gpu a100")
    names = _template_names(templates_)
    try:
        if tokens is not None:
            counts = counts_of(tokens)
        else:
            counts = token_counts(num_speculative_tokens=draft_tokens)
        seconds = None if budget is None else seconds_of(budget)
        models = [load_model(spec, tp) for spec in dict.fromkeys(model or ["e2b"])]
        device = choose_device(gpu, measure)
    except (ModelConfigError, DeviceError) as error:
        fail(str(error))
    folder = out or roots.user_root()
    _require_writable(folder)
    _tune(device, models, names, counts, Settings(folder, trials, seconds, jobs, seed), storage)


def _require_writable(folder: Path) -> None:
    """Make the folder of the tables; exits when it cannot be written, before any work is done."""
    try:
        if folder.exists() and not folder.is_dir():
            fail(f"{folder} is no folder, wanted one for the tables (--out)")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(f"{folder}: tables cannot be written here: {error.strerror}; see --out")


def _template_names(text: str | None) -> list[str]:
    known = list(templates())
    if text is None:
        return [name for name, kernel in templates().items() if not kernel.preview]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [""]:
        if name not in known:
            fail(f"no template {name!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def choose_device(gpu: str, measure: Measure) -> DeviceInfo:
    """The attached GPU that ``gpu`` means, else the known one to predict for.

    Exits with code 3 when measuring is required and impossible; DeviceError for an unknown GPU.
    """
    reason = "measuring was switched off"
    if measure is not Measure.NEVER:
        found = probe()
        fitting = [device for device in found.devices if matches(gpu, device.name)]
        if fitting:
            return same_model(fitting)
        others = ", ".join(dict.fromkeys(device.name for device in found.devices))
        reason = f"the attached GPU is {others}" if others else f"no GPU here ({found.reason})"
        if measure is Measure.REQUIRE:
            fail(f"--measure require: no attached GPU matches {gpu!r}: {reason}", NO_GPU)
    device = from_data_file(gpu)
    LOG.print(
        Text(
            f"{reason}: results for {device.name} are PREDICTIONS by cross-compilation and a "
            "simple model. Nothing is measured, and every entry is marked predicted.",
            style="bold yellow",
        ),
        soft_wrap=True,
    )
    return device


def _tune(
    device: DeviceInfo,
    models: list[ModelShape],
    names: list[str],
    counts: tuple[int, ...],
    settings: Settings,
    storage: str | None,
) -> None:
    jobs = plan(models, names, counts)
    if not jobs:
        fail(f"{', '.join(m.name for m in models)} need none of: {', '.join(names)}", FAILED)
    try:
        record = open_storage(
            storage, places.STATE_FOLDER, lambda message: LOG.print(message, style="yellow")
        )
    except StorageError as error:
        fail(str(error))
    evaluator: Evaluator = Predicting(device)
    if device.attached:
        evaluator = Measuring(
            {"device": "cuda", "l2_bytes": device.l2_bytes},
            {"CUDA_VISIBLE_DEVICES": device.uuid} if device.uuid else None,
            device.uuid,
        )
    how = "measuring on" if device.attached else "predicting for"
    LOG.print(
        f"{how} {device.name}: {len(jobs)} problems of {', '.join(m.name for m in models)}, "
        f"up to {settings.trials} trials each; tables go to {settings.out}",
        highlight=False,
        soft_wrap=True,
    )
    summary, code = None, 0
    try:
        with contextlib.ExitStack() as stack:
            if device.attached:
                stack.enter_context(exclusive(device.uuid or device.name))
            stack.callback(evaluator.close)
            reporter = stack.enter_context(ConsoleReporter(LOG))
            tuner = Tuner(
                device, evaluator, record, settings, reporter, places.nearest_seeds(device)
            )
            summary = tuner.summary
            tuner.run(jobs)
    except KeyboardInterrupt:
        LOG.print("\ninterrupted: what was decided is saved, the same command goes on from here")
        code = INTERRUPTED
    except (EvaluatorBroken, TableError, Busy, OptunaError, SQLAlchemyError, OSError) as error:
        LOG.print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
        code = FAILED
    if summary is not None:
        _summarise(summary, settings)
    if code == 0 and summary is not None and not summary.decided:
        code = FAILED
    raise typer.Exit(code)


def _summarise(summary: Summary, settings: Settings) -> None:
    for table in summary_tables(summary):
        OUT.print(table)
    text = (
        f"{len(summary.decided)} problems decided in {clock(summary.seconds)}: {summary.trials} "
        f"trials, {summary.binaries} binaries, {summary.infeasible} infeasible points skipped"
    )
    if summary.reused_trials or summary.reused_problems:
        text += (
            f"; reused {summary.reused_problems} finished problems and {summary.reused_trials} "
            "trials of an earlier run"
        )
    if again := summary.confirmed + summary.unconfirmed:
        text += f"; {summary.confirmed} of {again} gains showed again in a second process"
    OUT.print(text, highlight=False, soft_wrap=True)
    if summary.undecided:
        OUT.print(f"no result for {len(summary.undecided)} problems", style="red", soft_wrap=True)
    if summary.left:
        OUT.print(
            f"the budget ended before {summary.left} problems: run the same command to go on",
            style="yellow",
            soft_wrap=True,
        )
    if summary.not_timed_again:
        OUT.print(
            f"{summary.not_timed_again} gains were not timed in a second process: run the same "
            "command to go on",
            style="yellow",
            soft_wrap=True,
        )
    for path in sorted(summary.files):
        OUT.print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command("list")
def list_() -> None:
    """List kernels, models, known GPUs and the tables at hand."""
    named = [f"{name} (preview)" if t.preview else name for name, t in templates().items()]
    OUT.print("kernels: " + ", ".join(named), highlight=False, soft_wrap=True)
    OUT.print("models: " + ", ".join(preset_names()), highlight=False, soft_wrap=True)
    OUT.print(
        "known GPUs: " + ", ".join(gpu.name for gpu in known_gpus()),
        highlight=False,
        soft_wrap=True,
    )
    OUT.print(queries.tables_at_hand(roots.roots()))
    OUT.print(f"shipped tables: {roots.shipped_root()}", highlight=False, soft_wrap=True)
    OUT.print(f"your tables: {roots.user_root()}", highlight=False, soft_wrap=True)


@app.command()
def show(
    gpu: Annotated[str, typer.Option(help="GPU whose tables to show.")],
    template: Annotated[str | None, typer.Option(help="Only this kernel.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's problems.")] = None,
    configs: Annotated[
        Path | None,
        typer.Option(help="Folder of the tables.", show_default="shipped and user's"),
    ] = None,
) -> None:
    """Show tuned entries: config, times and where they come from."""
    if template is not None and template not in templates():
        fail(f"no template {template!r}; known: {', '.join(templates())}")
    shown = 0
    for table in queries.show(_roots(configs), gpu, template, model):
        OUT.print(table, soft_wrap=isinstance(table, Text))
        shown += not isinstance(table, Text)
    if not shown:
        fail(f"no entries for GPU {gpu!r}" + (f", kernel {template!r}" if template else ""), FAILED)


@app.command()
def lint(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Tables or folders of tables.", show_default="shipped and user's"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Largest token count that is served.")
    ] = 8192,
) -> None:
    """Check tables: syntax, schema, coverage, validity on their GPU.  Exit code 1 on errors."""
    chosen = paths or [root for root in roots.roots() if root.is_dir()]
    findings = queries.lint_all(chosen, max_tokens)
    for finding in findings:
        style = "red" if finding.severity == "error" else "yellow"
        OUT.print(Text(str(finding), style=style), soft_wrap=True)
    errors = sum(finding.severity == "error" for finding in findings)
    OUT.print(f"{errors} errors, {len(findings) - errors} other findings", highlight=False)
    raise typer.Exit(FAILED if errors else 0)


@app.command()
def explain(
    gpu: Annotated[str, typer.Option(help="GPU to look up for.")],
    template: Annotated[str, typer.Option(help="Kernel.")],
    tokens: Annotated[int, typer.Option(min=1, help="Token count.")],
    model: Annotated[str, typer.Option(help="Preset or path of a config.json.")] = "e2b",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    configs: Annotated[
        Path | None,
        typer.Option(help="Folder of the tables.", show_default="shipped and user's"),
    ] = None,
) -> None:
    """Say which config a launch with that many tokens takes, and why."""
    if template not in templates():
        fail(f"no template {template!r}; known: {', '.join(templates())}")
    try:
        shape = load_model(model, tp)
        text: list[Any] = list(queries.explain(_roots(configs), gpu, template, shape, tokens))
    except (ModelConfigError, DeviceError) as error:
        fail(str(error))
    if not text:
        fail(f"{shape.name} does not use {template}", FAILED)
    for line in text:
        OUT.print(line, soft_wrap=True)


app.command()(confirm)
app.command()(doctor)


def _roots(configs: Path | None) -> list[Path]:
    if configs is None:
        return roots.roots()
    if not configs.is_dir():
        fail(f"{configs} is no folder")
    return [configs]


app.command()(cli_serving.bench)
app.command()(cli_serving.verify)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OSError as error:  # a full disk behind stdout, a folder that may not be searched
        with contextlib.suppress(OSError):
            LOG.print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
