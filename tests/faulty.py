"""A worker handler with every fault, for test_worker."""

import os
import signal
import time
from typing import Any


class Handler:
    def echo(self, value: Any) -> Any:
        return value

    def fail(self) -> None:
        raise ValueError("no")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        time.sleep(1e6)
