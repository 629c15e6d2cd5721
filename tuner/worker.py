"""Risky work in a child process: time limits, crashes and hangs end the child, never the tuner.

A :class:`Worker` starts ``python -m tuner.worker`` and sends it named requests; the child answers
each with a value or with an error it survived.  A child that dies or does not answer in time is
killed, and the next request starts a fresh one.  The child is a new interpreter rather than a fork:
CUDA and Triton's compiler do not survive forking, and it gets its own environment.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import IO, Any


class WorkerError(Exception):
    """A request failed; the message is a one-line reason."""


class WorkerDied(WorkerError):
    """The child ended while it worked on the request (crash, kill, sticky error)."""


class WorkerTimeout(WorkerError):
    """The child did not answer in time and was killed."""


class RemoteError(WorkerError):
    """The request raised in the child, which lives on.  ``kind`` is the exception's type name."""

    def __init__(self, kind: str, message: str, details: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.details = details


class Fatal(Exception):
    """Raised in the child by a handler whose process must be replaced (a poisoned CUDA context)."""


class Worker:
    """A replaceable child process that serves the methods of one handler object.

    ``handler`` is ``"module:Class"``; the child imports the module and calls ``Class(**options)``.
    ``env`` overrides environment variables (None removes one).  One user at a time.
    """

    def __init__(
        self,
        handler: str,
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        start_timeout: float = 180.0,
    ) -> None:
        self.handler = handler
        self.options = dict(options or {})
        self.env = dict(env or {})
        self.start_timeout = start_timeout
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running child, None before the first request and after a death."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether a child runs now."""
        return self._process is not None and self._process.poll() is None

    def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Run ``handler.method(*args, **kwargs)`` in the child and return its value.

        Raises :class:`WorkerTimeout` after ``timeout`` seconds, :class:`WorkerDied` when the child
        ended, :class:`RemoteError` when the method raised.  After the first two the next call
        starts a fresh child.
        """
        if not self.alive:
            self.close()
            self._start()
        return self._request((method, args, kwargs), timeout, method)

    def _start(self) -> None:
        parent, child = socket.socketpair()
        environment = {**os.environ, **{k: v for k, v in self.env.items() if v is not None}}
        for name in (name for name, value in self.env.items() if value is None):
            environment.pop(name, None)
        # A folder named like one of our packages where the user works must not be imported.
        environment["PYTHONSAFEPATH"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tuner.worker", str(child.fileno())],
                pass_fds=[child.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        self._connection = Connection(parent.detach())
        self.starts += 1
        self._request((self.handler, self.options), self.start_timeout, "start")

    def _request(self, message: Any, timeout: float, what: str) -> Any:
        assert self._connection is not None
        try:
            self._connection.send(message)
            if not self._connection.poll(timeout):
                self.close()
                raise WorkerTimeout(f"no answer within {timeout:g} s ({what})")
            answer = self._connection.recv()
        except (EOFError, ConnectionError, BrokenPipeError):
            raise WorkerDied(self._obituary(what)) from None
        if answer[0] == "value":
            return answer[1]
        if answer[0] == "fatal":
            self.close()
            raise WorkerDied(answer[1])
        raise RemoteError(*answer[1:])

    def _obituary(self, what: str) -> str:
        """Why the child ended, with the last line it printed."""
        assert self._process is not None
        assert self._log is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self.close()
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        return f"worker {how} ({what})" + (f": {lines[-1][:300]}" if lines else "")

    def close(self) -> None:
        """End the child at once; harmless when there is none."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        if self._log is not None:
            self._log.close()
        self._process = self._connection = self._log = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def headline(error: BaseException) -> str:
    """An error's message in one line: its first, and its last where the first only tells a place,
    as in Triton's compiler ("at 5:4:", source, reason)."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and re.fullmatch(r"at \d+:\d+:", lines[0].strip()):
        lines = [f"{lines[0].strip()} {lines[-1].strip()}"]
    return lines[0][:500] if lines else ""


def _exit_with_parent() -> None:
    """End this process when its parent is gone, however long a kernel keeps the main thread."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve(connection: Connection) -> None:
    """The child's loop: the first message builds the handler, every further one is a request."""
    handler: Any = None
    while True:
        try:
            message = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            if handler is None:
                module, _, name = message[0].partition(":")
                handler = getattr(importlib.import_module(module), name)(**message[1])
                answer: tuple[Any, ...] = ("value", None)
            else:
                method, args, kwargs = message
                answer = ("value", getattr(handler, method)(*args, **kwargs))
        except Fatal as error:
            answer = ("fatal", str(error))
        except Exception as error:
            answer = ("error", type(error).__name__, headline(error), traceback.format_exc(limit=8))
        connection.send(answer)
        if answer[0] == "fatal":
            return


def main() -> None:
    _exit_with_parent()
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    # As the module that handlers import: this file run as a script has a Fatal of its own.
    importlib.import_module("tuner.worker").main()
