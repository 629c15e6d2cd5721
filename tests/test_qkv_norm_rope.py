"""What is special to ``qkv_norm_rope``; every template's common tests are elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_templates.base import DeviceInfo, LayerShape, ModelShape
from kernel_templates.common import rms_norm
from kernel_templates.qkv_norm_rope import (
    TEMPLATE,
    Config,
    Problem,
    QkvNormRopeInputs,
    rope_cache,
)
from search_spaces.qkv_norm_rope import SPACE

CPU = torch.device("cpu")
CONFIG = Config(rows=4, vector=8, programs_per_sm=0, num_warps=4)
BOTH = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def inputs_of(problem: Problem, pad: int = 0, seed: int = 0) -> QkvNormRopeInputs:
    inputs = TEMPLATE.make_inputs(problem, seed, CPU, pad)
    for output in inputs.outputs().values():
        output.fill_(torch.nan)
    return inputs


def in_place(inputs: QkvNormRopeInputs) -> QkvNormRopeInputs:
    """The same operands, each output a view of its own columns of ``qkv`` where it has some."""
    head_dim = inputs.q_weight.shape[0]
    q, kv = inputs.query_heads * head_dim, inputs.kv_heads * head_dim
    has_k, has_v = inputs.kv != "shared", inputs.kv == "separate"
    return dataclasses.replace(
        inputs,
        q_out=inputs.qkv[:, :q],
        k_out=inputs.qkv[:, q : q + kv] if has_k else None,
        v_out=inputs.qkv[:, q + kv : q + 2 * kv] if has_v else inputs.v_out,
    )


def check(inputs: QkvNormRopeInputs, config: Config = CONFIG) -> dict[str, torch.Tensor]:
    """Launch, and hold every output against the exact answer and PyTorch's own error."""
    exact, native = TEMPLATE.reference(inputs.upcast()), TEMPLATE.reference(inputs)
    dtype = inputs.qkv.dtype
    TEMPLATE.launch(inputs, config)
    outputs = inputs.outputs()
    assert outputs.keys() == exact.keys()
    for name, output in outputs.items():
        assert output.dtype == dtype, name
        assert output.shape == exact[name].shape, name
        if output.numel():
            ours, theirs = (x[name].float() - exact[name] for x in (outputs, native))
            assert ours.abs().max() <= 2 * theirs.abs().max(), name
            # Fewer roundings than PyTorch, so on average never worse.
            assert ours.square().mean() <= 1.01 * theirs.square().mean(), name
    return outputs


def strided(tokens: int, columns: int, around: int, dtype: torch.dtype) -> torch.Tensor:
    """Random [tokens, columns] inside wider rows whose other columns hold a pattern."""
    whole = torch.full((tokens, columns + 2 * around), 7.0, dtype=dtype)
    view = whole[:, around : around + columns]
    view.copy_(torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1)))
    return view


def assert_pattern(view: torch.Tensor, around: int) -> None:
    assert view._base is not None
    assert (view._base[:, :around] == 7.0).all()
    assert (view._base[:, around + view.shape[1] :] == 7.0).all()


@BOTH
@pytest.mark.parametrize("tokens", [0, 1, 257])
def test_31b_sliding_in_place(tokens: int, dtype: str) -> None:
    inputs = inputs_of(Problem(tokens, 32, 16, 256, dtype=dtype))
    qkv = strided(tokens, 16384, 64, inputs.qkv.dtype)
    inputs = in_place(dataclasses.replace(inputs, qkv=qkv))
    assert inputs.v_out is not None
    assert inputs.v_out.stride() == (16384 + 128, 1)
    check(inputs, dataclasses.replace(CONFIG, rows=512))
    assert_pattern(qkv, 64)


