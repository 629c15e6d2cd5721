"""Where tables lie: those that come with the package, and the user's own."""

from __future__ import annotations

import os
from pathlib import Path

#: The user's folder of tables, read by the tuner and the plugin alike.
FOLDER_VARIABLE = "GEMMA_TUNE_CONFIGS"


def shipped_root() -> Path:
    """The tables that come with the package."""
    return Path(__file__).parent


def user_root() -> Path:
    """The user's own tables: ``GEMMA_TUNE_CONFIGS``, else the user's data folder."""
    if configured := os.environ.get(FOLDER_VARIABLE):
        return Path(os.path.expanduser(configured))
    # Not Path.home: it raises where nobody knows of a home.
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(data) / "gemma-tune" / "tuned_configs"


def roots() -> list[Path]:
    """Where tables are looked for, the preferred last."""
    return [shipped_root(), user_root()]
