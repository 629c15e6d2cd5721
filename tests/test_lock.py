"""One tuner per GPU: the second is told who holds it, and death releases it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tuner.lock import Busy, exclusive

HOLDER = """
import sys, time
from tuner.lock import exclusive
with exclusive(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_second_holder_is_told_the_first_and_kill_9_releases() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "GPU-1/2 x"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Busy) as refused, exclusive("GPU-1/2 x"):
            pass
        assert f"(process {holder.pid})" in str(refused.value)
        assert "GPU-1/2 x" in str(refused.value)
        assert "CUDA_VISIBLE_DEVICES" in str(refused.value)
        with exclusive("GPU-3"):
            pass  # another GPU is free
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with exclusive("GPU-1/2 x"):
        pass


def test_released_by_an_exception_and_held_again(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), exclusive("GPU-1"):
        raise KeyboardInterrupt
    with exclusive("GPU-1"):
        (file,) = folder.glob("gemma-tune-*.lock")
        assert file.read_text() == f"{os.getpid()}\n"
        # Not only between processes.
        with pytest.raises(Busy), exclusive("GPU-1"):
            pass
    with exclusive("GPU-1"):
        pass


def test_leftover_of_a_longer_pid_is_overwritten(folder: Path) -> None:
    with exclusive("GPU-1"):
        (file,) = folder.glob("gemma-tune-*.lock")
    file.write_text("123456789012\nrest")
    with exclusive("GPU-1"):
        assert file.read_text() == f"{os.getpid()}\n"


def test_another_users_file_can_be_locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with exclusive("GPU-1"):
        pass
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:  # what a sticky /tmp answers
            raise PermissionError(13, "Permission denied")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with exclusive("GPU-1"), pytest.raises(Busy), exclusive("GPU-1"):
        pass
