"""``gemma-tune doctor``: what the plugin would do here, and what to do about it."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from .console import FAILED, OUT, fail
from .device import probe
from .model import ModelConfigError, load_model


def doctor(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Preset or path of a Gemma 4 config.json; may be repeated.",
                     show_default="e2b"),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Say what the plugin would do on this machine, check a result per kernel, and what to do.

    Exit codes: 0 all is well; 1 there is something to do; 2 wrong usage.
    """
    from .doctor import examine

    try:
        models = [load_model(spec, tp) for spec in dict.fromkeys(model or ["e2b"])]
    except ModelConfigError as error:
        fail(str(error))
    seen = examine(probe(), models)
    if as_json:
        OUT.print_json(json.dumps(seen.to_dict()))
    else:
        for finding in seen.findings:
            line = Text(f"{finding.topic}: ", style="bold")
            line.append(finding.text, style="yellow" if finding.todo else "")
            OUT.print(line, highlight=False, soft_wrap=True)
        todos = dict.fromkeys(finding.todo for finding in seen.findings if finding.todo)
        for todo in todos:
            OUT.print(Text(f"to do: {todo}", style="bold"), soft_wrap=True)
        if seen.well:
            OUT.print("all is well")
    raise typer.Exit(0 if seen.well else FAILED)
