"""What is special to ``residual_norm``: roundings, scalars, aliasing; else: test_templates."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_templates import residual_norm as rn
from kernel_templates.base import DTYPES
from tuner.check import compare, gaps_untouched, poison

CPU = torch.device("cpu")
KINDS = [
    rn.Problem(5, 96, 1, False, 0),
    rn.Problem(5, 96, 1, True, 1),
    rn.Problem(5, 96, 1, False, 3, router=True),
    rn.Problem(5, 96, 2, True, 1),
]
BOTH = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def config_of(block: int) -> rn.Config:
    return rn.Config(rows=2, block=block, vector=2, programs_per_sm=0, num_warps=1, stages=1)


@pytest.mark.parametrize("problem", KINDS)
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_float16_equals_eager(problem: rn.Problem, block: int, pad: int, tokens: int) -> None:
    problem = dataclasses.replace(problem, tokens=tokens, dtype="float16")
    inputs = rn.make_inputs(problem, 1, CPU, pad)
    poison(inputs)
    rn.TEMPLATE.launch(inputs, config_of(block))
    assert gaps_untouched(inputs)
    same = rn.reference(inputs)
    for name, output in inputs.outputs().items():
        assert torch.equal(output, same[name]), name


def slices(inputs: rn.ResidualNormInputs) -> rn.ResidualNormInputs:
    """Branch and residual as columns of one wider matrix, outputs as columns of another."""
    assert inputs.h_out is not None
    tokens, hidden = inputs.residual.shape
    read = torch.full((tokens, 2 * hidden + 64), 1e4, dtype=inputs.residual.dtype)
    write = torch.full((tokens, 2 * hidden + 64), 7.0, dtype=inputs.residual.dtype)
    first, second = slice(32, 32 + hidden), slice(64 + hidden, 64 + 2 * hidden)
    read[:, first], read[:, second] = inputs.branch0, inputs.residual
    return dataclasses.replace(
        inputs,
        branch0=read[:, first],
        residual=read[:, second],
        h_out=write[:, first],
        norm_out0=write[:, second] if inputs.norm_out0 is not None else None,
    )


def large_residual(problem: rn.Problem, scalar: float) -> rn.ResidualNormInputs:
    """Case 36: a residual of 3e4 beside a branch of 1e-2."""
    inputs = rn.make_inputs(problem, 3, CPU, 0)
    inputs.residual.sign_().mul_(3e4)
    inputs.branch0.mul_(0.02)
    if inputs.scalar is not None:
        inputs.scalar.fill_(scalar)
    return inputs


def assert_right(
    inputs: rn.ResidualNormInputs,
    exact: dict[str, torch.Tensor],
    same: dict[str, torch.Tensor],
) -> None:
    verdict = compare(inputs.outputs(), exact, same)
    assert verdict.ok, verdict.reason
    dtype = inputs.branch0.dtype
    assert {output.dtype for output in inputs.outputs().values()} == {dtype}  # case 35


@BOTH
@pytest.mark.parametrize("hidden", [2816, 5376])
@pytest.mark.parametrize("scalar", [0.05, 1.0])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("block", [1024, 8192])
def test_large_residual_in_column_slices(  # case 36
    dtype: str, hidden: int, scalar: float, tokens: int, block: int
) -> None:
    problem = rn.Problem(tokens, hidden, 1, True, 1, dtype=dtype)
    inputs = slices(large_residual(problem, scalar))
    exact, same = rn.reference(inputs.upcast()), rn.reference(inputs)
    rn.TEMPLATE.launch(inputs, config_of(block))
    assert set(inputs.outputs()) == {"h_out", "norm_out0"}
    assert_right(inputs, exact, same)
    assert inputs.h_out is not None
    around = inputs.h_out._base
    assert around is not None
    gaps = (slice(0, 32), slice(32 + hidden, 64 + hidden), slice(64 + 2 * hidden, None))
    assert all((around[:, gap] == 7.0).all() for gap in gaps)


@BOTH
@pytest.mark.parametrize("problem", KINDS)
@pytest.mark.parametrize("block", [32, 128])
def test_residual_may_be_written_in_place(  # case 36
    problem: rn.Problem, dtype: str, block: int
) -> None:
    inputs = rn.make_inputs(dataclasses.replace(problem, dtype=dtype), 5, CPU, 8)
    exact, same = rn.reference(inputs.upcast()), rn.reference(inputs)
    apart = dataclasses.replace(inputs, residual=inputs.residual.clone())
    rn.TEMPLATE.launch(apart, config_of(block))
    inputs = dataclasses.replace(inputs, h_out=inputs.residual)
    rn.TEMPLATE.launch(inputs, config_of(block))
    assert_right(inputs, exact, same)
    assert apart.h_out is not None
    assert torch.equal(inputs.residual, apart.h_out)


@BOTH
@pytest.mark.parametrize(
    "scalar",
    [
        pytest.param(0.7, id="float"),
        pytest.param(torch.tensor(0.7), id="0-d"),
        pytest.param(torch.tensor([0.7]), id="1-d"),
    ],
)
@pytest.mark.parametrize("block", [32, 128])
def test_a_float32_scalar_does_not_widen(  # case 35
    dtype: str, scalar: torch.Tensor | float, block: int
) -> None:
    problem = rn.Problem(5, 96, 2, False, 3, router=True, dtype=dtype)
    inputs = dataclasses.replace(rn.make_inputs(problem, 1, CPU, 0), scalar=scalar)
    poison(inputs)
    rn.TEMPLATE.launch(inputs, config_of(block))
    # PyTorch multiplies by a Python float in float32 and rounds the product.
    plain = rn.reference(dataclasses.replace(inputs, scalar=None))["h_out"]
    assert plain.dtype == DTYPES[dtype]
    h = (plain.float() * 0.7).to(plain.dtype)
    exact = rn.reference(dataclasses.replace(inputs, scalar=0.7).upcast())
    same = rn.reference(dataclasses.replace(inputs, scalar=0.7))
    assert_right(inputs, exact, same)
    if dtype == "float16":
        assert inputs.h_out is not None
        assert torch.equal(inputs.h_out, h)


def test_every_rounding_is_kept() -> None:
    # Chosen so that leaving out any one rounding would change some value.
    problem = dataclasses.replace(KINDS[3], tokens=64, dtype="float16")
    inputs = rn.make_inputs(problem, 9, CPU, 0)
    rn.TEMPLATE.launch(inputs, config_of(128))
    wide = {name: value.half() for name, value in rn.reference(inputs.upcast()).items()}
    same = rn.reference(inputs)
    for name, output in inputs.outputs().items():
        assert torch.equal(output, same[name]), name
        assert not torch.equal(output, wide[name]), name


def test_refusals() -> None:
    inputs = rn.make_inputs(KINDS[1], 1, CPU, 0)
    for changes, message in (
        ({"h_out": None}, "h_out is missing"),
        ({"branch0": torch.zeros(5, 95)}, r"branch0 has shape \(5, 95\), wanted 96 columns"),
        ({"residual": torch.zeros(96, 5).t()}, "residual has strided columns"),
    ):
        with pytest.raises(ValueError, match=message):
            rn.TEMPLATE.calls(dataclasses.replace(inputs, **changes), config_of(128))


def test_a_wrong_output_is_seen() -> None:
    inputs = rn.make_inputs(KINDS[1], 1, CPU, 0)
    exact, same = rn.reference(inputs.upcast()), rn.reference(inputs)
    outputs = {name: value.clone() for name, value in same.items()}
    outputs["h_out"][2, 7] += 1.0
    verdict = compare(outputs, exact, same)
    assert not verdict.ok
    assert verdict.outputs["h_out"].first_bad == (2, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual": torch.empty(3, 96)}, r"branch0 is \(5, 96\), wanted \(3, 96\)"),
        ({"residual": torch.empty(5, 96, dtype=torch.int64)}, "residual is torch.int64"),
        ({"residual": torch.empty(96)}, r"residual is torch.float32 \(96,\), wanted floating"),
        ({"h_out": torch.empty(96)}, r"h_out is \(96,\), wanted \(5, 96\)"),
        ({"h_out": None}, r"h_out is None, wanted \(5, 96\)"),
        ({"h_out": torch.empty(1, 96).expand(5, 96)}, "h_out has strides .* memory of its own"),
        ({"norm_out1": None}, r"norm_out1 is None, wanted \(5, 96\)"),
        ({"norm_weight0": None}, "norm_out0 is .*wanted None|norm_weight0 is None"),
        ({"norm_weight1": torch.empty(95)}, r"norm_weight1 is \(95,\), wanted \(96,\)"),
        ({"sum_weight": None}, r"sum_weight is None, wanted \(96,\)"),
        ({"branch1": torch.empty(5, 96).half()}, "dtype of branch1 is torch.float16"),
        ({"scalar": torch.empty(0)}, r"scalar is torch.float32 \(0,\), wanted one"),
        ({"scalar": "0.5"}, "scalar is str"),
        ({"router": 7}, "router is 7, wanted -1 to 2"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, object], message: str) -> None:
    problem = rn.Problem(5, 96, 2, True, 3, router=True, dtype="float32")
    inputs = dataclasses.replace(rn.make_inputs(problem, 1, CPU, 0), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        rn.TEMPLATE.launch(inputs, rn.Config(1, 128, 2, 0, 1, 1))


def test_one_memory_for_two_outputs_is_refused() -> None:
    problem = rn.Problem(5, 96, 1, False, 2, dtype="float32")
    inputs = rn.make_inputs(problem, 1, CPU, 0)
    inputs.norm_out1 = inputs.norm_out0
    with pytest.raises(ValueError, match="norm_out0 and norm_out1 are the same memory"):
        rn.TEMPLATE.launch(inputs, rn.Config(1, 128, 2, 0, 1, 1))
