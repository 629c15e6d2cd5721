"""What the commands share: where they print, their exit codes, how durations are written."""

from __future__ import annotations

import re
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

# Paths and messages are shown as they are: "[/x]" in one is no markup.
OUT = Console(markup=False, emoji=False)
LOG = Console(stderr=True, markup=False, emoji=False)

FAILED, USAGE, NO_GPU, INTERRUPTED = 1, 2, 3, 130


def fail(message: str, code: int = USAGE) -> NoReturn:
    """End with a message on stderr."""
    LOG.print(Text(f"error: {message}", style="bold red"), soft_wrap=True)
    raise typer.Exit(code)


def seconds_of(text: str) -> float:
    """``90``, ``90s``, ``10m``, ``1.5h`` in seconds; BadParameter otherwise."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]+)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) == 0:
        raise typer.BadParameter(f"{text!r} is no duration; wanted for example 90s, 10m or 1.5h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
