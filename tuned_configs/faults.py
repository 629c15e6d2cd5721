"""What is wrong in a table, said so that a person can mend it: file, key, line, found, wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from . import schema
from .jsontext import Position, Where, dotted, locate, positions, shown

_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a finite number",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "at least {min_length} character",
    "literal_error": "{expected}",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
}


@dataclass(frozen=True)
class Fault:
    """One fault: ``key`` is ``entries[3].config.num_warps`` (empty for the whole file); lines and
    columns count from 1 and are None where the text could not be read."""

    message: str
    key: str = ""
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = "" if self.line is None else f"line {self.line}"
        place += "" if self.column is None else f", column {self.column}"
        return ": ".join(part for part in (place, self.key, self.message) if part)


class TableError(Exception):
    """A table that cannot be read, used or written.

    ``faults`` lists everything found; the text names the file, the first fault and how many more.
    """

    def __init__(self, path: Path, message: str, faults: Iterable[Fault] = ()) -> None:
        self.path = path
        self.message = message
        self.faults = tuple(faults) or (Fault(message),)
        super().__init__(f"{path}: {message}")

    @classmethod
    def of(cls, path: Path, faults: Iterable[Fault]) -> TableError:
        """The error of a file with these faults, at least one."""
        found = tuple(faults)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return cls(path, f"{found[0]}{more}", found)


def fault_at(found: Mapping[Where, Position], where: Where, message: str) -> Fault:
    """A fault of the value at ``where``, given the text's :func:`~.jsontext.positions`."""
    return Fault(message, dotted(where), *locate(found, where))


def schema_faults(text: str, error: ValidationError) -> list[Fault]:
    """The faults pydantic found in the value of a valid JSON text, in the order of the file."""
    found = positions(text)
    faults: list[Fault] = []
    for detail in error.errors(include_url=False):
        where: Where = detail["loc"]
        if where[-1:] == ("[key]",):
            where = where[:-1]
        if detail["type"] == schema.FAULTS:
            faults += [
                fault_at(found, inner, message) for inner, message in detail["ctx"][schema.FAULTS]
            ]
        else:
            faults.append(fault_at(found, where, _message(where, detail)))
    return sorted(faults, key=lambda fault: (fault.line or 0, fault.column or 0))


def _message(where: Where, detail: Mapping[str, Any]) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        return "missing key"
    if kind == "extra_forbidden":
        return f"unknown key; known here: {', '.join(_known_keys(where[:-1]))}"
    if kind == schema.FAULT:
        return f"found {shown(value)}, {detail['msg']}"
    if kind in _WANTED:
        return f"found {shown(value)}, wanted {_WANTED[kind].format(**detail.get('ctx', {}))}"
    return f"found {shown(value)}: {detail['msg']}"


def _known_keys(where: Where) -> list[str]:
    """The keys that the schema knows in the object at ``where``."""
    model: type[BaseModel] = schema.Table
    if where[:1] == ("entries",):
        inner: dict[Any, type[BaseModel]] = {
            "predicted_us": schema.Predicted,
            "max_error": schema.MaxError,
        }
        model = schema.Entry if len(where) == 2 else inner.get(where[2], schema.Timing)
    elif where[:1] == ("runs",):
        model = schema.Run if len(where) == 2 else schema.Device
    return [field.alias or name for name, field in model.model_fields.items()]
