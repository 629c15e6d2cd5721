"""The plugin's environment variables, its logger and its version; imports nothing heavy."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os

#: Child of vLLM's logger, so that lines show in a server's log as vLLM's own do.
log = logging.getLogger("vllm.gemma_tune")

SWITCH_VARIABLE = "GEMMA_TUNE"
PREDICTED_VARIABLE = "GEMMA_TUNE_PREDICTED"
FAST_PREFILL_VARIABLE = "GEMMA_TUNE_FAST_PREFILL"

_ON = ("", "1", "on", "true", "yes")
_OFF = ("0", "off", "false", "no")


def switched_on() -> bool:
    """Whether ``GEMMA_TUNE`` lets the plugin act; ValueError for a word it does not know.

    Off unless asked for: the plugin has not run on a GPU yet.
    """
    return confirm_asked() or _flag(SWITCH_VARIABLE, "0")


def confirm_asked() -> bool:
    """Whether ``GEMMA_TUNE=confirm`` asks for predicted tables to be confirmed at the start."""
    return os.environ.get(SWITCH_VARIABLE, "").strip().lower() == "confirm"


def predicted_allowed() -> bool:
    """Whether entries that no GPU has measured may be used (``GEMMA_TUNE_PREDICTED=1``)."""
    return _flag(PREDICTED_VARIABLE, "0")


def fast_prefill_allowed() -> bool:
    """Whether the plugin may switch vLLM's fast prefill on (``GEMMA_TUNE_FAST_PREFILL=0`` forbids
    it)."""
    return _flag(FAST_PREFILL_VARIABLE, "1")


def _flag(variable: str, default: str) -> bool:
    value = os.environ.get(variable, default).strip().lower() or default
    if value in _OFF:
        return False
    if value in _ON:
        return True
    wanted = "0, 1 or confirm" if variable == SWITCH_VARIABLE else "0 or 1"
    raise ValueError(f"{variable} is {value!r}, wanted {wanted}")


@functools.cache
def version() -> str:
    """The installed gemma-tune's version, "unknown" when it runs uninstalled."""
    try:
        return importlib.metadata.version("gemma-tune")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


_said: set[str] = set()


def warn_once(topic: str, message: str, *args: object) -> None:
    """One WARNING per topic and process."""
    if topic not in _said:
        _said.add(topic)
        log.warning(message, *args)
