"""Are tuned answers as close to the truth as stock's?  Layer by layer, in real vLLM.

The truth is stock vLLM in float32 with the same weights, without tensor-float rounding.  Stock and
tuned run in the model's own type.  All three see the same tokens: prompts of odd lengths in one
batch, then decode steps that are told which token comes next, so that a difference of one layer is
not carried into other tokens.

The rule: in no layer, and in no logits, may tuned's RMS error be above 1.1 times stock's by more
than three standard errors over rows, nor that of its worst row above twice that of stock's worst;
and where the truth is clear its first choice must be ours.
Where stock itself is far from the truth nothing can be said, and that is no pass.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from .engine import Engine

#: Tuned's error over stock's, at most; and what is no error, relative to the truth's RMS.
MOST, FLOOR = 1.1, 3e-5
#: Standard errors that count as noise.
ERRORS = 3
#: Tuned's worst row over stock's worst, at most: a wrong row among hundreds is its own noise.
MOST_WORST = 2.0
#: Stock's error from which nothing is comparable: rows in another order, a broken reference.
UNRELATED = 0.5
START_SECONDS, ANSWER_SECONDS = 900.0, 600.0
#: Of the prompts, as far as the model takes them; the last one is beyond E2B's window.
LENGTHS = (1, 3, 17, 40, 129, 601)
#: Of the reference's process: float32 products without tensor-float rounding.
EXACT = {"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0", "GEMMA_TUNE": "0"}


@dataclass(frozen=True)
class Role:
    """One engine of a verification."""

    name: str
    dtype: str | None
    environment: Mapping[str, str]


class Place(BaseModel):
    """A layer or the logits, in the prompts' step or in decode steps.

    Errors are relative to the RMS of the truth there; ``allowed_rms`` is what the rule lets tuned's
    be; ``worst`` is the RMS error of the row with the largest; ``top`` counts rows of logits whose
    first choice is the truth's, of ``clear`` ones whose lead is beyond stock's own error.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    phase: str
    stock_rms: float
    tuned_rms: float
    allowed_rms: float
    stock_worst: float
    tuned_worst: float
    stock_max: float
    tuned_max: float
    rows: int
    clear: int | None = None
    stock_top: int | None = None
    tuned_top: int | None = None

    @property
    def good(self) -> bool:
        """Whether the rule holds here; NaN never does."""
        close = (
            self.tuned_rms <= self.allowed_rms
            and self.tuned_worst <= MOST_WORST * self.stock_worst + FLOOR
            and self.stock_rms < UNRELATED
        )
        return close and (self.clear is None or self.tuned_top == self.clear)


class Verdict(BaseModel):
    """The whole comparison."""

    model_config = ConfigDict(extra="forbid")

    model: str
    places: list[Place]
    inactive: str | None = None
    facts: dict[str, dict[str, Any]] = {}
    summary: list[str] = []

    @property
    def first_bad(self) -> Place | None:
        return next((place for place in self.places if not place.good), None)

    @property
    def good(self) -> bool:
        return self.inactive is None and self.first_bad is None and bool(self.places)


