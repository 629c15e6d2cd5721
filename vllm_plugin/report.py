"""What is active and why not, gathered while planning and logged as one line."""

from __future__ import annotations

from typing import Any

from . import settings
from .tables import Decision

_logged: set[str] = set()


class Report:
    """Decisions by (hot path, kind) with the number of modules each concerns."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.device = ""
        self.refusal = ""
        self.notes: list[str] = []
        self.decisions: dict[Decision, int] = {}
        text = getattr(model, "config", None)
        self.model = (
            f"Gemma 4 (hidden {getattr(text, 'hidden_size', '?')}, "
            f"{getattr(text, 'num_hidden_layers', '?')} layers)"
        )

    def add(self, decision: Decision) -> bool:
        """Count a decision for one more module; returns whether it is active."""
        self.decisions[decision] = self.decisions.get(decision, 0) + 1
        return decision.active

    def note(self, text: str) -> None:
        """Say something more at the end of the summary; an empty text says nothing."""
        if text:
            self.notes.append(text)

    def refuse(self, reason: str) -> None:
        """Nothing is active, for one reason."""
        self.refusal = reason

    def any_active(self) -> bool:
        """Whether at least one module runs a kernel of ours."""
        return not self.refusal and any(decision.active for decision in self.decisions)

    def summary(self) -> str:
        """The line for the log."""
        import vllm

        head = (
            f"gemma-tune {settings.version()}: {self.model}"
            f"{f' on {self.device}' if self.device else ''}, vLLM {vllm.__version__}"
        )
        if self.refusal:
            return "; ".join([f"{head}: inactive, vLLM runs stock: {self.refusal}", *self.notes])
        active = [decision for decision in self.decisions if decision.active]
        parts = [f"{head}: {len(active)} of {len(self.decisions)} hot paths active"]
        for decision in sorted(self.decisions, key=lambda each: (not each.active, each.template)):
            state = "" if decision.active else "inactive, "
            count = self.decisions[decision]
            parts.append(
                f"{decision.template} ({decision.kind}): {state}{decision.reason}"
                f" [{count} module{'s' * (count > 1)}]"
            )
        return "; ".join([*parts, *self.notes])

    def log(self) -> None:
        """Log the summary, once per process for the same text."""
        text = self.summary()
        if text not in _logged:
            _logged.add(text)
            settings.log.info("%s", text)
