"""Our attention and fast prefill in real vLLM on the CPU, with its Triton backend interpreted.

Stock is vLLM's own ``unified_attention``.  Each run is a fresh process; see ``test_vllm.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_runs import KINDS, MARKS, Ran, assert_same, run
from vllm_tiny import PROMPTS

pytestmark = MARKS

#: As on a GPU: vLLM's default for a CPU is 128.
BLOCKS = {"block_size": 16}
OFF = {"GEMMA_TUNE_FAST_PREFILL": "0"}


def attended(place: Path, kind: str, *options: str, **variables: str) -> Ran:
    return run(
        place / kind,
        *("--eager", "--triton", "--extra", json.dumps(BLOCKS), *options),
        tables=place / f"tables-{kind}",
        **variables,
    )


@pytest.fixture(scope="module")
def stock(vllm_place: Path) -> dict[str, Ran]:
    """vLLM's own attention; hidden states in ``triton-<kind>.pt``."""
    found = {}
    for kind in KINDS:
        saved = str(vllm_place / f"triton-{kind}.pt")
        found[kind] = attended(vllm_place, kind, "--save", saved, GEMMA_TUNE="0")
        assert found[kind].result["attention"] is None
        assert not found[kind].result["fast_prefill"]
    return found


def served(ran: Ran) -> set[str]:
    """(template, head dim) of the kinds that our kernels ran."""
    return {kind.partition(":")[0] for kind in ran.result["attention"]["kinds"]}


ALL = {f"attention_{phase} head {dim}" for phase in ("prefill", "decode") for dim in (64, 128)}


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_and_hidden_states(vllm_place: Path, stock: dict[str, Ran], kind: str) -> None:
    saved = vllm_place / f"ours-{kind}.pt"
    ran = attended(vllm_place, kind, "--save", str(saved), **OFF)
    assert served(ran) == ALL
    assert ran.result["attention"]["delegated"] == 0
    # One prefill and five steps of decode through four layers.
    assert ran.result["attention"]["served"] == 4 * 6
    assert {"attention_prefill", "attention_decode"} <= set(ran.result["used"])
    assert ran.warnings == []
    assert "14 of 14" in ran.summaries[0] if kind == "dense" else "10 of 10" in ran.summaries[0]
    assert_same(ran, stock[kind])
    ours, theirs = torch.load(saved), torch.load(vllm_place / f"triton-{kind}.pt")
    assert ours.keys() == theirs.keys()
    for name, steps in theirs.items():
        for left, right in zip(ours[name], steps, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_fast_prefill_is_on_by_itself_and_gives_the_same(
    vllm_place: Path, stock: dict[str, Ran]
) -> None:  # case 47: of a long prompt the second half sees one row
    saved = vllm_place / "fast.pt"
    ran = attended(vllm_place, "dense", "--save", str(saved))
    assert ran.result["fast_prefill"]
    assert ran.log.count("gemma-tune: fast prefill is on") == 1
    assert served(ran) == ALL
    assert ran.result["attention"]["delegated"] == 0
    assert_same(ran, stock["dense"])
    # The first half sees the whole prompts, the layers that share K and V one token of each.
    rows = [len(torch.load(saved)[f"layer {index}"][0]) for index in (1, 2)]
    assert rows[0] == sum(map(len, PROMPTS))
    assert rows[1] < rows[0]


@pytest.mark.parametrize(
    "extra",
    [
        # Prompts in pieces: most steps end in the middle of one, beside others that decode.
        {"max_num_batched_tokens": 16, "enable_chunked_prefill": True},
        # All but the end of the long prompt is in the cache when it is asked again.
        {"enable_prefix_caching": True},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_fast_prefill_in_pieces_gives_the_same(
    extra: dict[str, Any], vllm_place: Path, stock: dict[str, Ran], tmp_path: Path
) -> None:  # case 52
    saved = tmp_path / "states.pt"
    options = json.dumps({**BLOCKS, **extra})
    ran = attended(vllm_place, "dense", "--extra", options, "--save", str(saved))
    assert ran.result["fast_prefill"]
    assert ran.result["attention"]["delegated"] == 0
    assert_same(ran, stock["dense"])
    rows = [len(step) for step in torch.load(saved)["layer 1"]]
    if "max_num_batched_tokens" in extra:
        assert max(rows) <= 16
        assert len(rows) > 6
    else:
        assert max(ran.result["cached"]) >= 32


def test_fast_prefill_stays_off_where_nothing_is_shared(
    vllm_place: Path, stock: dict[str, Ran]
) -> None:
    ran = attended(vllm_place, "moe")
    assert not ran.result["fast_prefill"]
    assert "stays off: the model has no layers that share K and V" in ran.log
    assert_same(ran, stock["moe"])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("vllm_plugin.attention:Kind.launch", "vLLM's kernel serves"),
        ("vllm_plugin.attention:Wrapper._kind", None),
        ("vllm_plugin.attention:install", None),
        ("vllm_plugin.fast_prefill:reason_against", "fast prefill is left as it was"),
        ("vllm_plugin.config_hook:install", "block size are left to vLLM"),
    ],
)
def test_a_fault_leaves_the_server_answering(
    vllm_place: Path, stock: dict[str, Ran], broken: str, said: str | None
) -> None:
    ran = attended(vllm_place, "dense", "--break", broken)
    assert_same(ran, stock["dense"])
    found: dict[str, Any] = ran.result
    assert said is None or any(said in warning for warning in ran.warnings)
    if broken.endswith("launch"):
        assert found["attention"]["served"] == 0
        assert len(ran.warnings) == 4  # one for each kind
    if broken.endswith("attention:install"):
        assert found["attention"] is None
        assert (
            "attention (all layers): inactive, RuntimeError: broken on purpose"
            in (ran.summaries[0])
        )
