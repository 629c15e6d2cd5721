"""Tuned kernels beside the default, inductor's, a fixed launch rule and a copy, on one GPU.

    python -m benchmarks.hot_paths --gpu h200 --model e2b --model 26b-a4b \\
        --tokens 1,8,32,256,2048,8192 --configs DIR --out benchmarks/results

See docs/benchmarks.md.  Exit codes: 0 done; 1 nothing was measured; 2 wrong usage; 3 no such GPU.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import triton
import typer

from kernel_templates.base import DeviceInfo
from tuned_configs.files import replace_file
from tuned_configs.lookup import TableSet
from tuned_configs.naming import folder_name
from tuned_configs.roots import roots as table_roots
from tuner.cli import counts_of
from tuner.compile import CompileError, CompilePool
from tuner.console import FAILED, OUT, fail, seconds_of
from tuner.device import DeviceError, from_data_file
from tuner.lock import Busy, exclusive
from tuner.model import ModelConfigError, load_model
from tuner.run import Job, plan
from tuner.trial import Bench

from . import render
from .fixed import ORIGIN
from .measure import ContextLostError, Measurer, Picks, pick
from .result import Report
from .session import (
    RESULTS,
    Configs,
    Jobs,
    Only,
    Out,
    Tp,
    attached,
    environment,
    interpreter_fits,
    lines_of,
    names_of,
    stamps,
)

COPY_BYTES = 1 << 30
#: Longest wait for one binary that is compiled ahead.
COMPILE_SECONDS = 60.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    gpu: Annotated[str, typer.Option(help="The attached GPU to measure on, for example h200.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help="Preset or path of a config.json; may be repeated.  "
                     "[default: e2b and 26b-a4b]"),
    ] = None,
    tp: Tp = 1,
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "1,8,32,256,2048,8192",
    only: Only = None,
    configs: Configs = None,
    out: Out = RESULTS,
    rounds: Annotated[int, typer.Option(min=3, help="Samples per contestant.")] = 31,
    budget: Annotated[
        str, typer.Option(help="Time after which no further problem is begun: 180s, 10m.")
    ] = "180s",
    inductor: Annotated[
        bool | None,
        typer.Option(help="Compile the reference by inductor.  [default: on, off in a dry run]"),
    ] = None,
    inductor_moe: Annotated[
        bool, typer.Option(help="Also for moe_routing, which takes 40 s to compile.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw an SVG or PNG (needs matplotlib).")
    ] = None,
    jobs: Jobs = None,
    dry_run: Annotated[
        bool,
        typer.Option(help="Go through everything on the CPU, without a GPU; needs "
                     "TRITON_INTERPRET=1 and small token counts."),
    ] = False,
) -> None:  # fmt: skip
    """Measure the hot paths with the tables at hand, side by side with their peers."""
    start = time.monotonic()
    deadline = start + seconds_of(budget)
    interpreter_fits(dry_run)
    try:
        models = [load_model(spec, tp) for spec in dict.fromkeys(model or ["e2b", "26b-a4b"])]
        device, index = (from_data_file(gpu), 0) if dry_run else attached(gpu)
    except (ModelConfigError, DeviceError) as error:
        fail(str(error))
    work = plan(models, names_of(only), counts_of(tokens))
    if not work:
        fail(f"{', '.join(shape.name for shape in models)} need none of these kernels", FAILED)
    if configs is not None and not configs.is_dir():
        fail(f"{configs} is no folder")
    roots = table_roots() if configs is None else [configs]
    tables = TableSet.load(roots, device.name, on_reason=lambda reason: None)
    # Inductor would move Triton's cache elsewhere, away from what is compiled ahead.
    os.environ.setdefault("TRITON_CACHE_DIR", str(triton.knobs.cache.dir))
    warnings.filterwarnings("ignore", module="torch._inductor")
    report = Report(environment(device, dry_run), dry_run)
    report.environment |= {
        "models": [shape.name for shape in models],
        "rounds": rounds,
        "fixed": ORIGIN,
    }
    report.notes += [*tables.faults, *stamps(tables, device)]
    try:
        with contextlib.nullcontext() if dry_run else exclusive(device.uuid or device.name):
            picks = [pick(job, device, tables) for job in work]
            if not dry_run:
                _compile_ahead(device, work, picks, jobs, deadline)
            bench = Bench("cpu") if dry_run else Bench(f"cuda:{index}", device.l2_bytes)
            measurer = Measurer(
                bench, rounds, (not dry_run) if inductor is None else inductor, inductor_moe,
                check=not dry_run,
            )  # fmt: skip
            _measure_all(report, measurer, work, picks, deadline)
    except Busy as error:
        fail(str(error), FAILED)
    report.seconds = time.monotonic() - start
    _write(report, device, out, plot)
    raise typer.Exit(0 if report.rows else FAILED)


def _compile_ahead(
    device: DeviceInfo,
    work: Sequence[Job],
    picks: Sequence[Picks],
    jobs: int | None,
    deadline: float,
) -> None:
    """Fill Triton's cache in parallel; a config that does not compile says so when it is tried."""
    jobs = jobs or min(16, len(os.sched_getaffinity(0)))
    with CompilePool(device.target, jobs) as pool:
        futures = [
            pool.submit(job.template, job.problem, config)
            for job, chosen in zip(work, picks, strict=True)
            for config in chosen.configs.values()
        ]
        OUT.print(f"{len(work)} problems; compiling {pool.compiled} binaries", highlight=False)
        for future in futures:
            left = max(0.0, min(COMPILE_SECONDS, deadline - time.monotonic()))
            with contextlib.suppress(CompileError, concurrent.futures.TimeoutError):
                future.result(left)


