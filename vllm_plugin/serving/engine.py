"""A vLLM engine in a process of its own, asked for work by lines of JSON.

The child (``child.py``) owns vLLM; here is only what starts it, talks to it and ends it, so a
crash, a hang or a flood of log lines stays there.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

#: The last lines of a child's log that an error shows.
TAIL = 12


class EngineFailed(Exception):
    """An engine that did not start, died, hung or answered nonsense; the text says which."""


class Engine:
    """One child process.  ``command`` is overridden by tests."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        command: tuple[str, ...] = (sys.executable, "-m", "vllm_plugin.serving.child"),
    ) -> None:
        self.name, self.log = name, log
        self._answers: queue.Queue[bytes] = queue.Queue()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stream: BinaryIO) -> None:
        for line in stream:
            self._answers.put(line)
        self._answers.put(b"")

    def answer(self, seconds: float) -> dict[str, Any]:
        """The child's next answer; EngineFailed when none comes in time, or none that is one."""
        deadline = time.monotonic() + seconds
        try:
            line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise EngineFailed(f"{self.name}: no answer in {seconds:.0f} s{self.tail()}") from None
        if not line:
            code = self._process.wait(10)
            raise EngineFailed(f"{self.name}: ended with status {code}{self.tail()}")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            shown = line[:200].decode(errors="replace").rstrip()
            raise EngineFailed(f"{self.name}: answered {shown!r}, wanted a line of JSON")
        if "error" in found:
            raise EngineFailed(f"{self.name}: {found['error']}{self.tail()}")
        return found

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: the answer says so
        return self.answer(seconds)

    def tail(self) -> str:
        """The end of the child's log, below a line of its own."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            shown = [line for line in lines if line.strip()][-TAIL:]
            if shown:
                return f"; the end of {self.log}:\n" + "\n".join(shown)
        return ""

    def said(self) -> list[str]:
        """What the plugin told this child's log."""
        with contextlib.suppress(OSError):
            text = self.log.read_text(encoding="utf-8", errors="replace")
            return re.findall(r"^.*(?:\] |WARNING.*)(gemma-tune[ :].*)$", text, re.MULTILINE)
        return []

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self, seconds: float = 5.0) -> None:
        """End the child and all that it started."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
