"""Strict JSON reading that can say where a fault lies.

The standard parser is lenient where a table must not be: it keeps the last of two equal keys,
accepts NaN and Infinity, and forgets the lines of what it read.  :func:`parse` refuses the first
two; :func:`positions` finds the lines of all values afterwards, so that only a faulty file pays for
it.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Keys and indices that lead from the top of a document to one of its values.
Where = tuple[str | int, ...]
#: Line and column, both from 1.
Position = tuple[int, int]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<unclosed>".*)|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.DOTALL)
_CONSTANTS = ("NaN", "Infinity", "-Infinity")


class JsonError(ValueError):
    """A text that is not strict JSON; ``line`` and ``column`` count from 1, None if unknown.

    ``key`` is the dotted path of the faulty value, or of the last one before the fault.
    """

    def __init__(
        self, message: str, line: int | None = None, column: int | None = None, key: str = ""
    ) -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.key = key


class _Refused(Exception):
    """Raised inside the standard parser, which knows no position there."""


def read_text(path: Path) -> str:
    """The text of a regular UTF-8 file without byte order mark.

    Raises JsonError for anything else that can be read, and OSError (FileNotFoundError,
    PermissionError) for what cannot.
    """
    if path.is_dir():
        raise JsonError("this is a directory, wanted a JSON file")
    if path.exists() and not path.is_file():
        raise JsonError("this is not a regular file")  # reading a pipe would hang the server
    raw = path.read_bytes()
    if raw.startswith(b"\xef\xbb\xbf"):
        raise JsonError(
            "the file begins with a UTF-8 byte order mark; save it as UTF-8 without one", 1, 1
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8 text"
        raise JsonError(message, line) from error


def parse(text: str) -> Any:
    """The value of a JSON text; JsonError names line and column of the first fault."""
    if not text.strip():
        raise JsonError("the file is empty, wanted a JSON object", 1, 1)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        message, offset = _syntax_fault(text, error)
        # With a value at its end, the text up to the fault also tells a key without a value.
        *_, (where, _, _) = _values(f"{text[:offset]} 0")
        raise JsonError(message, *_line_column(text)(offset), dotted(where)) from error
    except _Refused:
        raise _refusal(text) from None
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise JsonError(f"a number cannot be read: {error}") from error


def positions(text: str) -> dict[Where, Position]:
    """Where every value of a valid JSON text stands; a member stands where its key does."""
    position = _line_column(text)
    return {path: position(start) for path, start, _ in _values(text)}


def locate(found: Mapping[Where, Position], where: Sequence[str | int]) -> Position:
    """The position of a value among :func:`positions`, or of its nearest parent."""
    path = tuple(where)
    while path and path not in found:
        path = path[:-1]
    return found.get(path, (1, 1))


def dotted(where: Sequence[str | int]) -> str:
    """``("entries", 3, "run")`` as ``entries[3].run``; odd keys are quoted."""
    parts = ""
    for part in where:
        if isinstance(part, int):
            parts += f"[{part}]"
        elif re.fullmatch(r"[\w.+-]+", part):
            parts += f".{part}" if parts else part
        else:
            parts += f"[{json.dumps(part)}]"
    return parts


def shown(value: Any, limit: int = 60) -> str:
    """A value as JSON, shortened for a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Refused
    return found


def _refuse(_: str) -> Any:
    raise _Refused


def _line_column(text: str) -> Callable[[int], Position]:
    """A function from offsets to positions."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def position(offset: int) -> Position:
        line = bisect.bisect_right(starts, offset)
        return line, offset - starts[line - 1] + 1

    return position


def _syntax_fault(text: str, error: json.JSONDecodeError) -> tuple[str, int]:
    """What is wrong and where, in the words of someone who edits a file by hand.

    Interpreters differ in wording and position for a trailing comma; the text itself does not.
    """
    before, rest = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    if rest[:1] == ",":  # Python 3.13 points at the comma, older ones behind it
        before, rest = text[: error.pos] + ",", rest[1:].lstrip()
    if before.endswith(",") and rest[:1] in ("}", "]"):
        return f"trailing comma before {rest[0]!r}", len(before) - 1
    if not text[error.pos :].strip() or error.msg.startswith("Unterminated string"):
        return f"the file ends too early or is cut off ({error.msg})", error.pos
    return error.msg, error.pos


def _refusal(text: str) -> JsonError:
    """The first equal key or non-finite constant of an otherwise valid text."""
    seen: set[Where] = set()
    position = _line_column(text)
    for path, start, token in _values(text):
        if token.startswith(_CONSTANTS):  # the parser refuses the NaN of NaN1 as well
            message = f"found {token[:60]}, wanted a finite number"
            return JsonError(message, *position(start), dotted(path))
        if path and isinstance(path[-1], str):
            if path in seen:
                return JsonError("duplicate key", *position(start), dotted(path))
            seen.add(path)
    return JsonError("duplicate key or non-finite number")


def _values(text: str) -> Iterator[tuple[Where, int, str]]:
    """(path, offset, first token) of every value; a member's offset is that of its key.

    The text is valid JSON or the beginning of such a text.
    """
    path: list[str | int] = []
    objects: list[bool] = []  # per open bracket: True for an object
    key_at: int | None = None
    expect_key = False
    for match in _TOKEN.finditer(text):
        token, start = match.group(), match.start()
        if expect_key and match.lastgroup == "unclosed":
            return
        if token in ("}", "]"):
            objects.pop()
            path.pop()
        elif token == ",":
            if objects[-1]:
                expect_key = True
            else:
                index = path[-1]
                assert isinstance(index, int)
                path[-1] = index + 1
        elif token == ":":
            expect_key = False
        elif expect_key:
            path[-1], key_at = json.loads(token, strict=False), start
        else:
            yield tuple(path), start if key_at is None else key_at, token
            key_at = None
            if token in ("{", "["):
                objects.append(token == "{")
                path.append("" if token == "{" else 0)
                expect_key = token == "{"
        if token in ("}", "]"):
            expect_key = False
