"""What is special to ``moe_routing``: ties, extremes and NaN; common tests: test_templates."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_templates.moe_routing import METHODS, TEMPLATE, Config, MoeRoutingInputs, Problem
from tuner.check import compare, poison, touched_gaps

EVERY_METHOD = pytest.mark.parametrize("method", METHODS)
EXPERTS, TOP_K = 128, 8
INF, NAN = float("inf"), float("nan")


def config_of(method: str, rows: int = 8) -> Config:
    return Config(rows=rows, method=method, programs_per_sm=0, num_warps=1)


def inputs_of(logits: torch.Tensor, top_k: int = TOP_K) -> MoeRoutingInputs:
    """Padded outputs, and scales from 0.01 to 8."""
    tokens, experts = logits.shape
    problem = Problem(tokens, experts, top_k)
    inputs = TEMPLATE.make_inputs(problem, 0, logits.device, 5)
    scale = torch.logspace(-2, 0.903, experts, device=logits.device).to(torch.bfloat16)
    inputs = dataclasses.replace(inputs, logits=logits, per_expert_scale=scale)
    poison(inputs)
    return inputs


def routed(logits: torch.Tensor, config: Config, top_k: int = TOP_K) -> dict[str, torch.Tensor]:
    """Launch and hold against the reference; returns the outputs."""
    inputs = inputs_of(logits, top_k)
    TEMPLATE.launch(inputs, config)
    outputs = inputs.outputs()
    same, exact = TEMPLATE.reference(inputs), TEMPLATE.reference(inputs.upcast())
    verdict = compare(outputs, exact, same, ("ids",))
    assert verdict.ok, verdict.reason
    assert touched_gaps(inputs) == {}
    assert outputs["weights"].dtype == torch.float32  # case 35
    assert outputs["ids"].dtype == torch.int32
    assert_distinct(outputs["ids"], logits.shape[1])
    return outputs


def assert_distinct(ids: torch.Tensor, experts: int) -> None:
    ordered = ids.long().sort(dim=1).values
    assert ((ordered >= 0) & (ordered < experts)).all()
    assert (ordered[:, 1:] > ordered[:, :-1]).all()


def stride_160(logits: torch.Tensor) -> torch.Tensor:
    """The same rows 160 elements apart, with larger logits between them that must not be read."""
    whole = torch.full((len(logits), 160), 1e4, dtype=logits.dtype, device=logits.device)
    view = whole[:, : logits.shape[1]]
    view.copy_(logits)
    return view


def special_rows(dtype: torch.dtype) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits, and the ids that the tie rule wants, of case 34 (a) to (g) and some more."""
    rows, wanted = [], []

    def row(fill: float, places: dict[int, float], ids: list[int]) -> None:
        values = torch.full((EXPERTS,), fill, dtype=dtype)
        for at, value in places.items():
            values[at] = value
        rows.append(values)
        wanted.append(ids)

    best = {100: 9.0, 90: 8.0, 80: 7.0, 70: 6.0, 60: 5.0, 50: 4.0, 40: 3.0}
    step = 1.0 + torch.finfo(dtype).eps
    row(-3.0, {**best, 30: 1.0, 20: 1.0, 110: 1.0}, [*best, 20])  # (a) 8th and 9th equal
    row(-3.0, {**best, 30: step, 20: 1.0}, [*best, 30])  # (b) one step apart
    row(-3.0, {**best, 30: -1.0, 20: -step}, [*best, 30])
    row(0.25, {}, list(range(8)))  # (c) all equal
    row(-0.0, {60: 0.0, 127: 0.0}, list(range(8)))  # (d) +0.0 and -0.0 are equal
    row(-1.0, {5: -0.0, 3: 0.0, 9: -0.0}, [3, 5, 9, 0, 1, 2, 4, 6])
    row(0.5, {77: INF}, [77, 0, 1, 2, 3, 4, 5, 6])  # (e) one +inf
    row(-INF, {}, list(range(8)))  # (f) all -inf
    row(-INF, {9: 1.0, 5: 2.0}, [5, 9, 0, 1, 2, 3, 4, 6])
    row(NAN, {}, list(range(8)))  # (g) NaN
    row(0.0, {33: NAN, 99: -NAN, 44: INF}, [33, 99, 44, 0, 1, 2, 3, 4])
    return torch.stack(rows), wanted