@BOTH
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_31b_full_has_no_v_columns(tokens: int, dtype: str) -> None:
    inputs = inputs_of(Problem(tokens, 32, 4, 512, "k_eq_v", 64, dtype=dtype), pad=8)
    assert inputs.qkv.shape == (tokens, 16384 + 2048)
    qkv = strided(tokens, 16384 + 2048, 32, inputs.qkv.dtype)
    inputs = in_place(dataclasses.replace(inputs, qkv=qkv))
    # K is overwritten in place, V must come from what it was.
    raw = qkv[:, 16384:].clone().unflatten(1, (4, 512))
    outputs = check(inputs)
    torch.testing.assert_close(outputs["v_out"], rms_norm(raw, None, 1e-6).flatten(1))
    assert_pattern(qkv, 32)


@BOTH
def test_k_eq_v_ignores_the_v_slot(dtype: str) -> None:
    inputs = inputs_of(Problem(3, 16, 2, 512, "k_eq_v", 64, dtype=dtype))
    wide = torch.full((3, 20 * 512), torch.nan, dtype=inputs.qkv.dtype)
    wide[:, : 18 * 512] = inputs.qkv
    check(dataclasses.replace(inputs, qkv=wide))
    assert wide[:, 18 * 512 :].isnan().all()


@BOTH
def test_kv_shared_layer_touches_only_q(dtype: str) -> None:
    inputs = inputs_of(Problem(5, 8, 1, 256, "shared", 128, dtype=dtype))
    assert inputs.qkv.shape == (5, 10 * 256)
    assert set(inputs.outputs()) == {"q_out"}
    inputs.qkv[:, 8 * 256 :] = torch.nan
    check(in_place(inputs))
    assert inputs.qkv[:, 8 * 256 :].isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("programs_per_sm", [0, 2])
@pytest.mark.parametrize("kv", ["separate", "k_eq_v", "shared"])
def test_every_tiling(kv: str, programs_per_sm: int, rows: int) -> None:
    # 25 rows of Q and 15 of K: ragged tiles that span tokens.
    inputs = inputs_of(Problem(5, 5, 3, 32, kv, 4, dtype="float16"), pad=8)
    check(in_place(inputs), Config(rows, 8, programs_per_sm, 1))


#: Heads per tensor-parallel rank, K and V replicated where there are fewer than ranks.
RANKS = [
    pytest.param(Problem(3, 4, 2, 256), id="26B sliding, TP 4"),
    pytest.param(Problem(3, 4, 1, 512, "k_eq_v", 64), id="26B full, TP 4"),
    pytest.param(Problem(3, 8, 1, 512, "k_eq_v", 64), id="12B full, TP 2"),
    pytest.param(Problem(3, 2, 1, 256), id="12B sliding, TP 8"),
    pytest.param(Problem(3, 4, 1, 512, "separate", 64), id="E2B full, TP 2"),
    pytest.param(Problem(3, 1, 1, 256, "shared"), id="E2B KV shared, TP 8"),
]


@BOTH
@pytest.mark.parametrize("problem", RANKS)
def test_heads_per_rank(problem: Problem, dtype: str) -> None:
    check(inputs_of(dataclasses.replace(problem, dtype=dtype), pad=16))


@pytest.mark.parametrize("kv", ["separate", "k_eq_v"])
def test_offsets_beyond_int32(kv: str) -> None:
    stride, width = 2**30 + 64, 4 * 32
    problem = Problem(3, 2, 1, 32, kv, 16, dtype="float16")
    inputs = inputs_of(problem)
    # Pages that nobody touches take no memory.
    qkv = torch.empty(2 * stride + width, dtype=torch.float16).as_strided((3, width), (stride, 1))
    qkv.copy_(torch.randn(3, width, generator=torch.Generator().manual_seed(2)))
    v_out = qkv[:, 96:] if kv == "k_eq_v" else None
    inputs = in_place(dataclasses.replace(inputs, qkv=qkv, v_out=v_out))
    check(inputs)


