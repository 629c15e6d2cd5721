"""What ``gemma-tune verify`` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from .verify import MOST, MOST_WORST, UNRELATED, Place, Verdict

#: Layers that the table shows, those with the largest ratio of errors.
WORST = 6


def verify_table(verdict: Verdict) -> Table:
    """The layers where tuned compares worst with stock, the last one, and the logits."""
    made = Table(title=f"{verdict.model}: errors against float32, relative to its RMS")
    for head in ("where", "step", "stock RMS", "tuned RMS", "ratio", "stock max", "tuned max", ""):
        made.add_column(head, justify="left" if head in ("where", "step") else "right")
    for place in shown(verdict.places):
        made.add_row(
            place.name,
            place.phase,
            f"{place.stock_rms:.3g}",
            f"{place.tuned_rms:.3g}",
            f"{ratio(place):.3f}",
            f"{place.stock_max:.3g}",
            f"{place.tuned_max:.3g}",
            "" if place.good else "WORSE",
        )
    return made


def shown(places: list[Place]) -> list[Place]:
    """Bad ones, the worst, the last layer and the logits, in order."""
    layers = [place for place in places if place.name != "logits"]
    worst = sorted(layers, key=ratio, reverse=True)[:WORST]
    last = layers[-1].name if layers else ""
    return [
        place
        for place in places
        if place in worst or place.name in ("logits", last) or not place.good
    ]


def ratio(place: Place) -> float:
    """Tuned's RMS error over stock's."""
    return place.tuned_rms / place.stock_rms if place.stock_rms else float(place.tuned_rms > 0) + 1


def lines(verdict: Verdict) -> Iterator[str]:
    """The verdict in words."""
    for place in verdict.places:
        if place.clear is not None:
            yield (
                f"{place.phase}: of {place.rows} first choices {place.clear} are clear in float32; "
                f"stock has {place.stock_top} of those, tuned {place.tuned_top}"
            )
    if verdict.inactive is not None:
        yield f"not verified, nothing was tuned: {verdict.inactive}"
    elif bad := verdict.first_bad:
        yield (
            f"WORSE than stock: first in {bad.name} ({bad.phase}), RMS error {bad.tuned_rms:.3g} "
            f"against stock's {bad.stock_rms:.3g}, allowed {bad.allowed_rms:.3g}; worst row "
            f"{bad.tuned_worst:.3g} against {bad.stock_worst:.3g}, allowed {MOST_WORST:g} times"
            if bad.stock_rms < UNRELATED
            else f"nothing can be said: in {bad.name} ({bad.phase}) stock's own RMS error is "
            f"{bad.stock_rms:.3g} of the truth, wanted below {UNRELATED}"
        )
    else:
        yield f"verified: nowhere above {MOST} times stock's RMS error; clear first choices kept"
