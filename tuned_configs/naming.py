"""Where a GPU's tables lie: one naming function for the writer and the reader."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"[^A-Za-z0-9._-]")


def folder_name(device_name: str) -> str:
    """Folder of the tables of a GPU with that driver name.

    ``NVIDIA A100-SXM4-80GB`` gives ``NVIDIA_A100-SXM4-80GB``: spaces and every other character
    outside ``[A-Za-z0-9._-]`` become an underscore.  A leading dot does too, so that no name hides
    its folder or leaves the parent's.  ValueError when nothing readable is left.
    """
    name = _OUTSIDE.sub("_", device_name.strip())
    if not re.search(r"[A-Za-z0-9]", name):
        raise ValueError(f"device name {device_name!r} has no letter or digit to name a folder by")
    return "_" + name[1:] if name.startswith(".") else name
