"""The wrapper around vLLM's attention function: what it serves, what it hands on, what it costs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_tables import NAME, write_tables
from vllm_tiny import write_config

from kernel_templates import attention_decode, attention_prefill
from kernel_templates.attention_problem import AttentionInputs, Problem, attention, draw_inputs
from kernel_templates.base import KernelCall
from tuned_configs import TableSet, Timing
from vllm_plugin import attention as wrapped
from vllm_plugin import contract, settings
from vllm_plugin.tables import Choices, find_device

#: As the sliding layers of the tiny dense model: blocks of 32 slots beside 16 of the full layers.
SLIDING = {"query_heads": 4, "kv_heads": 2, "head_dim": 64, "window": 32, "block_size": 32}
FULL = {"query_heads": 4, "kv_heads": 2, "head_dim": 128, "block_size": 16}


@pytest.fixture
def choices(tmp_path: Path) -> Choices:
    return tables(tmp_path)


def tables(folder: Path, **options: Any) -> Choices:
    model = write_config(folder / "dense", "dense")
    write_tables(folder / "tables", model, **options)
    return Choices(find_device(), TableSet.load(folder / "tables", NAME))


class Stock:
    """Stands for vLLM's function: fills the output with 7."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kw: Any) -> None:
        self.calls.append((args, kw))
        kw["out"].fill_(7)


def problem(tokens: int, queries: int, context: int, **kind: Any) -> Problem:
    return Problem(tokens, queries, context, dtype="float32", **kind)


def call_of(inputs: AttentionInputs, **changed: Any) -> dict[str, Any]:
    """The arguments with which vLLM's backend calls."""
    assert inputs.attended is not None
    sequences, kv_heads = inputs.lengths.shape[0], inputs.keys.shape[2]
    one = torch.ones(()).expand(sequences, kv_heads)
    return {
        "q": inputs.q,
        "k": inputs.keys,
        "v": inputs.values,
        "out": inputs.attended,
        "cu_seqlens_q": inputs.starts,
        "max_seqlen_q": inputs.max_new,
        "seqused_k": inputs.lengths,
        "max_seqlen_k": 10**6,
        "softmax_scale": inputs.scale,
        "causal": True,
        "alibi_slopes": None,
        "use_alibi_sqrt": False,
        "window_size": (inputs.window - 1, 0) if inputs.window else (-1, -1),
        "block_table": inputs.block_table,
        "softcap": 0,
        "q_descale": None,
        "k_descale": one if inputs.k_scale is None else inputs.k_scale.expand(one.shape),
        "v_descale": one if inputs.v_scale is None else inputs.v_scale.expand(one.shape),
        "seq_threshold_3D": 64,
        "num_par_softmax_segments": 16,
        "softmax_segm_output": None,
        "softmax_segm_max": None,
        "softmax_segm_expsum": None,
        "sinks": None,
        "output_scale": None,
        "mm_prefix_range": None,
        "rswa_prefix_lens": None,
        "rswa_window": None,
        "kv_quant_mode": 0,
        "k_scale_cache": None,
        "v_scale_cache": None,
        "chunk_lookback": -1,
        "use_td": False,
        "mm_prefix_clamp_sliding_window": True,
        **changed,
    }


def made(given: Problem) -> AttentionInputs:
    return draw_inputs(given, 0, torch.device("cpu"))


CASES = {
    "prefill, window": problem(70, 40, 0, **SLIDING),
    "prefill, full": problem(70, 40, 0, **FULL),
    "chunk, window": problem(80, 40, 50, **SLIDING),
    "decode, window": problem(3, 1, 70, **SLIDING),
    "decode, full": problem(3, 1, 300, **FULL),
    "drafts, full": problem(9, 3, 70, **FULL),
}


@pytest.mark.parametrize("name", CASES)
def test_our_kernel_gives_the_answer(name: str, choices: Choices) -> None:
    stock, inputs = Stock(), made(CASES[name])
    wrapper = wrapped.Wrapper(stock, choices)
    for _ in range(2):  # checked, and then not again
        assert inputs.attended is not None
        inputs.attended.fill_(torch.nan)
        wrapper(**call_of(inputs))
        torch.testing.assert_close(
            inputs.attended, attention(inputs)["attended"], rtol=1e-5, atol=1e-5
        )
    assert stock.calls == []
    assert (wrapper.served, wrapper.delegated) == (2, 0)