@BOTH
def test_pairs_that_do_not_rotate(dtype: str) -> None:
    clean = inputs_of(Problem(4, 2, 1, 512, "separate", 64, dtype=dtype), pad=8)
    poisoned = dataclasses.replace(clean, cos_sin=clean.cos_sin.clone())
    for half in (0, 256):
        poisoned.cos_sin[:, half + 64 : half + 256] = torch.nan
    TEMPLATE.launch(poisoned, CONFIG)
    outputs = {name: output.clone() for name, output in poisoned.outputs().items()}
    for name, output in check(clean).items():
        assert torch.equal(outputs[name], output), name
    normal = rms_norm(clean.qkv[:, :512], clean.q_weight, 1e-6)
    passed = [*range(64, 256), *range(256 + 64, 512)]
    torch.testing.assert_close(outputs["q_out"][:, passed], normal[:, passed])
    assert (outputs["q_out"][:, :64] != normal[:, :64]).float().mean() > 0.5


@BOTH
def test_float32_cache_is_not_rounded(dtype: str) -> None:
    inputs = inputs_of(Problem(4, 4, 1, 256, dtype=dtype))
    cache = rope_cache(256, 128, 1e4, 4096, torch.float32, CPU)
    half = check(inputs)["q_out"].clone()
    inputs = dataclasses.replace(inputs, cos_sin=cache)
    ours = check(inputs)["q_out"]
    y1, y2 = rms_norm(inputs.qkv[:, :256], inputs.q_weight, 1e-6).float().chunk(2, -1)
    cos, sin = cache[inputs.positions].chunk(2, -1)
    wanted = torch.cat((y1 * cos - y2 * sin, y2 * cos + y1 * sin), -1).to(ours.dtype)
    assert (ours[:, :256] == wanted).float().mean() > 0.99
    assert (ours != half).float().mean() > 0.01


def test_a_broken_token_does_not_reach_others() -> None:
    inputs = inputs_of(Problem(4, 2, 1, 32, "separate", 16, dtype="float16"))
    before = {name: output.clone() for name, output in check(inputs).items()}
    inputs.qkv[2] = torch.nan
    TEMPLATE.launch(inputs, CONFIG)
    for name, output in inputs.outputs().items():
        assert output[2].isnan().all()
        assert torch.equal(output[[0, 1, 3]], before[name][[0, 1, 3]])


