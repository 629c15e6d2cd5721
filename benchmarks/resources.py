"""What binaries take of a GPU that need not be present: registers, spills, shared memory.

    python -m benchmarks.resources --gpu a100 --model e2b --model 26b-a4b \\
        --templates attention_prefill,attention_decode --tokens 8192,32

Every kind of problem is cross-compiled with its default config and with the one that the tables
give; nothing is run and nothing is timed.  Exit codes: 0 done; 1 nothing compiled; 2 wrong usage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import triton
import typer

import tuner
from kernel_templates.base import DeviceInfo, record_from_dict, record_to_dict
from tuned_configs.files import replace_file
from tuned_configs.lookup import TableSet
from tuned_configs.naming import folder_name
from tuned_configs.roots import roots as table_roots
from tuner.cli import counts_of
from tuner.compile import CompileError, CompilePool, Resources
from tuner.console import FAILED, OUT, fail
from tuner.device import DeviceError, from_data_file
from tuner.model import ModelConfigError, load_model
from tuner.predict import blocks_per_sm
from tuner.run import Job, plan

from .session import (
    RESULTS,
    Configs,
    Only,
    Out,
    Tp,
    names_of,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Line:
    """One config of one problem: what its first kernel takes, or why there is no binary."""

    job: Job
    origin: str  # "default", or the provenance of the table's entry
    config: Any
    usage: Resources | None
    reason: str = ""


@app.command()
def main(
    gpu: Annotated[str, typer.Option(help="A known GPU, for example a100.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help="Preset or path of a config.json; may be repeated.  "
                     "[default: e2b and 26b-a4b]"),
    ] = None,
    tp: Tp = 1,
    only: Only = None,
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "8192",
    configs: Configs = None,
    out: Out = RESULTS,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile workers.")] = None,
) -> None:  # fmt: skip
    """Cross-compile the default and the tabled config of every problem, and say what they take."""
    try:
        models = [load_model(spec, tp) for spec in dict.fromkeys(model or ["e2b", "26b-a4b"])]
        device = from_data_file(gpu)
    except (ModelConfigError, DeviceError) as error:
        fail(str(error))
    if configs is not None and not configs.is_dir():
        fail(f"{configs} is no folder")
    roots = table_roots() if configs is None else [configs]
    tables = TableSet.load(roots, device.name, False, on_reason=lambda reason: None)
    work = plan(models, names_of(only), counts_of(tokens))
    with CompilePool(device.target, jobs or len(os.sched_getaffinity(0))) as pool:
        lines = list(_compile(work, device, tables, pool))
    folder = out / folder_name(device.name)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "resources.md", markdown(lines, device))
    OUT.print(f"wrote {folder / 'resources.md'}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if any(line.usage for line in lines) else FAILED)


def _compile(
    work: Sequence[Job], device: DeviceInfo, tables: TableSet, pool: CompilePool
) -> Iterator[Line]:
    submitted = []
    for job in work:
        template, problem = job.template, job.problem
        chosen = {"default": template.default(problem, device)}
        match = tables.lookup(template.name, record_to_dict(problem), template.source_hash)
        if match is not None:
            chosen[match.run.provenance] = record_from_dict(template.config, match.config)
        for origin, config in chosen.items():
            if origin == "default" or config != chosen["default"]:
                future = pool.submit(template, problem, config)
                submitted.append((job, origin, config, future))
    for job, origin, config, future in submitted:
        try:
            yield Line(job, origin, config, future.result()[0])
        except CompileError as error:
            yield Line(job, origin, config, None, str(error).splitlines()[0])


def markdown(lines: Sequence[Line], device: DeviceInfo) -> str:
    """The whole report."""
    text = [
        f"# Binaries for {device.name}",
        "",
        "Made by `python -m benchmarks.resources` by cross-compilation; do not edit. Nothing was "
        "run on this GPU and nothing is a time.",
        "",
        f"gemma-tune {tuner.__version__}, Triton {triton.__version__}, torch {torch.__version__}; "
        f"capability {'.'.join(map(str, device.capability))}, "
        f"{device.shared_per_block} B of shared memory per program at most.",
        "",
    ]
    kinds: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        kinds.setdefault((line.job.template.name, line.job.kind), []).append(line)
    for (name, kind), those in kinds.items():
        text += [
            f"## {name}: {kind}",
            "",
            f"Models: {', '.join(those[0].job.models)}.",
            "",
            "| tokens | config from | config | registers | spilled B | shared B | per SM |",
            "|---:|---|---|---:|---:|---:|---:|",
            *(_row(line, device) for line in those),
            "",
        ]
    return "\n".join(text)


def _row(line: Line, device: DeviceInfo) -> str:
    values = ", ".join(f"{k} {v}" for k, v in record_to_dict(line.config).items())
    head = f"| {line.job.problem.tokens} | {line.origin} | {values} |"
    if line.usage is None:
        return f"{head} {line.reason} | | | |"
    usage, programs = line.usage, blocks_per_sm(line.usage, device)
    return f"{head} {usage.registers} | {usage.spill_bytes} | {usage.shared_bytes} | {programs} |"


if __name__ == "__main__":
    app()
