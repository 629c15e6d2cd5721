"""Attention's numbers: shapes, masks, paging, splits.  Limits and problems are in another file."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_oracle import assert_right, batch, decode_inputs
from test_templates import far_apart

from kernel_templates import attention_decode as decode
from kernel_templates import attention_prefill as prefill
from kernel_templates.attention_problem import AttentionInputs, Problem

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
#: Query heads and KV heads of the five models and of their tensor-parallel slices.
HEADS = [
    (8, 1), (8, 2), (16, 8), (16, 2), (16, 1), (32, 16), (32, 4), (4, 1), (2, 1), (1, 1),
]  # fmt: skip


def prefilled(inputs: AttentionInputs, block_m: int = 16, tile: int = 16) -> torch.Tensor:
    """The output, with masks at the edges only; with masks everywhere it must be right too."""
    everywhere = prefill.Config(block_m, tile, 1, False, False, 4, 2)
    assert_right(prefill.TEMPLATE, inputs, everywhere)
    config = dataclasses.replace(everywhere, edges_apart=True)
    return assert_right(prefill.TEMPLATE, inputs, config)


def decoded(inputs: AttentionInputs, splits: int = 1, tile: int = 16) -> torch.Tensor:
    made, guards = decode_inputs(inputs, splits)
    found = assert_right(decode.TEMPLATE, made, decode.Config(tile, splits, 4, 2))
    assert all(guard.isnan().all() for guard in guards)  # case: bytes behind every scratch buffer
    return found


@BOTH
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]} on {heads[1]}")
def test_heads(heads: tuple[int, int], dtype: str) -> None:
    prefilled(batch([5, 9], [0, 3], heads, dtype=dtype, window=6), block_m=32)
    decoded(batch([1, 2], [9, 3], heads, dtype=dtype), splits=2)


@BOTH
@pytest.mark.parametrize(("head_dim", "window"), [(256, 24), (512, 0)])
def test_real_head_dims(head_dim: int, window: int, dtype: str) -> None:
    prefilled(batch([9], [30], (8, 1), head_dim, 32, window, dtype=dtype), tile=32)
    decoded(batch([1, 1], [40, 7], (8, 1), head_dim, 32, window, dtype=dtype), splits=2)


@BOTH
def test_mixed_batch(dtype: str) -> None:
    # Prefill, decode, an empty sequence, a chunk on old keys, a draft.
    inputs = batch([20, 1, 0, 17, 3], [0, 37, 9, 40, 30], (4, 2), window=16, dtype=dtype)
    prefilled(inputs, block_m=32)
    prefilled(dataclasses.replace(inputs, window=16), block_m=16, tile=32)


@pytest.mark.parametrize(
    ("parts", "edges_apart", "descriptors"),
    [(1, True, False), (1, False, False), (2, True, False), (1, True, True), (2, True, True)],
)
@pytest.mark.parametrize(("block_m", "tile"), [(16, 64), (64, 16), (128, 128), (256, 32)])
def test_prefill_tiles(
    block_m: int, tile: int, parts: int, edges_apart: bool, descriptors: bool
) -> None:
    for window in (0, 9, 100):
        inputs = batch([50, 33], [0, 170], (8, 2), window=window, slots=128)
        config = prefill.Config(block_m, tile, parts, edges_apart, descriptors, 4, 1)
        (call,) = prefill.TEMPLATE.calls(inputs, config)
        assert (call.args["key_rows"] is not None) == descriptors
        assert_right(prefill.TEMPLATE, inputs, config)


@pytest.mark.parametrize("order", ["heads, slots", "slots, heads", "K beside V", "one head"])
def test_layouts_that_descriptors_can_describe(order: str) -> None:
    inputs = batch([30, 3], [0, 90], (4, 1 if order == "one head" else 2), slots=32)
    keys, values = inputs.keys, inputs.values
    if order == "slots, heads":
        keys, values = keys.contiguous(), values.contiguous()
    elif order == "K beside V":
        both = torch.stack((keys, values), 1)  # [blocks, 2, slots, heads, head dim]
        keys, values = both[:, 0], both[:, 1]
    moved = dataclasses.replace(inputs, keys=keys, values=values)
    config = prefill.Config(16, 16, 1, True, True, 4, 2)
    (call,) = prefill.TEMPLATE.calls(moved, config)
    assert call.args["key_rows"] is not None
    assert_right(prefill.TEMPLATE, moved, config)


def test_other_memory_is_read_by_pointers() -> None:
    config = prefill.Config(16, 16, 1, True, True, 4, 2)
    inputs = batch([30, 3], [0, 90], (4, 2), slots=32)
    odd_blocks = torch.zeros(inputs.keys.shape[0], 2 * 32 * 64 + 8, dtype=inputs.keys.dtype)
    odd = odd_blocks[:, :-8].view(-1, 2, 32, 64).transpose(1, 2)[..., :32]
    for change in (
        {"keys": inputs.keys.contiguous()},  # other strides than the values'
        {"keys": odd.copy_(inputs.keys), "values": odd},  # blocks are no whole number of rows
    ):
        moved = dataclasses.replace(inputs, **change)
        (call,) = prefill.TEMPLATE.calls(moved, config)
        assert call.args["key_rows"] is None
        assert_right(prefill.TEMPLATE, moved, config)
    # Columns and rows are counted in 32 bits.
    far = torch.empty_strided(
        (1, 16, 3, 64), (0, 3 * (2**30 + 64), 2**30 + 64, 1), device="meta", dtype=torch.float16
    )
    wide = dataclasses.replace(inputs, q=inputs.q.to("meta"), keys=far, values=far)
    assert prefill.described(wide, 16, 64) is None
    assert (
        prefill.described(dataclasses.replace(wide, keys=far[:0], values=far[:0]), 16, 64) is None
    )
    small = batch([30, 3], [0, 90], (4, 2), slots=48)
    (call,) = prefill.TEMPLATE.calls(small, dataclasses.replace(config, tile=32))
    assert call.args["key_rows"] is None
    narrow = dataclasses.replace(inputs, keys=inputs.keys.to(torch.float8_e4m3fn))
    narrow = dataclasses.replace(narrow, values=inputs.values.to(torch.float8_e4m3fn))
    (call,) = prefill.TEMPLATE.calls(narrow, config)
    assert call.args["key_rows"] is None


@pytest.mark.parametrize("group", [3, 6])
def test_groups_that_leave_rows_idle(group: int) -> None:
    prefilled(batch([9, 4], [2, 0], (2 * group, 2)))
    decoded(batch([3, 1], [20, 9], (2 * group, 2)), splits=2)


@pytest.mark.parametrize("slots", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("tile", [16, 64])
def test_block_sizes(slots: int, tile: int) -> None:
    prefilled(batch([20, 3], [60, 300], (2, 1), slots=slots, window=40), tile=tile)
    decoded(batch([1, 2], [60, 300], (2, 1), slots=slots), splits=2, tile=tile)


@pytest.mark.parametrize("context", [0, 1, 30, 31, 32, 33])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_around_the_window(context: int, softcap: float) -> None:
    # Lengths window - 1, window and window + 1 of 32, and a first token.
    prefilled(batch([1, 2], [context, context], window=32, softcap=softcap))
    decoded(batch([1, 2], [context, context], window=32, softcap=softcap), splits=4)


@pytest.mark.parametrize("splits", decode.SPLITS)
@pytest.mark.parametrize("window", [0, 20])
def test_splits(splits: int, window: int) -> None:
    # Five tiles at most: from eight splits on some are empty.
    decoded(batch([1, 0, 3], [75, 9, 2], (4, 2), window=window), splits)


@pytest.mark.parametrize("queries", [1, 2, 3, 5, 8])
def test_drafts(queries: int) -> None:
    inputs = batch([queries, 1, queries], [33, 20, 0], (16, 1), window=24)
    assert torch.allclose(decoded(inputs, 2).clone(), prefilled(inputs), atol=2e-3)


def test_more_rows_than_a_program_takes() -> None:
    # Sixteen heads x eight drafts at head 512: two programs of 64 rows.
    assert decode.rows_per_program(128, 512) == 64
    decoded(batch([8], [20], (16, 1), 512), splits=2)


@pytest.mark.parametrize("cache", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_separate_keys_and_values(cache: torch.dtype) -> None:
    inputs = batch([9, 2], [5, 40], (4, 2), window=16, separate=True)
    inputs = dataclasses.replace(inputs, keys=inputs.keys.to(cache), values=inputs.values.to(cache))
    prefilled(inputs)
    decoded(inputs, 2)


@BOTH
def test_fp8_cache_with_scales(dtype: str) -> None:
    problem = Problem(40, 20, 30, 4, 2, 32, 24, dtype=dtype, kv_dtype="float8_e4m3fn")
    inputs = prefill.TEMPLATE.make_inputs(problem, 0, CPU, 8)
    assert inputs.keys.dtype == torch.float8_e4m3fn
    before = prefilled(inputs).clone()
    decoded(dataclasses.replace(inputs, max_new=20), 4)
    assert inputs.k_scale is not None
    assert inputs.v_scale is not None
    plain = dataclasses.replace(inputs, k_scale=None, v_scale=inputs.v_scale * 2)
    assert not torch.equal(prefilled(plain), before)
    # The scales belong to scores and values, nothing else.
    same = dataclasses.replace(inputs, q=inputs.q * inputs.k_scale.item(), k_scale=None)
    assert torch.allclose(prefilled(same).float(), before.float(), rtol=0.02, atol=0.02)


def test_strides_of_size_one_dimensions_do_not_count() -> None:
    inputs = batch([1], [9], (1, 1))
    odd: dict[str, Any] = {}
    for name, strides in (
        ("q", (7, 13, 1)),
        ("keys", (3, 32, 5, 1)),
        ("values", (11, 32, 1, 1)),
        ("block_table", (1, 1)),
    ):
        tensor = getattr(inputs, name)
        if name in ("keys", "values"):  # the one block that is used
            tensor = tensor[inputs.block_table[0, :1].long()]
        odd[name] = tensor.as_strided(tensor.shape, strides, tensor.storage_offset())
    odd["block_table"] = torch.zeros_like(inputs.block_table)
    strange = dataclasses.replace(inputs, **odd)
    for template, config in (
        (prefill.TEMPLATE, prefill.Config(16, 16, 1, True, False, 4, 2)),
        (decode.TEMPLATE, decode.Config(16, 1, 4, 2)),
    ):
        args = template.calls(decode_inputs(strange, 1)[0], config)[0].args
        names = ("q_stride", "q_head_stride", "key_block_stride", "value_head_stride")
        assert [args[name] for name in names] == [0, 0, 0, 0]
    assert torch.equal(prefilled(strange), prefilled(inputs))
    decoded(strange)


def test_block_offsets_beyond_32_bits() -> None:  # case 49
    inputs = batch([2], [20], (2, 1))
    used = inputs.block_table[0, :2].long()
    keys, values = (
        far_apart(torch.cat((tensor[used], tensor[used[:1]] * torch.nan)))
        for tensor in (inputs.keys, inputs.values)
    )
    # Order 2, 0: the far block is read first.
    for tensor in (keys, values):
        tensor[2].copy_(tensor[0])
        tensor[0].copy_(tensor[1])
    table = torch.tensor([[2, 0, 2**30]], dtype=torch.int32)
    assert keys.stride(0) * 2 > 2**31
    moved = dataclasses.replace(inputs, keys=keys, values=values, block_table=table)
    wanted = prefill.TEMPLATE.reference(inputs)["attended"]
    for run in (
        lambda: prefill.TEMPLATE.launch(moved, prefill.Config(16, 16, 1, True, False, 4, 2)),
        lambda: decode.TEMPLATE.launch(decode_inputs(moved, 2)[0], decode.Config(16, 2, 4, 2)),
    ):
        assert moved.attended is not None
        moved.attended.fill_(torch.nan)
        run()
        assert torch.allclose(moved.attended, wanted, atol=2e-3)


def test_padded_sequences_of_a_graph_are_left_alone() -> None:
    # A captured graph runs with more sequences and rows than are real: the rest has no queries.
    inputs = batch([1, 1, 0, 0], [9, 20, 0, 0])
    table = inputs.block_table.clone()
    table[2:] = 2**30
    decoded(dataclasses.replace(inputs, block_table=table), 4)
    prefilled(dataclasses.replace(inputs, block_table=table))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": torch.zeros(2, dtype=torch.int32)}, r"starts is \(2,\), wanted \(3,\)"),
        ({"lengths": torch.zeros(2)}, "dtype of lengths is torch.float32"),
        ({"attended": None}, "attended is None"),
        ({"window": -1}, "window, softcap is -1"),
        ({"scale": 0.0}, "scale is 0.0, wanted above 0"),
        ({"scale": float("nan")}, "scale is nan, wanted above 0"),
        ({"q": torch.zeros(3, 3, 32)}, "query heads is 3, wanted a multiple of 2 KV heads"),
        ({"q": torch.zeros(3, 8, 24)}, "head_dim is 24, wanted a power of two"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    inputs = dataclasses.replace(batch([1, 2], [3, 4], (8, 2)), **change)
    with pytest.raises(ValueError, match=f"attention: {message}"):
        prefill.TEMPLATE.calls(inputs, prefill.Config(16, 16, 1, True, False, 4, 2))


def test_configs_that_do_not_fit() -> None:
    inputs = batch([1, 2], [3, 4], (32, 1))
    with pytest.raises(ValueError, match="block_m is 16, wanted at least 32 query heads"):
        prefill.TEMPLATE.calls(inputs, prefill.Config(16, 16, 1, True, False, 4, 2))
    made, _ = decode_inputs(inputs, 2)
    with pytest.raises(ValueError, match=r"elements of part_sum is \d+, wanted \d+ for 4 splits"):
        decode.TEMPLATE.calls(made, decode.Config(16, 4, 4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "window"), [(256, 512), (512, 0)])
def test_long_context_of_one_sequence(head_dim: int, window: int, device: torch.device) -> None:
    problem = Problem(1, 1, 131072, 8, 1, head_dim, window)
    for splits in (1, 16, 64):
        inputs = decode.TEMPLATE.make_inputs(problem, 0, device, 0)
        assert_right(decode.TEMPLATE, inputs, decode.Config(32, splits, 4, 2))
    inputs = prefill.TEMPLATE.make_inputs(problem, 0, device, 0)
    assert_right(prefill.TEMPLATE, inputs, prefill.Config(16, 32, 1, True, False, 4, 2))
