"""What ``list``, ``show``, ``lint`` and ``explain`` answer, as things to print."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kernel_templates.base import (
    DeviceInfo,
    ModelShape,
    record_from_dict,
    record_to_dict,
    templates,
)
from kernel_templates.base import template as template_named
from search_spaces.base import spaces
from tuned_configs.faults import TableError
from tuned_configs.lint import Finding
from tuned_configs.lint import lint as lint_tables
from tuned_configs.lookup import TableSet
from tuned_configs.schema import Device, Entry
from tuned_configs.store import read_table

from .device import DeviceError, from_data_file, known_gpus, matches
from .places import devices_with_tables
from .report import config_text, times, us, verdict
from .run import counted


def tables_at_hand(roots: Sequence[Path]) -> Table:
    """One row per table: GPU, kernel, entries measured and predicted, models."""
    table = Table("GPU", "kernel", "measured", "predicted", "models", title="Tables")
    for device, paths in devices_with_tables(list(roots)).items():
        for path in paths:
            try:
                found = read_table(path)
            except TableError as error:
                table.add_row(device, path.stem, "-", "-", Text(str(error), style="red"))
                continue
            measured = sum(_is_measured(found.runs, entry) for entry in found.entries)
            models = sorted({model for entry in found.entries for model in entry.models})
            table.add_row(
                device,
                found.template,
                str(measured),
                str(len(found.entries) - measured),
                ", ".join(models),
            )
    return table


def show(
    roots: Sequence[Path], gpu: str, template: str | None, model: str | None
) -> Iterator[Table | Text]:
    """The entries of every table of the GPUs that ``gpu`` means: per file a line that says where it
    comes from, then a rich table per kind of problem; for a broken one what is wrong with it."""
    for device, paths in devices_with_tables(list(roots)).items():
        if not _means(gpu, device):
            continue
        for path in paths:
            try:
                found = read_table(path)
            except TableError as error:
                yield Text(str(error), style="red")
                continue
            if template is not None and found.template != template:
                continue
            entries = [e for e in found.entries if model is None or model in e.models]
            if not entries:
                continue
            yield Text(f"{found.template} on {device} ({path})", style="bold")
            for name in sorted({entry.run for entry in entries}):
                run = found.runs[name]
                yield Text(
                    f"  {run.provenance} {run.finished_at}, triton {run.triton}, "
                    f"torch {run.torch}, driver {run.device.driver or 'none'}"
                )
            kinds: dict[str, list[Entry]] = {}
            for entry in entries:
                kinds.setdefault(_kind(found.template, entry), []).append(entry)
            for kind, those in kinds.items():
                yield _shown(kind, those)


def _shown(kind: str, entries: Sequence[Entry]) -> Table:
    """One row per token count: what was chosen, its time, and what it is compared with."""
    shown = Table(title=kind, title_justify="left")
    for name in ("tokens", "result", "trials", "us", "vs default", "vs stock"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("config", overflow="fold")
    for entry in entries:
        time, default, stock = times(entry)
        result = entry.verdict if entry.predicted_us is None else f"{entry.verdict} (predicted)"
        shown.add_row(
            str(entry.problem.get("tokens", "-")),
            result,
            str(entry.trials),
            us(time).removesuffix(" us"),
            "-" if default is None else f"{default / time:.2f}x",
            "-" if stock is None else f"{stock / time:.2f}x",
            config_text(entry.config),
        )
    return shown


def lint_all(paths: Sequence[Path], max_tokens: int) -> list[Finding]:
    """Findings of every path, configs judged by the search spaces' own predicate."""

    def served(name: str) -> tuple[int, int | None]:
        return templates()[name].served if name in templates() else (1, None)

    return [
        finding for path in paths for finding in lint_tables(path, max_tokens, _validate, served)
    ]