@EVERY_METHOD
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ties_and_extremes(method: str, dtype: str) -> None:  # case 34
    logits, wanted = special_rows(getattr(torch, dtype))
    outputs = routed(stride_160(logits), config_of(method, rows=4))
    assert outputs["ids"].tolist() == wanted
    finite = ~outputs["weights"].isnan().any(dim=1)
    assert finite.tolist() == [True] * 6 + [False, False, True, False, False]
    # A row with a NaN, a +infinity or nothing but -infinity has no weight that is not NaN.
    assert outputs["weights"][~finite].isnan().all()


@EVERY_METHOD
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_bfloat16_logits_of_stride_160(method: str, tokens: int) -> None:  # case 34
    generator = torch.Generator().manual_seed(tokens)
    logits = 3 * torch.randn(tokens, EXPERTS, generator=generator)
    # Coarse values: bfloat16 logits tie often.
    logits = stride_160((logits * 4).round().div(4).to(torch.bfloat16))
    outputs = routed(logits, config_of(method, rows=16))
    best = logits.float().topk(TOP_K).values.sort(dim=1).values
    assert torch.equal(logits.float().gather(1, outputs["ids"].long()).sort(dim=1).values, best)


@pytest.mark.gpu
@EVERY_METHOD
def test_many_tokens(method: str, device: torch.device) -> None:  # case 34
    generator = torch.Generator(device=device).manual_seed(0)
    logits = torch.randn(262144, EXPERTS, generator=generator, device=device)
    special, wanted = special_rows(torch.bfloat16)
    logits = logits.to(torch.bfloat16)
    logits[-len(special) :] = special.to(device)
    for rows, warps in ((1, 1), (4, 4), (16, 4)):
        config = dataclasses.replace(config_of(method, rows), num_warps=warps)
        outputs = routed(stride_160(logits), config)
        assert outputs["ids"][-len(special) :].tolist() == wanted


@EVERY_METHOD
def test_nan_rows_change_no_other_row(method: str) -> None:  # case 41
    logits = torch.randn(8, EXPERTS, generator=torch.Generator().manual_seed(3))
    clean = routed(logits, config_of(method))
    logits[5:] = NAN
    spoilt = routed(logits, config_of(method))
    for name in ("weights", "ids"):
        assert torch.equal(clean[name][:5], spoilt[name][:5])
    assert_distinct(spoilt["ids"][5:], EXPERTS)
    assert spoilt["weights"][5:].isnan().all()


@EVERY_METHOD
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 5), (100, 6)])
def test_padding_is_never_chosen(method: str, experts: int, top_k: int) -> None:
    # Below every padding value a careless kernel would compare with.
    logits = torch.full((3, experts), -INF)
    logits[1] = -3e38
    logits[2] = torch.arange(experts) - 1e5
    outputs = routed(logits, config_of(method, rows=2), top_k)
    assert outputs["ids"][0].tolist() == list(range(top_k))
    assert outputs["ids"][2].tolist() == list(range(experts - 1, experts - 1 - top_k, -1))


def test_the_reference_is_softmax_then_top_k() -> None:
    logits = 2 * torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(5))
    inputs = inputs_of(logits)
    found = TEMPLATE.reference(inputs)
    probabilities = torch.softmax(logits.double(), dim=1)
    top, ids = probabilities.topk(TOP_K)
    wanted = top / top.sum(dim=1, keepdim=True) * inputs.per_expert_scale.double()[ids]
    assert torch.equal(found["ids"], ids.int())
    torch.testing.assert_close(found["weights"].double(), wanted, rtol=1e-6, atol=1e-9)


def test_refusals() -> None:
    logits = torch.zeros(2, EXPERTS)
    inputs = inputs_of(logits)
    config = config_of("argmax")
    for changes, message in (
        ({"top_k": 129}, "top_k 129 of 128 experts"),
        ({"top_k": 4}, r"wanted torch.float32 \(2, 4\)"),
        ({"weights": inputs.weights.bfloat16()}, "weights is torch.bfloat16"),
        ({"ids": inputs.ids.long()}, "ids is torch.int64"),
        ({"logits": torch.zeros(EXPERTS, 2).t()}, "logits has strided columns"),
        ({"per_expert_scale": torch.ones(64)}, "per_expert_scale has shape"),
        ({"weights": None}, "missing"),
    ):
        with pytest.raises(ValueError, match=message):
            TEMPLATE.calls(dataclasses.replace(inputs, **changes), config)
