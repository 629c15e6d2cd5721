"""Attention compiled for the attached GPU: what ``test_attention`` shows of the interpreter's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_oracle import assert_right, batch, decode_inputs

from kernel_templates import attention_decode as decode
from kernel_templates import attention_prefill as prefill
from kernel_templates.attention_problem import AttentionInputs, Problem
from kernel_templates.base import DeviceInfo
from search_spaces.base import spaces
from tuner.device import attached_gpus

pytestmark = pytest.mark.gpu

BOTH = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
#: Query heads, KV heads, head dim and window of the models' layers and of TP slices of them.
LAYERS = [
    (8, 1, 256, 512), (8, 1, 512, 0), (8, 2, 512, 0), (16, 8, 256, 1024), (16, 2, 512, 0),
    (16, 1, 512, 0), (32, 16, 256, 1024), (32, 4, 512, 0), (4, 1, 256, 512), (2, 1, 512, 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def gpu() -> DeviceInfo:
    return attached_gpus()[0]


def problem_of(inputs: AttentionInputs) -> Problem:
    """A problem with this batch's shapes, to ask the search space for configs."""
    _, slots, kv_heads, head_dim = inputs.keys.shape
    cache = "same" if inputs.keys.dtype == inputs.q.dtype else "float8_e4m3fn"
    dtype = str(inputs.q.dtype).removeprefix("torch.")
    return Problem(
        1024, 1024, 1024, inputs.q.shape[1], kv_heads, head_dim, inputs.window, slots,
        inputs.softcap, dtype, cache,
    )  # fmt: skip


def prefilled(inputs: AttentionInputs, gpu: DeviceInfo) -> None:
    """With the default and the likely configs of this GPU, descriptors among them."""
    problem = problem_of(inputs)
    configs = [prefill.default(problem, gpu), *spaces()["attention_prefill"].starts(problem, gpu)]
    for config in dict.fromkeys(configs[:3]):
        assert_right(prefill.TEMPLATE, inputs, config)


def decoded(inputs: AttentionInputs, splits: tuple[int, ...] = (1, 16)) -> None:
    for count in splits:
        made, guards = decode_inputs(inputs, count)
        for guard in guards:
            guard.fill_(torch.nan)
        assert_right(decode.TEMPLATE, made, decode.Config(32, count, 4, 2))
        assert all(guard.isnan().all() for guard in guards)


@BOTH
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_mixed_batch_of_a_layer(
    layer: tuple[int, int, int, int], dtype: str, device: torch.device, gpu: DeviceInfo
) -> None:
    query_heads, kv_heads, head_dim, window = layer
    heads = (query_heads, kv_heads)
    # Prefill, decode, an empty sequence, a chunk on old keys, a draft.
    new, old = [130, 1, 0, 77, 3], [0, window or 300, 9, 700, 1500]
    # Blocks of whole tiles, which descriptors can fetch, and blocks of less than a tile.
    slots = 64 if dtype == "bfloat16" else 16
    prefilled(batch(new, old, heads, head_dim, slots, window, dtype=dtype, device=device), gpu)
    new, old = [1, 0, 8, 2], [1023, 5, 2000, 33]
    decoded(batch(new, old, heads, head_dim, 16, window, dtype=dtype, device=device))


@pytest.mark.parametrize("slots", [16, 48, 128, 256])
@pytest.mark.parametrize("window", [0, 512])
def test_block_sizes(slots: int, window: int, device: torch.device, gpu: DeviceInfo) -> None:
    inputs = batch([90, 33], [0, 600], (8, 1), 256, slots, window, dtype="bfloat16", device=device)
    prefilled(inputs, gpu)
    decoded(dataclasses.replace(inputs, max_new=90), (1, 4))


@pytest.mark.parametrize("context", [0, 1, 510, 511, 512, 513])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_around_the_window(
    context: int, softcap: float, device: torch.device, gpu: DeviceInfo
) -> None:
    new = [1, 2]
    inputs = batch(
        new, [context] * 2, (8, 1), 256, 16, 512, softcap, dtype="bfloat16", device=device
    )
    prefilled(inputs, gpu)
    decoded(inputs)