def explain(
    roots: Sequence[Path], gpu: str, template: str, model: ModelShape, tokens: int
) -> Iterator[Text]:
    """Which config each of the model's problems takes at a token count, and why; nothing for a
    model without such problems.

    DeviceError when ``gpu`` means no GPU with tables and no known one.
    """
    kernel = template_named(template)
    problems = kernel.problems(model, [tokens])
    device = _one_device(roots, gpu)
    if not problems:
        return
    tables = TableSet.load(list(roots), device.name, False, on_reason=lambda reason: None)
    yield Text(f"{device.name}, {model.name}, {counted(tokens)}", style="bold")
    for fault in tables.faults:
        yield Text(fault, style="red")
    for problem in problems:
        values = record_to_dict(problem)
        match = tables.lookup(template, values, kernel.source_hash)
        yield Text(f"{template}, {kernel.describe(problem)}:", style="bold")
        if match is None:
            yield Text(f"  {tables.explain(template, values, kernel.source_hash)}")
            config = record_to_dict(kernel.default(problem, device))
            yield Text(f"  default: {config_text(config)}")
            continue
        yield Text(f"  config: {config_text(match.config)}")
        yield Text(f"  why: {match.reason}; {verdict(match.entry)}")
        yield Text(
            f"  from: {match.path}, {match.run.provenance} "
            f"{'on' if match.run.provenance == 'measured' else 'for'} {match.run.device.name} at "
            f"{match.run.finished_at}, triton {match.run.triton}, torch {match.run.torch}"
        )
        if match.run.provenance != "measured":
            yield Text("  a prediction: not for a server before it is measured on that GPU")


def _one_device(roots: Sequence[Path], gpu: str) -> DeviceInfo:
    """The GPU that ``gpu`` means among those with tables, else the known one."""
    named = [name for name in devices_with_tables(list(roots)) if _means(gpu, name)]
    known = {device.name: device for device in known_gpus()}
    if len(named) > 1:
        raise DeviceError(f"{gpu!r} matches the tables of: {', '.join(named)}; name one of them")
    if not named:
        return from_data_file(gpu)
    if named[0] in known:
        return known[named[0]]
    for path in devices_with_tables(list(roots))[named[0]]:
        with contextlib.suppress(TableError):
            for run in read_table(path).runs.values():
                return _device_of(run.device)
    return from_data_file(gpu)


def _means(gpu: str, name: str) -> bool:
    return gpu == name or matches(gpu, name)


def _is_measured(runs: Mapping[str, Any], entry: Entry) -> bool:
    return bool(runs[entry.run].provenance == "measured")


def _kind(name: str, entry: Entry) -> str:
    if name in templates():
        kernel = template_named(name)
        try:
            return kernel.describe(record_from_dict(kernel.problem, entry.problem))
        except ValueError:
            pass
    return config_text({k: v for k, v in entry.problem.items() if k != "tokens"})


def _device_of(device: Device) -> DeviceInfo:
    """Numbers for the validity of a table's configs: the known GPU of that name, or of its class.

    A table holds no shared-memory sizes; a GPU that is not known takes the smallest of its
    capability, so that nothing is passed that might not fit.
    """
    known = known_gpus()
    for gpu in known:
        if gpu.name == device.name:
            return gpu
    capability = (device.capability[0], device.capability[1])
    peers = [gpu for gpu in known if gpu.capability[0] == capability[0]] or known
    least = min(peers, key=lambda gpu: gpu.shared_per_block)
    return dataclasses.replace(
        least,
        name=device.name,
        capability=capability,
        sms=device.sms,
        memory_bytes=device.memory_bytes,
    )


def _validate(
    template: str, problem: dict[str, Any], config: dict[str, Any], device: Device
) -> str | None:
    """What is wrong with a table's config: unknown kernel or field, or not valid on its GPU."""
    if template not in templates():
        return f"no kernel named {template!r}; known: {', '.join(templates())}"
    kernel, space = template_named(template), spaces()[template]
    try:
        wanted = record_from_dict(kernel.problem, problem)
        candidate = record_from_dict(kernel.config, config)
    except ValueError as error:
        return str(error)
    here = _device_of(device)
    try:
        for name, values in space.choices(wanted, here).items():
            value = getattr(candidate, name)
            if value not in values:
                return f"{name} is {value!r}, wanted one of {', '.join(map(repr, values))}"
        return space.infeasible(wanted, candidate, here)
    except OverflowError as error:
        return f"a number is too large: {error}"
