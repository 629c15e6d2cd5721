"""Which config a server gets: nearest token count, roots, provenance, source, versions."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tuned_configs import DEVICE, make_entry, make_run, table_of

from tuned_configs import (
    Entry,
    Table,
    TableSet,
    make_table,
    table_path,
    token_counts,
    update_table,
    version_notes,
    vllm_capture_sizes,
    write_table,
)
from tuned_configs.lookup import Loaded

NAME = "residual_norm"


def loaded(*tables: Table, measured_only: bool = True) -> TableSet:
    files = [Loaded(Path(f"/t{index}/{NAME}.json"), t) for index, t in enumerate(tables)]
    return TableSet(DEVICE, [Path("/t/NVIDIA_H200")], files, (), measured_only, lambda _: None)


def tokens_for(tables: TableSet, tokens: int, **problem: Any) -> int | None:
    match = tables.lookup(NAME, {"hidden": 1536, "tokens": tokens, **problem})
    return None if match is None else match.tokens


# Nearest count


@pytest.mark.parametrize("order", [(8, 16), (16, 8)])
def test_order_in_the_file_does_not_matter(tmp_path: Path, order: tuple[int, int]) -> None:
    # case 4
    path = table_path(tmp_path, DEVICE, NAME)
    write_table(path, table_of(make_entry(8), make_entry(16)))
    lines = path.read_text().splitlines()
    rows = {count: lines[i].rstrip(",") for i, count in ((8, 8), (9, 16))}
    lines[8:10] = [rows[order[0]] + ",", rows[order[1]]]
    path.write_text("\n".join(lines))
    tables = TableSet.load(tmp_path, DEVICE)
    assert tables.faults == ()
    assert [tokens_for(tables, count) for count in (8, 11, 12, 16)] == [8, 8, 16, 16]


def test_ties_go_up() -> None:  # case 4
    tables = loaded(table_of(make_entry(8), make_entry(32), make_entry(2)))
    assert tokens_for(tables, 16) == 32  # 16/8 = 32/16
    assert tokens_for(tables, 15) == 8
    assert tokens_for(tables, 4) == 8


def test_exact_and_nearest_are_told_apart() -> None:
    tables = loaded(table_of(make_entry(8, warps=2), make_entry(16)))
    exact = tables.lookup(NAME, {"tokens": 8, "hidden": 1536}, "abc")
    assert exact is not None
    assert (exact.config, exact.exact, exact.tokens, exact.reason) == (
        {"num_warps": 2}, True, 8, "exact",
    )  # fmt: skip
    near = tables.lookup(NAME, {"hidden": 1536, "tokens": 9})
    assert near is not None
    assert (near.exact, near.tokens) == (False, 8)
    assert near.reason == "nearest tuned count 8 for 9 tokens"
    assert near.entry.run == "r"
    assert near.run.provenance == "measured"
    near.config["num_warps"] = 99  # a caller's change stays the caller's
    assert tables.lookup(NAME, {"hidden": 1536, "tokens": 8}) == exact


def test_far_outside_the_range_the_default_is_taken_and_said_once() -> None:  # case 3
    said: list[str] = []
    tables = TableSet(
        DEVICE,
        [],
        [Loaded(Path("x"), table_of(*(make_entry(count) for count in (1, 2, 4, 8))))],
        on_reason=said.append,
    )
    assert tokens_for(tables, 32) == 8
    for tokens in (33, 2048, 4096):
        assert tokens_for(tables, tokens) is None
    assert said == [
        "residual_norm: 33 tokens are more than 4x outside the tuned range 1 to 8; default used"
    ]
    assert tables.reasons == said


def test_far_below_the_range() -> None:  # case 3, mirror
    tables = loaded(table_of(make_entry(16), make_entry(32)))
    assert [tokens_for(tables, count) for count in (1, 3, 4, 16)] == [None, None, 16, 16]
    assert len(tables.reasons) == 1
    assert "outside the tuned range 16 to 32" in tables.reasons[0]


def test_other_fields_match_exactly() -> None:
    tables = loaded(table_of(make_entry(8, dtype="bfloat16", shape=[1, 2])))
    assert tokens_for(tables, 8, dtype="bfloat16", shape=[1, 2]) == 8
    assert tokens_for(tables, 8, dtype="bfloat16", shape=(1, 2)) == 8
    assert tokens_for(tables, 8, dtype="float16", shape=[1, 2]) is None
    assert tokens_for(tables, 8, dtype="bfloat16") is None
    assert len(tables.reasons) == 2  # said once per kind of problem
    assert "no measured entry for" in tables.reasons[0]
    assert "float16" in tables.reasons[0]


def test_problems_without_tokens() -> None:
    tables = loaded(table_of(make_entry(None, warps=2), make_entry(8, width=1)))
    match = tables.lookup(NAME, {"hidden": 1536})
    assert match is not None
    assert (match.tokens, match.exact, match.config) == (None, True, {"num_warps": 2})
    assert tables.lookup(NAME, {"hidden": 1536, "tokens": 8}) is None
    assert tables.lookup(NAME, {"hidden": 1536, "width": 1}) is None


@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 70),  # tokens
            st.booleans(),  # measured
            st.integers(0, 2),  # root
            st.sampled_from(["a", "b"]),  # source hash
        ),
        max_size=12,
        unique_by=lambda row: (row[0], row[2]),
    ),
    asked=st.integers(0, 400),
    source_hash=st.sampled_from([None, "a"]),
    measured_only=st.booleans(),
)
def test_lookup_against_an_oracle(
    rows: list[tuple[int, bool, int, str]],
    asked: int,
    source_hash: str | None,
    measured_only: bool,
) -> None:
    def entry(index: int) -> Entry:
        tokens, measured, _, source = rows[index]
        run = "m" if measured else "p"
        return make_entry(tokens, index + 1, run, not measured, source)

    runs = {"m": make_run(), "p": make_run("predicted")}
    tables = []
    for root in range(3):
        mine = [entry(index) for index, row in enumerate(rows) if row[2] == root]
        random.Random(asked).shuffle(mine)
        table = make_table(NAME, "m", runs["m"], [])
        tables.append(table.model_copy(update={"runs": runs, "entries": mine}))

    # The rule, by brute force: the least ratio, then the larger count, measured, the later root.
    usable = [
        index
        for index, (_, measured, _, source) in enumerate(rows)
        if (measured or not measured_only) and source_hash in (None, source)
    ]
    expected = None
    if usable and asked:
        counts = [rows[index][0] for index in usable]
        if max(counts) * 4 >= asked >= Fraction(min(counts), 4):

            def rank(index: int) -> tuple[Any, ...]:
                tokens, measured, root, _ = rows[index]
                ratio = max(Fraction(asked, tokens), Fraction(tokens, asked))
                return (-ratio, tokens, measured, root)

            expected = max(usable, key=rank) + 1
    match = loaded(*tables, measured_only=measured_only).lookup(
        NAME, {"tokens": asked, "hidden": 1536}, source_hash
    )
    assert (match and match.config["num_warps"]) == expected


# Where from


def test_the_user_folder_wins_per_problem(tmp_path: Path) -> None:
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    update_table(shipped, table_of(make_entry(8, warps=1), make_entry(16, warps=1)))
    update_table(user, table_of(make_entry(16, warps=2)))
    tables = TableSet.load([shipped, user], DEVICE)
    found = [tables.lookup(NAME, {"tokens": t, "hidden": 1536}) for t in (8, 16)]
    assert [match and match.config["num_warps"] for match in found] == [1, 2]
    assert found[1] is not None
    assert found[1].path == table_path(user, DEVICE, NAME)


def test_predicted_is_used_on_request_only_and_never_before_measured(tmp_path: Path) -> None:
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    update_table(shipped, table_of(make_entry(8, warps=1)))
    predicted = [make_entry(8, 2, predicted=True), make_entry(64, 2, predicted=True)]
    update_table(user, table_of(*predicted, run=make_run("predicted")))
    measured = TableSet.load([shipped, user], DEVICE, on_reason=lambda _: None)
    assert [tokens_for(measured, count) for count in (8, 64)] == [8, None]
    both = TableSet.load([shipped, user], DEVICE, measured_only=False)
    match = both.lookup(NAME, {"tokens": 8, "hidden": 1536})
    assert match is not None
    assert match.config == {"num_warps": 1}
    assert tokens_for(both, 64) == 64


def test_a_stale_user_entry_falls_back_to_a_shipped_one(tmp_path: Path) -> None:
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    update_table(shipped, table_of(make_entry(8, warps=1, source_hash="new")))
    update_table(user, table_of(make_entry(8, warps=2, source_hash="old")))
    tables = TableSet.load([shipped, user], DEVICE)
    match = tables.lookup(NAME, {"tokens": 8, "hidden": 1536}, "new")
    assert match is not None
    assert match.config == {"num_warps": 1}


def test_entries_of_another_source_are_not_used() -> None:
    tables = loaded(table_of(make_entry(8, source_hash="old")))
    problem = {"tokens": 8, "hidden": 1536}
    assert tables.lookup(NAME, problem, "new") is None
    assert tables.lookup(NAME, problem, "old") is not None
    (reason,) = tables.reasons
    assert "another kernel source (old) than the running one (new)" in reason
    assert "tune again" in reason
    assert tables.explain(NAME, problem, "new") == reason
    assert tables.explain(NAME, problem, "old") == "exact"
    assert tables.reasons == [reason]


def test_other_gpus_are_never_borrowed_from(tmp_path: Path) -> None:
    update_table(tmp_path, table_of(make_entry(8)))
    for name in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 NVL", "NVIDIA_H200"):
        tables = TableSet.load(tmp_path, name, on_reason=lambda _: None)
        assert tokens_for(tables, 8) is None


def test_absent_tables_are_named(tmp_path: Path) -> None:
    said: list[str] = []
    roots = [tmp_path / "shipped", tmp_path / "user"]
    tables = TableSet.load(roots, "NVIDIA GB10", on_reason=said.append)
    assert tables.faults == ()
    assert tables.lookup("ple", {"tokens": 8}) is None
    assert tables.lookup("ple", {"tokens": 16}) is None
    (reason,) = said
    assert "NVIDIA_GB10/ple.json" in reason
    assert all(str(root) in reason for root in roots)
    assert "gemma-tune" in reason
    unnamed = TableSet.load(roots, "  ", on_reason=said.append)
    assert len(unnamed.faults) == 1
    assert unnamed.lookup("ple", {"tokens": 8}) is None


# Versions


RUNNING = {
    "triton": "3.7.0",
    "torch": "2.13.0",
    "driver": "580.65",
    "gpu": DEVICE,
    "sms": 132,
}


def test_equal_versions_say_nothing() -> None:  # case 8
    assert version_notes(table_of(make_entry()), RUNNING) == []


def test_other_versions_are_told() -> None:  # case 8
    (note,) = version_notes(table_of(make_entry(), run=make_run(triton="3.1.0")), RUNNING)
    assert "tuned with Triton 3.1.0, 3.7.0 is running" in note
    assert "gemma-tune confirm" in note
    running = {**RUNNING, "torch": "2.9", "driver": "1", "gpu": "NVIDIA L4", "sms": 58}
    notes = version_notes(table_of(make_entry()), running)
    assert len(notes) == 4
    for note, word in zip(notes, ("torch", "driver", "GPU", "SM count"), strict=True):
        assert f"tuned with {word} " in note


def test_missing_stamps_are_unknown(tmp_path: Path) -> None:  # case 8
    table = table_of(make_entry(), run=make_run(triton=None, torch=None))
    notes = version_notes(table, {**RUNNING, "driver": None, "sms": None})
    assert [note.split(": ")[1].split(",")[0] for note in notes] == [
        "Triton unknown (table)",
        "torch unknown (table)",
        "driver unknown (running)",
        "SM count unknown (running)",
    ]
    update_table(tmp_path, table)
    predicted = table_of(make_entry(32, predicted=True), run=make_run("predicted"))
    path = update_table(tmp_path, predicted).path
    notes = TableSet.load(tmp_path, DEVICE).version_notes(RUNNING)
    assert len(notes) == 2  # the predicted run is not used, so its driver is no matter
    assert all(note.startswith(str(path)) for note in notes)
    assert len(TableSet.load(tmp_path, DEVICE, measured_only=False).version_notes(RUNNING)) == 3


# Token counts


def test_default_token_counts() -> None:
    assert token_counts() == tuple(2**exponent for exponent in range(14))


def test_draft_tokens_multiply() -> None:  # case 4
    counts = token_counts(max_num_seqs=16, num_speculative_tokens=4)
    assert {5, 10, 20, 40, 80} <= set(counts)
    assert set(token_counts()) <= set(counts)
    assert len(counts) == 19


def test_captured_sizes_fill_gaps_only() -> None:
    counts = token_counts(cudagraph_sizes=vllm_capture_sizes())
    assert set(counts) - set(token_counts()) == {24, 48, 88, 184, 368}
    assert token_counts(cudagraph_sizes=[1, 2, 4, 8, 100_000]) == token_counts()


@given(
    seqs=st.integers(1, 2000),
    draft=st.integers(0, 8),
    sizes=st.lists(st.integers(1, 2000), max_size=60),
    batched=st.integers(1, 40_000),
)
def test_token_counts_cover_the_range(
    seqs: int, draft: int, sizes: list[int], batched: int
) -> None:
    counts = token_counts(seqs, draft, sizes, batched)
    assert list(counts) == sorted(set(counts))
    assert (counts[0], counts[-1]) == (1, batched)
    assert len(counts) <= 70
    if seqs * (draft + 1) <= batched:
        assert seqs * (draft + 1) in counts


@pytest.mark.parametrize("limits", [(0, 0, (), 1), (1, -1, (), 1), (1, 0, (), 0)])
def test_impossible_limits_are_refused(limits: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="at least"):
        token_counts(*limits)


def test_vllm_capture_sizes() -> None:
    sizes = vllm_capture_sizes()
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert {248, 256, 272, 512} <= set(sizes)
    assert 264 not in sizes
    assert len(sizes) == 51
    assert vllm_capture_sizes(9) == (1, 2, 4, 8)
    assert vllm_capture_sizes(256)[-1] == 256
    assert vllm_capture_sizes(3) == (1, 2)
