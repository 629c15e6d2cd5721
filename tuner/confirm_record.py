"""What confirmation remembers beside the tables: predictions that it rejected, and why.

Confirmed ones need no record: a measured entry stands in their place.  The file lies in the folder
of the GPU's tables under a name that is no table's.  It is rewritten after every rejection.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_templates.base import KernelTemplate
from tuned_configs import Entry
from tuned_configs.files import replace_file
from tuned_configs.naming import folder_name

FILE = ".rejected-predictions.json"


def key_of(template: KernelTemplate[Any, Any], entry: Entry, stamp: Mapping[str, str]) -> str:
    """Identifies a prediction and what judged it: with another Triton, torch or driver it is judged
    again."""
    what = [template.name, entry.problem, entry.config, entry.source_hash, dict(stamp)]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


class Record:
    """Rejected predictions by key, with the reason."""

    def __init__(self, path: Path, reasons: dict[str, str]) -> None:
        self.path = path
        self._reasons = reasons

    @classmethod
    def load(cls, root: Path, device_name: str) -> Record:
        """The record of a GPU; an unreadable one counts as empty, and is written anew."""
        path = root / folder_name(device_name) / FILE
        reasons: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                reasons = {str(key): str(value) for key, value in found.items()}
        return cls(path, reasons)

    def rejected(self, key: str) -> str:
        """Why the prediction was rejected; empty if it was not."""
        return self._reasons.get(key, "")

    def reject(self, key: str, reason: str) -> None:
        """Remember a rejection, on disk."""
        self._reasons[key] = reason or "rejected"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, json.dumps(self._reasons, indent=1, sort_keys=True) + "\n")
