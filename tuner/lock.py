"""One tuner per GPU: two that time at once would spoil each other's samples."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path


class Busy(Exception):
    """Another process measures on this GPU; the message names it."""


@contextlib.contextmanager
def exclusive(gpu: str) -> Iterator[None]:
    """Hold the lock of a GPU (its UUID); :class:`Busy` when another process does.

    The lock is the operating system's, so it ends with its holder, however that ends.
    """
    name = re.sub(r"[^A-Za-z0-9-]", "_", gpu)
    path = Path(tempfile.gettempdir()) / f"gemma-tune-{name}.lock"
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    except PermissionError:  # another user's file, which can be locked all the same
        handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 64, 0).decode(errors="replace").strip() or "unknown"
            raise Busy(
                f"another gemma-tune (process {holder}) measures on GPU {gpu}: wait for it, or "
                "select another GPU with CUDA_VISIBLE_DEVICES"
            ) from None
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