def test_padding_of_a_full_graph_is_not_touched(choices: Choices) -> None:
    """Sequences of length 0 behind the real ones, and rows that belong to none."""
    inputs = made(problem(3, 1, 70, **FULL))
    wanted = attention(inputs)["attended"]
    rows = torch.zeros(5, 4, 128)
    rows[:3] = inputs.q
    out = torch.full((5, 4, 128), 5.0)
    padded = dataclasses.replace(
        inputs,
        q=rows,
        attended=out,
        starts=torch.tensor([0, 1, 2, 3, 3, 3], dtype=torch.int32),
        lengths=torch.cat([inputs.lengths, torch.zeros(2, dtype=torch.int32)]),
        block_table=torch.cat([inputs.block_table, torch.full_like(inputs.block_table[:2], 2**30)]),
    )
    stock = Stock()
    wrapped.Wrapper(stock, choices)(**call_of(padded))
    assert stock.calls == []
    torch.testing.assert_close(out[:3], wanted, rtol=1e-5, atol=1e-5)
    assert bool((out[3:] == 5).all())


@pytest.mark.parametrize(
    "changed",
    [
        {"alibi_slopes": torch.ones(4)},
        {"sinks": torch.ones(4)},
        {"mm_prefix_range": torch.zeros(3, 1, 2)},
        {"output_scale": torch.ones(1)},
        {"qq_bias": torch.ones(1)},
        {"rswa_window": 4, "rswa_prefix_lens": torch.ones(3)},
        {"q_descale": torch.ones(1)},
        {"k_scale_cache": torch.ones(1)},
        {"kv_quant_mode": 2},
        {"kv_quant_mode": 1},
        {"causal": False},
        {"causal": torch.ones(3)},
        {"chunk_lookback": 1},
        {"use_td": True},
        {"an_argument_of_tomorrow": 1},
        {"block_table": torch.zeros(4, 8, dtype=torch.int32)},
        {"softcap": 50.0},  # nothing tuned
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_is_not_served_goes_to_vllm_as_it_came(changed: Any, choices: Choices) -> None:
    inputs, stock = made(CASES["decode, full"]), Stock()
    wrapper = wrapped.Wrapper(stock, choices)
    wrapper(**call_of(inputs))
    assert stock.calls == []
    given = call_of(inputs, **changed)
    wrapper(**given)
    ((args, kw),) = stock.calls
    assert args == ()
    assert kw.keys() == given.keys()
    assert all(kw[name] is given[name] for name in given)
    assert bool((given["out"] == 7).all())
    # The kind itself is still served.
    wrapper(**call_of(inputs))
    assert len(stock.calls) == 1


def test_positional_arguments_go_to_vllm(choices: Choices) -> None:
    stock = Stock()
    given = call_of(made(CASES["decode, full"]))
    q = given.pop("q")
    wrapped.Wrapper(stock, choices)(q, **given)
    assert stock.calls[0][0] == (q,)


def test_prefill_and_decode_are_decided_apart(tmp_path: Path) -> None:
    choices = tables(tmp_path)
    (tmp_path / "tables" / "Triton_interpreter" / "attention_decode.json").unlink()
    choices = Choices(choices.device, TableSet.load(tmp_path / "tables", NAME))
    stock = Stock()
    wrapper = wrapped.Wrapper(stock, choices)
    wrapper(**call_of(made(CASES["prefill, full"])))
    assert stock.calls == []
    wrapper(**call_of(made(CASES["decode, full"])))
    assert len(stock.calls) == 1


def test_slower_than_stock_is_left_to_vllm(tmp_path: Path) -> None:
    stock = Stock()
    wrapper = wrapped.Wrapper(stock, tables(tmp_path, stock_us=0.9))
    for name in CASES:
        wrapper(**call_of(made(CASES[name])))
    assert len(stock.calls) == len(CASES)


def test_counts_outside_the_tables_are_left_to_vllm(choices: Choices) -> None:
    """The tables end at 256 tokens; more than four times as many were never measured."""
    shape = dataclasses.replace(CASES["prefill, full"])
    kind = wrapped.Kind(attention_prefill.TEMPLATE, attention_prefill.asked, shape, choices)
    assert kind.config(256) is not None
    assert kind.config(1024) is not None
    assert kind.config(5000) is None


def test_several_queries_are_a_kind_of_their_own(
    choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tile of rows is larger, so the tile of keys and the stages shrink to fit (case 22)."""
    rows = dataclasses.replace(choices.device, shared_per_block=100 * 1024)
    monkeypatch.setattr(choices, "device", rows)
    tuned = attention_decode.Config(tile=64, splits=4, num_warps=4, num_stages=3)
    monkeypatch.setattr(choices, "faster", lambda *_: tuned)
    launched: list[Any] = []
    monkeypatch.setattr(
        wrapped.Kind, "launch", lambda _, inputs, config: launched.append((inputs.max_new, config))
    )
    wrapper = wrapped.Wrapper(Stock(), choices)
    for queries in (1, 2, 3, 4, 5, 7, 8):
        wrapper(**call_of(made(problem(3 * queries, queries, 70, **FULL))))
    assert [new for new, _ in launched] == [1, 2, 4, 4, 8, 8, 8]
    assert len(wrapper.kinds) == 4
    assert launched[0][1] == tuned
    for _, config in launched[1:]:
        assert config.splits == tuned.splits
        assert config.tile * config.num_stages < tuned.tile * tuned.num_stages


def test_a_kernel_that_fails_is_replaced_once_and_for_all(
    choices: Choices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launches: list[int] = []

    def fails(self: KernelCall) -> None:
        launches.append(1)
        raise RuntimeError("no such kernel image")

    monkeypatch.setattr(settings, "_said", set())
    stock = Stock()
    wrapper = wrapped.Wrapper(stock, choices)
    wrapper(**call_of(made(CASES["prefill, full"])))
    with monkeypatch.context() as broken:
        broken.setattr(KernelCall, "run", fails)
        for _ in range(2):
            inputs = made(CASES["decode, full"])
            wrapper(**call_of(inputs))
            assert bool((inputs.attended == 7).all())  # type: ignore[attr-defined]
    assert len(launches) == 1
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "no such kernel image" in warnings[0].getMessage()
    # Other kinds go on, this one does not come back.
    wrapper(**call_of(made(CASES["prefill, full"])))
    assert len(stock.calls) == 2
    wrapper(**call_of(made(CASES["decode, full"])))
    assert len(stock.calls) == 3


def test_fp8_cache_takes_one_scale(
    choices: Choices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dataclasses.replace(CASES["decode, full"], kv_dtype="float8_e4m3fn")
    inputs, stock = made(given), Stock()
    monkeypatch.setattr(choices, "decide", lambda name, _: decided(name))
    config = attention_decode.default(given, choices.device)
    monkeypatch.setattr(choices, "faster", lambda *_: config)
    wrapper = wrapped.Wrapper(stock, choices)
    wrapper(**call_of(inputs, kv_quant_mode=1))
    assert stock.calls == []
    torch.testing.assert_close(inputs.attended, attention(inputs)["attended"], rtol=1e-4, atol=1e-4)
    by_head = torch.ones(2).expand(3, 2)
    wrapper(**call_of(inputs, kv_quant_mode=1, k_descale=by_head))
    assert len(stock.calls) == 1


@pytest.mark.parametrize("name", ["drafts, full", "drafts, window"])
def test_drafts_read_the_targets_cache_with_its_scales(
    name: str, choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:  # case 56
    """A drafter's layers read the target's fp8 cache: its scales make the answer, 1.0 another."""
    kind = {**(FULL if "full" in name else SLIDING), "kv_dtype": "float8_e4m3fn"}
    given = problem(9, 3, 70, **kind)
    scales = {"k_scale": torch.tensor([0.05]), "v_scale": torch.tensor([0.2])}
    inputs, stock = dataclasses.replace(made(given), **scales), Stock()
    monkeypatch.setattr(choices, "decide", lambda name, _: decided(name))
    config = attention_decode.default(given, choices.device)
    monkeypatch.setattr(choices, "faster", lambda *_: config)
    wrapper = wrapped.Wrapper(stock, choices)
    wrapper(**call_of(inputs, kv_quant_mode=1))
    wanted = attention(inputs)["attended"]
    torch.testing.assert_close(inputs.attended, wanted, rtol=1e-4, atol=1e-4)
    ones = torch.ones(())
    wrapper(**call_of(inputs, kv_quant_mode=1, k_descale=ones, v_descale=ones))
    assert inputs.attended is not None
    assert stock.calls == []
    assert float((inputs.attended - wanted).abs().max()) > 0.1


def test_each_kind_of_layer_reads_its_own_block_table(choices: Choices) -> None:  # case 57
    """Two groups of KV caches: other block sizes, other ids in other orders, called in turn."""
    stock = Stock()
    wrapper = wrapped.Wrapper(stock, choices)
    groups = [made(problem(9, 3, 70, **kind)) for kind in (SLIDING, FULL)]
    assert len({group.keys.shape[1] for group in groups}) == 2
    assert groups[0].block_table.tolist() != groups[1].block_table.tolist()
    for _ in range(2):
        for group in groups:
            assert group.attended is not None
            group.attended.fill_(torch.nan)
            wrapper(**call_of(group))
            wanted = attention(group)["attended"]
            torch.testing.assert_close(group.attended, wanted, rtol=1e-5, atol=1e-5)
    assert stock.calls == []


def decided(name: str) -> Any:
    from vllm_plugin.tables import Decision

    return Decision(name, "", True, "")


def test_scratch_is_bounded(choices: Choices, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, seen = made(CASES["decode, full"]), []
    config = attention_decode.Config(16, 16, 4, 1)
    monkeypatch.setattr(choices, "faster", lambda *_: config)
    launch = attention_decode.TEMPLATE.calls

    def counted(self: Any, inputs: Any, config: Any) -> None:
        seen.append(config.splits)
        for call in launch(inputs, config):
            call.run()

    monkeypatch.setattr(wrapped.Kind, "launch", counted)
    wrapped.Wrapper(Stock(), choices)(**call_of(inputs))
    monkeypatch.setattr(wrapped, "MOST_SCRATCH", 3 * 4 * 128 * 4)
    wrapped.Wrapper(Stock(), choices)(**call_of(inputs))
    monkeypatch.setattr(wrapped, "MOST_SCRATCH", 1)
    wrapped.Wrapper(Stock(), choices)(**call_of(inputs))
    assert seen == [16, 4, 1]
    torch.testing.assert_close(inputs.attended, attention(inputs)["attended"], rtol=1e-5, atol=1e-5)


def test_counts_measured_as_slower_are_left_to_vllm(choices: Choices) -> None:
    """Where a kind wins on average and loses at some count (case 40)."""
    lookup = choices._tables.lookup

    def slower_above(name: str, problem: Any, source: str) -> Any:
        match = lookup(name, problem, source)
        assert match is not None
        if problem["tokens"] <= 100:
            return match
        timing = Timing(median=0.5, spread=0.0)
        return dataclasses.replace(match, entry=match.entry.model_copy(update={"stock_us": timing}))

    choices._tables.lookup = slower_above  # type: ignore[method-assign, assignment]
    asked = attention_prefill.asked
    kind = wrapped.Kind(attention_prefill.TEMPLATE, asked, CASES["prefill, full"], choices)
    assert kind.active
    assert [count for count in (64, 100, 101, 256, 1000) if kind.config(count)] == [64, 100]


class Operators(TorchDispatchMode):
    """Notes the tensor operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_a_call_waits_for_nothing_and_reads_no_lengths(
    name: str, choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under capture nothing may wait for the device, and lengths are made up (case 44).

    Two batches that differ only in lengths and contents launch the same; all that touches tensors
    is scratch.
    """
    launched: list[Any] = []

    def keep(self: KernelCall) -> None:
        plain = {k: v for k, v in self.args.items() if not isinstance(v, torch.Tensor)}
        launched.append((self.grid, self.num_warps, self.num_stages, plain))

    monkeypatch.setattr(KernelCall, "run", keep)
    wrapper = wrapped.Wrapper(Stock(), choices)
    inputs = made(CASES[name])
    wrapper(**call_of(inputs))
    once = list(launched)
    launched.clear()
    given = call_of(inputs, max_seqlen_k=1)
    given["seqused_k"] = torch.ones_like(inputs.lengths)
    with Operators() as operators:
        wrapper(**given)
    assert launched == once
    assert wrapper.served == 2
    allowed = ("aten.empty.", "aten.split_with_sizes.")
    assert [each for each in operators.seen if not each.startswith(allowed)] == []


@pytest.mark.parametrize(
    ("count", "seen"), [(0, 1), (1, 1), (256, 256), (257, 288), (1000, 1024), (8191, 8192)]
)
def test_counts_are_rounded(count: int, seen: int) -> None:
    assert wrapped.rounded(count) == seen


def fake_module(monkeypatch: pytest.MonkeyPatch, function: Any) -> ModuleType:
    module = ModuleType(wrapped.MODULE)
    if function is not None:
        module.unified_attention = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, wrapped.MODULE, module)
    return module


def function_of(names: tuple[str, ...]) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(f"def unified_attention({', '.join(names)}): ...", scope)
    return scope["unified_attention"]  # type: ignore[no-any-return]


def test_installed_once_and_removed(monkeypatch: pytest.MonkeyPatch, choices: Choices) -> None:
    stock = function_of(contract.UNIFIED_ATTENTION)
    module = fake_module(monkeypatch, stock)
    wrapper = wrapped.install(choices)
    assert module.unified_attention is wrapper
    assert wrapped.install(choices) is wrapper
    wrapped.remove()
    wrapped.remove()
    assert module.unified_attention is stock


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ((*contract.UNIFIED_ATTENTION, "new"), "other arguments \\(new\\)"),
        (contract.UNIFIED_ATTENTION[::-1], "other arguments \\(order\\)"),
        (None, "has no unified_attention"),
    ],
)
def test_another_function_is_left_alone(
    names: tuple[str, ...] | None, reason: str, monkeypatch: pytest.MonkeyPatch, choices: Choices
) -> None:
    stock = None if names is None else function_of(names)
    module = fake_module(monkeypatch, stock)
    with pytest.raises(LookupError, match=reason):
        wrapped.install(choices)
    assert getattr(module, "unified_attention", None) is stock
