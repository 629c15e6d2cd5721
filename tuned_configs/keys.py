"""What makes two problems the same: one definition for tables, merging and look-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The one field of a problem that look-up may round to a tuned value.
BUCKET = "tokens"


def problem_key(problem: Mapping[str, Any], without: str | None = None) -> tuple[Any, ...]:
    """A hashable form of a problem, whatever the order of its fields; ``without`` drops one.

    Values compare as in Python, so ``true`` and 1 are the same everywhere: a table cannot hold two
    entries between which a look-up could not tell.
    """
    return tuple(
        (name, _frozen(problem[name])) for name in sorted(problem, key=str) if name != without
    )


def sort_key(problem: Mapping[str, Any]) -> tuple[Any, ...]:
    """Order of entries in a file: by every other field (numbers as numbers), then by tokens."""
    names = sorted(problem, key=lambda name: (name == BUCKET, name))
    return tuple((name == BUCKET, name, _ordered(problem[name])) for name in names)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def _ordered(value: Any) -> tuple[Any, ...]:
    """Numbers before text before lists, so that values of any type compare."""
    if isinstance(value, (list, tuple)):
        return (2, tuple(_ordered(item) for item in value))
    return (1, value) if isinstance(value, str) else (0, value)
