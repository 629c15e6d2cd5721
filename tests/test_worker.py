"""A worker's child that hangs, dies or raises never takes its parent along."""

import pytest

from tuner.worker import RemoteError, Worker, WorkerDied, WorkerTimeout


def test_faults_and_recovery() -> None:
    with Worker("faulty:Handler") as worker:
        assert worker.call("echo", 3, timeout=20) == 3
        with pytest.raises(RemoteError, match="ValueError: no"):
            worker.call("fail", timeout=20)
        assert worker.starts == 1
        with pytest.raises(WorkerDied, match="SIGKILL"):
            worker.call("die", timeout=20)
        assert worker.call("echo", 4, timeout=20) == 4
        with pytest.raises(WorkerTimeout, match=r"within 0\.5 s"):
            worker.call("hang", timeout=0.5)
        assert worker.call("echo", 5, timeout=20) == 5
        assert worker.starts == 3
