"""Tensor-parallel ranks agree or none is active; no rank is left waiting.  Real gloo processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_plugin import ranks

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys, torch.distributed as dist
from vllm_plugin import ranks
rank, store, digest = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
ranks.SECONDS = 5.0
if digest != "absent":
    print("ANSWER " + ranks.compare(None if digest == "failed" else digest, dist.group.WORLD))
else:
    import time; time.sleep(8)
"""


def compare(folder: Path, digests: tuple[str, str]) -> list[str]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(folder / "store"), digest],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, digest in enumerate(digests)
    ]  # fmt: skip
    answers = []
    for process in started:
        text, _ = process.communicate(timeout=100)
        lines = [line for line in text.splitlines() if line.startswith("ANSWER")]
        answers.append(lines[0].removeprefix("ANSWER ").strip() if lines else text)
    return answers


def test_same_digests_agree(tmp_path: Path) -> None:
    assert compare(tmp_path, ("abc", "abc")) == ["", ""]


@pytest.mark.parametrize("other", ["xyz", "failed"])
def test_every_rank_learns_of_a_difference(tmp_path: Path, other: str) -> None:  # case 66
    first, second = compare(tmp_path, ("abc", other))
    assert first == second
    assert f"rank 0: abc, rank 1: {other}" in first


def test_a_rank_that_never_comes_is_a_difference(tmp_path: Path) -> None:  # case 68
    first, _ = compare(tmp_path, ("abc", "absent"))
    assert first.startswith("tensor-parallel ranks could not compare their tables")


def test_one_rank_asks_nobody() -> None:
    assert ranks.disagreement("abc", SimpleNamespace(parallel_config=None)) == ""
    one = SimpleNamespace(tensor_parallel_size=1)
    assert ranks.disagreement(None, SimpleNamespace(parallel_config=one)) == ""
