"""What is special to ``gelu_mul``: its roundings, its ends, its operands; else: test_templates."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_templates.base import DTYPES
from kernel_templates.gelu_mul import TEMPLATE, Config, GeluMulInputs, Problem
from tuner.check import compare

CPU = torch.device("cpu")
CONFIG = Config(4, 128, 4, 0, 1, 1, evict_first=False, stream_stores=False)


def launched(inputs: GeluMulInputs, config: Config = CONFIG) -> torch.Tensor:
    assert inputs.output is not None
    inputs.output.fill_(torch.nan)
    TEMPLATE.launch(inputs, config)
    return inputs.output


def inputs_of(gate: torch.Tensor, up: torch.Tensor) -> GeluMulInputs:
    return GeluMulInputs(gate, up, output=torch.empty_like(gate))


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a 16-bit type, [256, columns]."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()].view(256, -1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_gate(dtype: str) -> None:
    gate = every_finite(DTYPES[dtype])
    found = launched(inputs_of(gate, torch.ones_like(gate))).double()
    wide = gate.double()
    exact = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    info = torch.finfo(DTYPES[dtype])
    # Half a unit in the last place (in denormals too), and a hundredth for the float32 arithmetic
    # before it.  Results below 14 x 2^-128, where the exponential overflows, are zero.
    half_step = (exact.abs() * info.eps / 2).clamp(min=info.smallest_normal * info.eps / 2)
    allowed = 1.01 * half_step + 14 * 2.0**-128
    assert ((found - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ends(dtype: str) -> None:
    ends = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0]
    gate = torch.tensor([ends], dtype=DTYPES[dtype])
    inputs = inputs_of(gate, torch.full_like(gate, 2.0))
    found = launched(inputs)
    wanted = TEMPLATE.reference(inputs)["output"]
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(found.signbit()[:, 3:], wanted.signbit()[:, 3:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gelu_is_rounded_before_the_product(dtype: str) -> None:
    draw = torch.Generator().manual_seed(1)
    gate = torch.randn(16, 128, generator=draw).abs().to(DTYPES[dtype])
    up = torch.randn(16, 128, generator=draw).to(DTYPES[dtype])
    gelu = launched(inputs_of(gate, torch.ones_like(gate)))
    found = launched(inputs_of(gate, up))
    assert torch.equal(found, gelu * up)
    once = (torch.nn.functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)
    assert not torch.equal(found, once)


def test_it_is_the_tanh_form() -> None:
    gate = torch.tensor([[3.0, -3.0, 2.0, -2.0]])
    inputs = inputs_of(gate, torch.full_like(gate, 1.0))
    found = launched(inputs)
    torch.testing.assert_close(found, TEMPLATE.reference(inputs)["output"], rtol=1e-6, atol=1e-7)
    other = torch.nn.functional.gelu(gate)
    assert ((found - other).abs() > 5e-5).all()


@pytest.mark.parametrize(("operand", "up_stride"), [("halves", 80), ("ple", 5 * 40)])
def test_operands_lie_where_the_model_has_them(operand: str, up_stride: int) -> None:
    problem = Problem(6, 40, operand, up_stride, "float16")
    inputs = TEMPLATE.make_inputs(problem, 0, CPU, 0)
    assert inputs.up.stride() == (up_stride, 1)
    assert inputs.gate.stride() == (80 if operand == "halves" else 40, 1)
    if operand == "halves":
        assert inputs.up.data_ptr() == inputs.gate.data_ptr() + 40 * 2
    found = launched(inputs)
    wanted = TEMPLATE.reference(inputs)
    assert found.dtype == torch.float16  # case 35
    assert compare({"output": found}, TEMPLATE.reference(inputs.upcast()), wanted).ok


@pytest.mark.gpu
def test_31b_rows_beyond_32_bits(device: torch.device) -> None:  # case 49
    tokens, width = 49_933, 21_504
    assert tokens * 2 * width > 2**31
    both = torch.randn(tokens, 2 * width, device=device, dtype=torch.bfloat16)
    output = torch.full((tokens, width), torch.nan, device=device, dtype=torch.bfloat16)
    inputs = GeluMulInputs(both[:, :width], both[:, width:], output=output)
    problem = Problem(tokens, width, "halves", 2 * width)
    from tuner.device import attached_gpus

    default = TEMPLATE.default(problem, attached_gpus()[0])
    persistent = dataclasses.replace(default, programs_per_sm=2, stages=2)
    for config in (default, persistent):
        output.fill_(torch.nan)
        TEMPLATE.launch(inputs, config)
        assert not output.isnan().any()
        for rows in (slice(0, 64), slice(24_960, 25_024), slice(-64, None)):
            part = GeluMulInputs(inputs.gate[rows], inputs.up[rows], output=output[rows])
            verdict = compare(
                part.outputs(), TEMPLATE.reference(part.upcast()), TEMPLATE.reference(part)
            )
            assert verdict.ok, verdict.reason


def test_refusals() -> None:
    inputs = inputs_of(torch.zeros(2, 8), torch.zeros(2, 8))
    for changes, message in (
        ({"up": torch.zeros(2, 9)}, r"up has shape \(2, 9\), wanted \(2, 8\)"),
        ({"gate": torch.zeros(8, 2).t()}, "gate has strided columns"),
        ({"output": None}, "output is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            TEMPLATE.calls(dataclasses.replace(inputs, **changes), CONFIG)
    with pytest.raises(ValueError, match="operand is 'both'"):
        TEMPLATE.make_inputs(Problem(2, 8, "both", 16), 0, CPU, 0)
    with pytest.raises(ValueError, match="up_stride is 17, wanted 16"):
        TEMPLATE.make_inputs(Problem(2, 8, "halves", 17), 0, CPU, 0)