def _measure_all(
    report: Report,
    measurer: Measurer,
    work: Sequence[Job],
    picks: Sequence[Picks],
    deadline: float,
) -> None:
    """Every problem in turn; an error ends its problem, never the run."""
    report.copy_bytes = COPY_BYTES >> 8 if report.dry_run else COPY_BYTES
    names = [job.title for job in work]
    done = 0
    try:
        try:
            report.copy = measurer.large_copy(report.copy_bytes)
        except Exception as error:
            report.errors.append(("large copy", measurer.reason(error)))
        for job, chosen, name in zip(work, picks, names, strict=True):
            if time.monotonic() >= deadline:
                break
            done += 1
            try:
                row = measurer.measure(job, chosen)
            except ContextLostError:
                raise
            except Exception as error:
                report.errors.append((name, measurer.reason(error)))
                OUT.print(f"{name}: {report.errors[-1][1]}", markup=False, soft_wrap=True)
            else:
                report.rows.append(row)
                times = ", ".join(f"{key} {time.median:.2f}" for key, time in row.times.items())
                OUT.print(f"{name}: {times} us", markup=False, highlight=False, soft_wrap=True)
    except ContextLostError as error:
        report.errors.append((names[max(0, done - 1)], f"{error}: the GPU answers no more"))
    except KeyboardInterrupt:
        report.notes.append("interrupted")
    report.left = names[done:]


def _write(report: Report, device: DeviceInfo, out: Path, plot: Path | None) -> None:
    folder = out / ("dry_run" if report.dry_run else folder_name(device.name))
    stem = "hot_paths.dry_run" if report.dry_run else "hot_paths"
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{stem}.json", folder / f"{stem}.md"]
    replace_file(written[0], lines_of(report.to_dict()))
    replace_file(written[1], render.markdown(report))
    if plot is not None:
        try:
            plot.parent.mkdir(parents=True, exist_ok=True)
            render.plot(report, plot)
            written.append(plot)
        except (ImportError, ValueError, OSError) as error:
            OUT.print(f"no plot: {error}", markup=False, soft_wrap=True)
    for line in render.closing(report):
        OUT.print(line, markup=False, highlight=False, soft_wrap=True)
    for path in written:
        OUT.print(f"wrote {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