def prompts_of(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random prompts; seeded."""
    draw = random.Random(11)
    return [[draw.randrange(2, vocabulary) for _ in range(length)] for length in lengths]


def roles(dtype: str, fast: bool = False) -> list[Role]:
    """Truth, stock and tuned."""
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    tuned = {**alone, "GEMMA_TUNE": "1"}
    if not fast:  # with it the last layers see a few tokens only
        tuned["GEMMA_TUNE_FAST_PREFILL"] = "0"
    return [
        Role("truth", "float32", {**alone, **EXACT}),
        Role("stock", dtype, {**alone, "GEMMA_TUNE": "0"}),
        Role("tuned", dtype, tuned),
    ]


def verify(
    model: str,
    settings: Mapping[str, Any],
    dtype: str,
    backend: str | None,
    vocabulary: int,
    decode_steps: int,
    folder: Path,
    say: Callable[[str], None],
    start: Callable[..., Engine] = Engine,
    lengths: tuple[int, ...] = LENGTHS,
) -> Verdict:
    """Run the three engines, one after the other, for a large model fits the GPU but once.

    EngineFailed when one does not start or answer.
    """
    prompts = prompts_of(vocabulary, lengths)
    forced = prompts_of(vocabulary, (decode_steps + 1,))[0]
    files: dict[str, Path] = {}
    facts: dict[str, dict[str, Any]] = {}
    summary: list[str] = []
    for role in roles(dtype):
        options = {**settings, "dtype": role.dtype, "enforce_eager": True}
        # Another backend than vLLM's Triton has no float32.
        chosen = ("TRITON_ATTN" if backend else None) if role.name == "truth" else backend
        if chosen:
            options["attention_config"] = {"backend": chosen}
        engine = start(role.name, options, role.environment, folder / f"{role.name}.log")
        try:
            facts[role.name] = engine.answer(START_SECONDS)
            files[role.name] = folder / f"{role.name}.pt"
            request = {"do": "record", "prompts": prompts, "forced": forced}
            engine.ask({**request, "save": str(files[role.name])}, ANSWER_SECONDS)
            if role.name == "tuned":
                summary = engine.said()
            say(f"{role.name}: {facts[role.name]['seconds']:.0f} s to start, recorded")
        finally:
            engine.close(0.5)
    states = {name: torch.load(path) for name, path in files.items()}
    return Verdict(
        model=model,
        places=compare(states["truth"], states["stock"], states["tuned"]),
        inactive=inactive(summary),
        facts=facts,
        summary=summary,
    )


def inactive(summary: list[str]) -> str | None:
    """Why nothing was tuned, by what the plugin said; None where something was."""
    for line in summary:
        if (found := re.search(r"(\d+) of \d+ hot paths active", line)) and int(found[1]):
            return None
    return summary[-1] if summary else "the plugin said nothing"


States = Mapping[str, list[torch.Tensor]]


def compare(truth: States, stock: States, tuned: States) -> list[Place]:
    """Every layer in order, then the logits; prompts and decode apart.

    ValueError where the three did not record the same.
    """
    places = []
    names = sorted(truth, key=lambda name: (name == "logits", len(name), name))
    for name in names:
        for phase, steps in (("prompts", slice(0, 1)), ("decode", slice(1, None))):
            picked = [torch.cat(each[name][steps]) for each in (truth, stock, tuned)
                      if each.get(name) and each[name][steps]]  # fmt: skip
            if not picked and phase == "decode":
                continue
            shapes = [tuple(each.shape) for each in picked]
            if len(picked) != 3 or len(set(shapes)) > 1:
                raise ValueError(f"{name}, {phase}: recorded {shapes}, wanted three alike")
            places.append(_place(name, phase, *picked))
    return places


def _place(
    name: str, phase: str, truth: torch.Tensor, stock: torch.Tensor, tuned: torch.Tensor
) -> Place:
    size = truth.square().mean().sqrt().item() or 1.0
    errors = [(each - truth).abs() for each in (stock, tuned)]
    # Mean squares of each row; the noise is that of tuned's beyond what stock's allow.
    rows = [each.flatten(1).square().mean(1) / size**2 for each in errors]
    beyond = rows[1] - MOST**2 * rows[0]
    noise = beyond.std().item() * len(beyond) ** -0.5 if len(beyond) > 1 else 0.0
    stock_square, tuned_square = (each.mean().item() for each in rows)
    place = Place(
        name=name,
        phase=phase,
        stock_rms=stock_square**0.5,
        tuned_rms=tuned_square**0.5,
        allowed_rms=(MOST**2 * stock_square + ERRORS * noise) ** 0.5 + FLOOR,
        stock_worst=rows[0].max().item() ** 0.5,
        tuned_worst=rows[1].max().item() ** 0.5,
        stock_max=errors[0].max().item() / size,
        tuned_max=errors[1].max().item() / size,
        rows=len(truth),
    )
    if name == "logits":
        first, second = truth.topk(2).values.unbind(-1)
        # Twice: both candidates may be off.
        clear = first - second > 2 * errors[0].max()
        best = truth.argmax(-1)
        place.clear = int(clear.sum())
        place.stock_top = int(((stock.argmax(-1) == best) & clear).sum())
        place.tuned_top = int(((tuned.argmax(-1) == best) & clear).sum())
    return place