@BOTH
@pytest.mark.parametrize("head_dim", [256, 512])
def test_fp8_cache(head_dim: int, dtype: str, device: torch.device, gpu: DeviceInfo) -> None:
    if gpu.capability < (8, 9):
        pytest.skip("this GPU has no fp8")
    problem = Problem(
        90, 45, 300, 8, 1, head_dim, 256 * (head_dim == 256), 32, 0.0, dtype, "float8_e4m3fn"
    )
    inputs = prefill.TEMPLATE.make_inputs(problem, 0, device, 8)
    prefilled(inputs, gpu)
    small = dataclasses.replace(problem, tokens=6, queries=3)
    decoded(prefill.TEMPLATE.make_inputs(small, 1, device, 8))


@pytest.mark.parametrize("head_dim", [256, 512])
def test_block_offsets_beyond_32_bits(
    head_dim: int, device: torch.device, gpu: DeviceInfo
) -> None:  # case 49
    """Blocks moved to the far end of a cache of more than 2^31 elements give the same output."""
    slots = 64
    inputs = batch([70], [100], (8, 1), head_dim, slots, dtype="bfloat16", device=device)
    step = slots * 2 * head_dim
    far = 2**31 // step + 8
    cache = torch.empty((far, 1, slots, 2 * head_dim), dtype=torch.bfloat16, device=device)
    table = inputs.block_table.clone()
    for index in range(3):
        block = int(inputs.block_table[0, index])
        table[0, index] = far - 1 - index
        cache[far - 1 - index, 0, :, :head_dim] = inputs.keys[block, :, 0]
        cache[far - 1 - index, 0, :, head_dim:] = inputs.values[block, :, 0]
    keys, values = cache.transpose(1, 2).split(head_dim, -1)
    moved = dataclasses.replace(inputs, keys=keys, values=values, block_table=table)
    assert int(table[0, 0]) * keys.stride(0) > 2**31
    prefilled(moved, gpu)
    decoded(moved, (1, 4))


def test_padded_sequences_of_a_graph(device: torch.device, gpu: DeviceInfo) -> None:
    inputs = batch([1, 1, 0, 0], [9, 700, 0, 0], (8, 1), 256, dtype="bfloat16", device=device)
    table = inputs.block_table.clone()
    table[2:] = 2**30
    prefilled(dataclasses.replace(inputs, block_table=table), gpu)
    decoded(dataclasses.replace(inputs, block_table=table), (1, 16, 64))


def test_a_graph_serves_other_lengths_than_it_was_captured_with(device: torch.device) -> None:
    """Grid and config follow nothing but counts: the lengths may change between replays."""
    template = decode.TEMPLATE
    config = decode.Config(32, 16, 4, 2)
    first = batch([1] * 4, [40, 900, 3, 77], (8, 1), 512, dtype="bfloat16", device=device)
    second = batch([1] * 4, [1500, 2, 640, 0], (8, 1), 512, dtype="bfloat16", device=device)
    blocks = max(one.keys.shape[0] for one in (first, second))
    width = max(one.block_table.shape[1] for one in (first, second))
    cache = torch.zeros((blocks, 1, 16, 1024), dtype=torch.bfloat16, device=device)
    table = torch.zeros((4, width), dtype=torch.int32, device=device)
    keys, values = cache.transpose(1, 2).split(512, -1)
    # Copies: what the graph reads is overwritten, and ``first`` is compared with afterwards.
    q, lengths = first.q.clone(), first.lengths.clone()
    moved = dataclasses.replace(
        first, q=q, keys=keys, values=values, block_table=table, lengths=lengths
    )
    static, _ = decode_inputs(moved, 16)

    def fill(source: AttentionInputs) -> None:
        count = source.keys.shape[0]
        keys[:count].copy_(source.keys)
        values[:count].copy_(source.values)
        table[:, : source.block_table.shape[1]].copy_(source.block_table)
        static.q.copy_(source.q)
        static.lengths.copy_(source.lengths)

    fill(first)
    template.launch(static, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        template.launch(static, config)
    for source in (second, first):
        fill(source)
        assert static.attended is not None
        static.attended.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        wanted, _ = decode_inputs(source, 16)
        template.launch(wanted, config)
        assert wanted.attended is not None
        assert torch.equal(static.attended, wanted.attended)
