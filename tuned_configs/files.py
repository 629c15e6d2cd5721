"""Files that several processes write: atomic replacement, and a lock per file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from .faults import TableError

#: Temporary files of writers that were killed are removed when they are older than this.
STALE_SECONDS = 3600.0


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of a file; TableError when it is not free within ``seconds``."""
    # The lock file stays: removing it would let a waiter lock a file that is no longer there.
    lock = path.with_name(f".{path.name}.lock")
    deadline = time.monotonic() + seconds
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"{lock.name} is held by another gemma-tune for over {seconds:g} s"
                    raise TableError(path, message) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def aside_of(path: Path) -> Path:
    """A free name beside a file that is to be moved out of the way: ``<name>.broken-<UTC>``."""
    base = f"{path.name}.broken-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
    name, count = base, 1
    while os.path.lexists(path.with_name(name)):
        count += 1
        name = f"{base}-{count}"
    return path.with_name(name)


def replace_file(path: Path, text: str) -> None:
    """Write a text to a file so that it is there whole or not at all, even after a crash."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        # Not tempfile: its files are readable by their owner only, a server is often another user.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network disks cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_stale(path: Path) -> None:
    """Remove what killed writers of a file left beside it, unless it may still be in use."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                leftover.unlink()
