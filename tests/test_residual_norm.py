"""residual_norm under the interpreter: float16 must equal eager PyTorch bit for bit."""

import dataclasses

import pytest
import torch

from kernel_templates import residual_norm as rn
from tuner.check import compare, gaps_untouched, poison

KINDS = [
    rn.Problem(5, 96, 1, False, 0),
    rn.Problem(5, 96, 1, True, 1),
    rn.Problem(5, 96, 1, False, 3, router=True),
    rn.Problem(5, 96, 2, True, 1),
]


@pytest.mark.parametrize("problem", KINDS)
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_matches_eager(problem: rn.Problem, block: int, pad: int, tokens: int) -> None:
    problem = dataclasses.replace(problem, tokens=tokens, dtype="float16")
    inputs = rn.make_inputs(problem, 1, torch.device("cpu"), pad)
    poison(inputs)
    rn.TEMPLATE.launch(inputs, rn.Config(2, block, 2, 0, 1, 1))
    same = rn.reference(inputs)
    verdict = compare(inputs.outputs(), rn.reference(inputs.upcast()), same)
    assert verdict.ok, verdict.reason
    assert gaps_untouched(inputs)
    for name, output in inputs.outputs().items():
        assert torch.equal(output, same[name]), name


def test_a_wrong_output_is_seen() -> None:
    inputs = rn.make_inputs(KINDS[1], 1, torch.device("cpu"), 0)
    exact, same = rn.reference(inputs.upcast()), rn.reference(inputs)
    outputs = {name: value.clone() for name, value in same.items()}
    outputs["h_out"][2, 7] += 1.0
    verdict = compare(outputs, exact, same)
    assert not verdict.ok
    assert verdict.outputs["h_out"].first_bad == (2, 7)
