"""Fast prefill's second half replays vLLM's graphs where they were captured, and only there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


class Half:
    """Stands for vLLM's compiled second half; notes the mode that it is called in."""

    def __init__(self) -> None:
        self.modes: list[str] = []

    def __call__(self, fails: bool = False) -> str:
        from vllm.forward_context import get_forward_context

        self.modes.append(get_forward_context().cudagraph_runtime_mode.name)
        if fails:
            raise RuntimeError("injected")
        return "hidden states"


@pytest.fixture
def half() -> Iterator[Any]:
    from vllm_plugin import second_half

    kind = type("Half", (Half,), {"__call__": Half.__call__})
    made = kind()
    second_half.serve(SimpleNamespace(cross_decoder=made))
    yield made
    second_half._stock.pop(kind)


def call(half: Any, mode: str, tokens: int, fails: bool = False, **changed: Any) -> str:
    """One call in a forward context; returns the mode that the context has afterwards."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context

    values: dict[str, Any] = {
        "no_compile_layers": {},
        "attn_metadata": {"layer": object()},
        "slot_mapping": {},
        "cudagraph_runtime_mode": CUDAGraphMode[mode],
        "batch_descriptor": BatchDescriptor(num_tokens=tokens),
    }
    context = ForwardContext(**{**values, **changed})
    with override_forward_context(context):
        if fails:
            with pytest.raises(RuntimeError, match="injected"):
                half(fails=True)
        else:
            assert half() == "hidden states"
    return context.cudagraph_runtime_mode.name


def test_replays_what_was_captured(half: Any) -> None:  # case 47
    assert call(half, "NONE", 8) == "NONE"  # nothing captured yet
    assert call(half, "PIECEWISE", 8) == "PIECEWISE"
    assert call(half, "NONE", 8) == "NONE"  # the context is as it was, the call was not
    assert call(half, "NONE", 16) == "NONE"  # of a size without graphs
    assert half.modes == ["NONE", "PIECEWISE", "PIECEWISE", "NONE"]


def test_full_graphs_are_not_piecewise_ones(half: Any) -> None:
    call(half, "FULL", 8)
    call(half, "NONE", 8)
    assert half.modes == ["FULL", "NONE"]


def test_other_forward_passes_stay_as_they_are(half: Any) -> None:
    from vllm.forward_context import BatchDescriptor

    call(half, "PIECEWISE", 8)
    for changed in (
        {"attn_metadata": None},
        {"attn_metadata": [{}, {}]},
        {"skip_compiled": True},
        {"ubatch_slices": [object()]},
        {"batch_descriptor": None},
        {"batch_descriptor": BatchDescriptor(num_tokens=8, num_reqs=8, uniform=True)},
        {"batch_descriptor": BatchDescriptor(num_tokens=8, has_lora=True)},
    ):
        half.modes.clear()
        call(half, "NONE", 8, **changed)
        assert half.modes == ["NONE"], changed


def test_a_failure_restores_the_context(half: Any) -> None:
    call(half, "PIECEWISE", 8)
    assert call(half, "NONE", 8, fails=True) == "NONE"
    half.modes.clear()
    # A capture that failed is none.
    call(half, "PIECEWISE", 16, fails=True)
    call(half, "NONE", 16)
    assert half.modes == ["PIECEWISE", "NONE"]


def test_left_alone_after_leaving(half: Any) -> None:
    from vllm_plugin import second_half

    call(half, "PIECEWISE", 8)
    second_half.leave(SimpleNamespace(cross_decoder=half))
    half.modes.clear()
    call(half, "NONE", 8)
    assert half.modes == ["NONE"]
    second_half.leave(SimpleNamespace())


@pytest.mark.parametrize(
    ("fast", "mode", "reason"),
    [
        (False, "FULL_AND_PIECEWISE", "fast prefill is off"),
        (True, "FULL", "no piecewise CUDA graphs .*FULL"),
        (True, "NONE", "no piecewise CUDA graphs .*NONE"),
        (True, "FULL_AND_PIECEWISE", None),
        (True, "PIECEWISE", None),
    ],
)
def test_reasons(fast: bool, mode: str, reason: str | None) -> None:
    import re

    from vllm.config import CUDAGraphMode
    from vllm.model_executor.models import gemma4

    from vllm_plugin.second_half import reason_against

    half = gemma4.Gemma4CrossDecoderLayers.__new__(gemma4.Gemma4CrossDecoderLayers)
    model = SimpleNamespace(cross_decoder=half)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]),
    )
    found = reason_against(model, config)
    assert found is None if reason is None else re.search(reason, str(found))
    if reason is None:
        assert reason_against(SimpleNamespace(), config) == "the model has no second half as known"