def test_rope_cache_is_proportional() -> None:
    cache = rope_cache(512, 64, 1e6, 100, torch.float32, CPU)
    inverse = torch.tensor([1e6 ** -(2 * i / 512) for i in range(64)], dtype=torch.float64)
    angle = torch.arange(100, dtype=torch.float64)[:, None] * inverse
    torch.testing.assert_close(cache[:, :64].double(), angle.cos(), rtol=0, atol=2e-5)
    torch.testing.assert_close(cache[:, 256:320].double(), angle.sin(), rtol=0, atol=2e-5)
    assert (cache[:, 64:256] == 1).all()
    assert (cache[:, 320:] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": "both"}, "kv is 'both', wanted one of shared, k_eq_v, separate"),
        ({"k_out": None}, r"k_out is None, wanted \(4, 32\)"),
        ({"v_out": torch.empty(4, 64)}, r"v_out is \(4, 64\), wanted \(4, 32\)"),
        ({"v_out": torch.empty(4, 32)}, r"dtype of v_out is torch.float32, wanted torch.float16"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions is \(3,\), wanted \(4,\)"),
        ({"positions": torch.zeros(4)}, "dtype of positions is torch.float32"),
        ({"cos_sin": torch.zeros(9, 16)}, r"cos_sin is \(9, 16\), wanted \(9, 32\)"),
        ({"rotary_pairs": 17}, "rotary_pairs is 17, wanted 0 to 16"),
        ({"query_heads": 3}, "columns of qkv is 128, wanted at least 5 heads x 32"),
        ({"qkv": torch.empty(128, 4, dtype=torch.float16).t()}, "strides of qkv"),
        ({"k_weight": torch.empty(32)}, "dtype of k_weight"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, object], message: str) -> None:
    inputs = inputs_of(Problem(4, 2, 1, 32, "separate", 16, dtype="float16"))
    with pytest.raises(ValueError, match=f"qkv_norm_rope: {message}"):
        TEMPLATE.calls(dataclasses.replace(inputs, **change), CONFIG)  # type: ignore[arg-type]


def test_too_many_heads_for_the_row_index() -> None:
    problem = Problem(2**28, 4, 1, 32, "shared", 16, dtype="float16")
    meta = torch.device("meta")
    assert len(TEMPLATE.calls(TEMPLATE.make_inputs(problem, 0, meta, 0), CONFIG)) == 1
    more = dataclasses.replace(problem, tokens=2**28 + 1)
    with pytest.raises(ValueError, match="tokens x heads is 268435457 x 4, wanted at most"):
        TEMPLATE.calls(TEMPLATE.make_inputs(more, 0, meta, 0), CONFIG)


def test_problems_of_a_model() -> None:
    sliding = LayerShape("sliding", 256, 8, 1, False, False, 512, 6144, 128, 1e4)
    full = LayerShape("full", 512, 8, 1, False, False, None, 6144, 64, 1e6)
    shared = dataclasses.replace(sliding, kv_shared=True)
    k_eq_v = dataclasses.replace(full, query_heads=16, kv_heads=2, k_eq_v=True)
    model = ModelShape("m", 1536, 1000, (sliding, sliding, full, shared, k_eq_v, shared))
    found = TEMPLATE.problems(model, (1, 64))
    assert [TEMPLATE.describe(p) for p in found if p.tokens == 64] == [
        "head 256: 8 Q + 1 K + 1 V",
        "head 512: 8 Q + 1 K + 1 V, 64 pairs rotate",
        "head 256: 8 Q only",
        "head 512: 16 Q + 2 K=V, 64 pairs rotate",
    ]
    assert len(found) == 8


def test_cost_counts_each_value_once() -> None:
    # 10 heads in, 10 out, cos and sin of 128 pairs, one position; two weights.
    assert TEMPLATE.cost(Problem(7, 8, 1, 256)).bytes == 7 * (20 * 512 + 512 + 8) + 1024
    # 18 heads in, 20 out, cos and sin of 64 pairs.
    k_eq_v = Problem(7, 16, 2, 512, "k_eq_v", 64)
    assert TEMPLATE.cost(k_eq_v).bytes == 7 * (38 * 1024 + 256 + 8) + 2048
    assert TEMPLATE.cost(Problem(7, 8, 1, 256, "shared")).bytes == 7 * (16 * 512 + 512 + 8) + 512


GPUS = [
    DeviceInfo("a", (8, 0), 108, 166912, 167936, 40 << 20, 80 << 30, 2.04e12, 312e12),
    DeviceInfo("b", (8, 9), 58, 101376, 102400, 48 << 20, 24 << 30, 0.3e12, 121e12, 65536, 1536),
    DeviceInfo("c", (9, 0), 132, 232448, 233472, 60 << 20, 140 << 30, 4.8e12, 989e12),
]


@pytest.mark.parametrize("device", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16, 33, 256, 8192, 65536])
def test_default_is_in_the_space(tokens: int, device: DeviceInfo) -> None:
    for heads in ((8, 1), (8, 2), (32, 16), (4, 1), (1, 1), (32, 4)):
        for kind in ((256, "separate", 128), (512, "k_eq_v", 64), (512, "shared", 64)):
            for dtype in ("bfloat16", "float32"):
                problem = Problem(tokens, *heads, *kind, dtype=dtype)
                config = TEMPLATE.default(problem, device)
                assert SPACE.infeasible(problem, config, device) is None
                choices = SPACE.choices(problem, device)
                assert all(getattr(config, name) in values for name, values in choices.items())
