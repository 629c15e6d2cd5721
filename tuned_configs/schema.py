"""What a table of tuned configs holds: ``tuned_configs/<gpu>/<template>.json``, schema 1.

Times are microseconds of GPU time per launch, ``spread`` in the same unit; memory is in bytes.
Every model refuses unknown fields, wrong types (a number written as text, true for 1) and numbers
that are not finite.  Fields are declared in the order in which they are written.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from .keys import BUCKET, problem_key

#: Marks the errors whose message is already complete.
FAULT, FAULTS = "fault", "faults"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEXT_NUMBER = re.compile(
    r"\s*[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?\s*|[+-]?(nan|inf|infinity)|true|false|null|none",
    re.IGNORECASE,
)
_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)")


def _fault(message: str) -> PydanticCustomError:
    # Braces in the template would be read as fields of the context.
    return PydanticCustomError(FAULT, "{message}", {"message": message})


def _field_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise _fault("wanted a field name of letters, digits and underscores, without spaces")
    return name


def _scalar(value: Any) -> None:
    if isinstance(value, str):
        if _TEXT_NUMBER.fullmatch(value):
            raise _fault("wanted a bare number, true or false, not one written as text")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise _fault("wanted a finite number")
    elif not isinstance(value, (bool, int)):
        raise _fault("wanted a string, a number, true, false or a list of those")


def _field_value(value: Any) -> Any:
    for item in value if isinstance(value, list) else [value]:
        _scalar(item)
    return value


def _utc(text: str) -> str:
    try:
        if _UTC.fullmatch(text):
            parse_utc(text)
            return text
    except ValueError:
        pass
    raise _fault('wanted a UTC time such as "2026-01-31T23:59:00Z"')


def parse_utc(text: str) -> datetime:
    """The time of a run's ``finished_at``; ValueError for an impossible date."""
    base, _, fraction = text.removesuffix("Z").removesuffix("+00:00").partition(".")
    moment = datetime.fromisoformat(base).replace(tzinfo=timezone.utc)
    return moment.replace(microsecond=int(fraction.ljust(6, "0"))) if fraction else moment


# Printed as they are, hence without control characters, which a terminal would obey.
Name = Annotated[
    str, StringConstraints(min_length=1, pattern=r"^[^\s\p{C}]([^\p{C}]*[^\s\p{C}])?$")
]
Identifier = Annotated[str, AfterValidator(_field_name)]
Fields = dict[Identifier, Annotated[Any, AfterValidator(_field_value)]]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Device(_Strict):
    """The GPU of a run, by its driver's name; ``driver`` is null when none was attached."""

    name: Name
    capability: Annotated[list[Count], Field(min_length=2, max_length=2)]
    sms: PositiveCount
    memory_bytes: PositiveCount
    driver: Name | None


class Run(_Strict):
    """Where entries come from.  A version that is null is unknown and warned about."""

    provenance: Literal["measured", "predicted"]
    device: Device
    gemma_tune: Name | None
    triton: Name | None
    torch: Name | None
    python: Name | None
    finished_at: Annotated[str, AfterValidator(_utc)]


class Timing(_Strict):
    """Microseconds: the median and how far samples spread around it."""

    median: Positive
    spread: NotNegative


class Predicted(_Strict):
    """Microseconds by the model, of the entry's config and of the default config."""

    config: Positive
    default: Positive


class MaxError(_Strict):
    """``ratio``: largest error over that of PyTorch in the same dtype; ``absolute``: largest error,
    in the outputs' unit."""

    ratio: NotNegative
    absolute: NotNegative


class Entry(_Strict):
    """The config for one problem.

    ``verdict`` is "tuned" when ``config`` beats the default config beyond the noise, "default" when
    the default is kept.  A measured entry has ``time_us`` (``default_us`` is null only where the
    default config cannot run) and no ``predicted_us``; a predicted one the reverse.
    """

    problem: Annotated[Fields, Field(min_length=1)]
    config: Annotated[Fields, Field(min_length=1)]
    verdict: Literal["tuned", "default"]
    time_us: Timing | None = None
    default_us: Timing | None = None
    stock_us: Timing | None = None
    predicted_us: Predicted | None = None
    max_error: MaxError | None = None
    trials: Count
    rejected: dict[Name, PositiveCount]
    models: list[Name]
    source_hash: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")]
    run: Name

    @field_validator("problem")
    @classmethod
    def _bucket_is_a_count(cls, problem: dict[str, Any]) -> dict[str, Any]:
        count = problem.get(BUCKET, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise _fault(f"wanted a whole number of at least 1 in {BUCKET!r}")
        return problem

    @field_validator("models")
    @classmethod
    def _models_are_sorted(cls, models: list[str]) -> list[str]:
        if models != sorted(set(models)):
            raise _fault("wanted sorted names without repeats")
        return models


class Table(_Strict):
    """All entries of one template on one GPU."""

    schema_version: Literal[1] = Field(alias="schema")
    template: Identifier
    device: Name
    runs: dict[Name, Run]
    entries: list[Entry]

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        faults = [*self._run_faults(), *self._entry_faults()]
        if faults:
            text = "; ".join(message for _, message in faults)
            raise PydanticCustomError(FAULTS, "{text}", {"text": text, FAULTS: faults})
        return self

    def _run_faults(self) -> list[tuple[tuple[str | int, ...], str]]:
        return [
            (
                ("runs", name, "device", "name"),
                f"found {run.device.name!r}, wanted the table's device {self.device!r}: "
                "a table never carries another GPU's results",
            )
            for name, run in self.runs.items()
            if run.device.name != self.device
        ]

    def _entry_faults(self) -> list[tuple[tuple[str | int, ...], str]]:
        faults: list[tuple[tuple[str | int, ...], str]] = []
        seen: dict[Any, int] = {}
        for index, entry in enumerate(self.entries):
            first = seen.setdefault(problem_key(entry.problem), index)
            if first != index:
                faults.append(
                    (("entries", index, "problem"), f"the same problem as entries[{first}]")
                )
            run = self.runs.get(entry.run)
            if run is None:
                known = ", ".join(sorted(self.runs)) or "none"
                faults.append(
                    (("entries", index, "run"), f"no run {entry.run!r}; known runs: {known}")
                )
                continue
            faults += [
                (("entries", index, name), message)
                for name, message in _figure_faults(entry, run.provenance)
            ]
        return faults


def _figure_faults(entry: Entry, provenance: str) -> list[tuple[str, str]]:
    """Figures that contradict where the entry comes from."""
    if provenance == "measured":
        faults = []
        if entry.time_us is None:
            faults.append(("time_us", "missing, wanted in a measured entry"))
        if entry.predicted_us is not None:
            faults.append(("predicted_us", "wanted null in a measured entry"))
        return faults
    faults = [
        (name, "wanted null in a predicted entry: nothing was measured")
        for name in ("time_us", "default_us", "stock_us", "max_error")
        if getattr(entry, name) is not None
    ]
    if entry.predicted_us is None:
        faults.append(("predicted_us", "missing, wanted in a predicted entry"))
    return faults
