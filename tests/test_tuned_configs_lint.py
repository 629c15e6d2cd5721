"""The linter: coverage, provenance, gain, names, and vLLM's fused-MoE files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_tuned_configs import DEVICE, make_entry, make_run, table_of

from tuned_configs import (
    Device,
    Entry,
    TableError,
    Timing,
    table_path,
    token_counts,
    update_table,
    write_table,
)
from tuned_configs.lint import Finding, lint
from tuned_configs.vllm_moe import read_moe_table

COVERED = [make_entry(count) for count in token_counts()]
FIRST_ENTRY_LINE = 9


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [str(each) for each in findings]
    return findings[0]


def linted(tmp_path: Path, *entries: Entry, **run: Any) -> list[Finding]:
    path = table_path(tmp_path, DEVICE, "residual_norm")
    write_table(path, table_of(*entries, run=make_run(**run)))
    return lint(tmp_path)


def test_a_good_table_has_no_findings(tmp_path: Path) -> None:
    assert linted(tmp_path, *COVERED) == []
    assert lint(table_path(tmp_path, DEVICE, "residual_norm")) == []
    assert lint(tmp_path / "NVIDIA_H200") == []


def test_absent_path(tmp_path: Path) -> None:
    assert only(lint(tmp_path / "none")).message == "no such file or folder"


def test_small_counts_only(tmp_path: Path) -> None:  # case 3
    entries = [make_entry(count) for count in (1, 2, 4, 8)]
    finding = only(linted(tmp_path, *entries))
    assert (finding.severity, finding.line) == ("warning", FIRST_ENTRY_LINE)
    assert "the largest tuned count is 8, less than a quarter of the 8192" in finding.message
    assert "'hidden': 1536" in finding.message
    assert lint(tmp_path, max_num_batched_tokens=32) == []
    assert len(lint(tmp_path, max_num_batched_tokens=33)) == 1


def test_counts_that_a_kernel_is_never_asked_for(tmp_path: Path) -> None:
    entries = [make_entry(count) for count in (64, 256)]
    linted(tmp_path, *entries)
    assert len(lint(tmp_path)) == 2
    assert lint(tmp_path, served=lambda template: (64, 256)) == []
    assert lint(tmp_path, 16, served=lambda template: (64, 4096)) == []
    finding = only(lint(tmp_path, served=lambda template: (8, 256)))
    assert "the smallest tuned count is 64, more than 4 times the least, 8" in finding.message


def test_large_counts_only(tmp_path: Path) -> None:  # case 3, mirror
    finding = only(linted(tmp_path, make_entry(16), make_entry(8192)))
    assert "the smallest tuned count is 16, more than 4 times" in finding.message
    assert linted(tmp_path, make_entry(4), make_entry(8192)) == []


def test_coverage_is_judged_per_kind_of_problem(tmp_path: Path) -> None:  # case 3
    finding = only(linted(tmp_path, *COVERED, make_entry(1, hidden=99), make_entry(None)))
    assert "'hidden': 99" in finding.message


def test_unknown_versions(tmp_path: Path) -> None:  # case 8
    findings = linted(tmp_path, *COVERED, triton=None, torch=None)
    assert [each.severity for each in findings] == ["warning"] * 2
    assert findings[0].line == 6
    assert findings[0].message.startswith("runs.r.triton: unknown version")
    assert findings[1].message.startswith("runs.r.torch: unknown version")


@pytest.mark.parametrize(("time", "findings"), [(23.49, 0), (23.52, 1), (23.50, 1), (30.0, 1)])
def test_tuned_without_gain(tmp_path: Path, time: float, findings: int) -> None:  # case 11
    figures = {
        "time_us": Timing(median=time, spread=0.4),
        "default_us": Timing(median=23.50, spread=0.4),
    }
    entries = [COVERED[0].model_copy(update=figures), *COVERED[1:]]
    found = linted(tmp_path, *entries)
    assert len(found) == findings
    if found:
        assert found[0].severity == "warning"
        assert found[0].line == FIRST_ENTRY_LINE
        assert f"no gain: {time:g} us against 23.5 us" in found[0].message
    kept = [entry.model_copy(update={"verdict": "default"}) for entry in entries]
    assert linted(tmp_path, *kept) == []


def test_wrong_folder_and_wrong_name(tmp_path: Path) -> None:
    path = tmp_path / "NVIDIA_H100" / "ple.json"
    write_table(path, table_of(*COVERED))
    device, template = sorted(lint(tmp_path), key=lambda each: each.message)
    assert (device.severity, device.line) == ("error", 4)
    assert "read from the folder NVIDIA_H200, in the folder NVIDIA_H100" in device.message
    assert (template.severity, template.line) == ("error", 3)
    assert "'residual_norm' in a file named ple.json" in template.message


def test_all_faults_of_broken_files(tmp_path: Path) -> None:  # case 9
    path = update_table(tmp_path, table_of(*COVERED)).path
    text = path.read_text().replace('"trials": 3', '"trials": "3"')
    path.write_text(text)
    (path.parent / "empty.json").write_text("")
    (path.parent / "folder.json").mkdir()
    findings = lint(tmp_path)
    assert len(findings) == len(COVERED) + 2
    assert all(each.severity == "error" for each in findings)
    mine = [each for each in findings if each.path == path]
    assert [each.line for each in mine] == list(range(9, 9 + len(COVERED)))
    assert str(mine[3]) == (
        f'{path}:12: error: entries[3].trials: found "3", wanted a whole number'
    )
    assert lint(path.parent / "folder.json")[0].message.startswith("this is a directory")


def test_validate_judges_every_config(tmp_path: Path) -> None:  # case 9 g, h
    asked: list[tuple[str, Device]] = []

    def validate(
        template: str, problem: dict[str, Any], config: dict[str, Any], device: Device
    ) -> str | None:
        asked.append((template, device))
        if config["num_warps"] == 3:
            return f"num_warps 3 is not a power of two, for {problem['tokens']} tokens"
        return None

    path = table_path(tmp_path, DEVICE, "residual_norm")
    write_table(path, table_of(*COVERED[:-1], make_entry(8192, warps=3)))
    finding = only(lint(tmp_path, validate=validate))
    assert finding.severity == "error"
    assert finding.line == FIRST_ENTRY_LINE + len(COVERED) - 1
    assert finding.message == (
        f"entries[{len(COVERED) - 1}].config: "
        "num_warps 3 is not a power of two, for 8192 tokens"
    )  # fmt: skip
    assert len(asked) == len(COVERED)
    assert asked[0] == ("residual_norm", make_run().device)


# vLLM's fused-MoE files

MOE_NAME = "E=128,N=704,device_name=NVIDIA_H200.json"
ROW = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}


def moe_file(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / MOE_NAME
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=4))
    return path


def test_metadata_is_skipped_with_a_note(tmp_path: Path) -> None:  # case 7
    path = moe_file(tmp_path, {"triton_version": "3.4.0", "_tool": "x", "1": ROW})
    rows, notes = read_moe_table(path)
    assert rows == {1: ROW}
    assert [(note.key, note.line) for note in notes] == [("triton_version", 2), ("_tool", 3)]
    findings = {each.line: each for each in lint(path, max_num_batched_tokens=4)}
    assert findings[2].severity == "note"
    assert findings[3].severity == "warning"
    assert "vLLM 0.26 to 0.33 refuses it" in findings[3].message
    assert len(findings) == 2


def test_unknown_metadata_of_any_type(tmp_path: Path) -> None:  # case 7
    content = {"meta": {"a": 1}, "sm90": True, "_rows": {"num_warps": 1}, "64": ROW, "8": ROW}
    rows, notes = read_moe_table(moe_file(tmp_path, content))
    assert list(rows) == [8, 64]
    assert [note.key for note in notes] == ["meta", "sm90", "_rows"]


def _with(**changes: Any) -> dict[str, Any]:
    return {"1": ROW, "16": {**ROW, **changes}}


#: Content, key, words; the fault is in the second row, which begins in line 10.
MOE_FAULTS: dict[str, tuple[Any, str, int, str]] = {
    "f: key with a space": ({"1": ROW, "1 ": ROW}, '["1 "]', 10, 'found key "1 "'),
    "f: key M16": ({"1": ROW, "M16": ROW}, "M16", 10, 'found key "M16", wanted a token count'),
    "f: key 016": ({"1": ROW, "016": ROW}, "016", 10, "plain digits"),
    "f: key 0": ({"1": ROW, "0": ROW}, "0", 10, "plain digits"),
    "g": (_with(BLOCK_SIZE_M=48), "16.BLOCK_SIZE_M", 11, "found 48, wanted a power of two"),
    "g: 8": (_with(BLOCK_SIZE_N=8), "16.BLOCK_SIZE_N", 12, "at least 16"),
    "h": (_with(num_warps=3), "16.num_warps", 15, "found 3, wanted one of 1, 2, 4, 8, 16, 32"),
    "i": (_with(num_stages=0), "16.num_stages", 16, "found 0, wanted at least 1"),
    "j": (_with(BLOCK_SIZE_N="64"), "16.BLOCK_SIZE_N", 12, 'found "64", wanted a whole number'),
    "j: true": (_with(GROUP_SIZE_M=True), "16.GROUP_SIZE_M", 14, "found true"),
    "k": (
        {"1": ROW, "16": {k: v for k, v in ROW.items() if k != "BLOCK_SIZE_K"}},
        "16.BLOCK_SIZE_K",
        10,
        "missing key",
    ),
    "unknown field": (_with(BLOCK_M=64), "16.BLOCK_M", 17, "unknown key, vLLM would pass it"),
    "l": (
        json.dumps(_with(), indent=4).replace('"16"', '"1"'),
        "1",
        10,
        "duplicate key",
    ),
    "row is a number": ({"1": ROW, "16": 4}, "16", 10, "found 4, wanted an object"),
    "m": (_with(BLOCK_SIZE_M=float("nan")), "16.BLOCK_SIZE_M", 11, "found NaN"),
    "a": (json.dumps(_with(), indent=4)[:-2] + ",\n}", "16", 17, "trailing comma"),
    "b": (json.dumps(_with(), indent=4)[:100], "1.BLOCK_SIZE_K", 6, "cut off"),
    "c": ("", "", 1, "the file is empty"),
    "d": ("[]", "", 1, "found [], wanted a JSON object"),
    "e": ("\ufeff" + json.dumps(_with()), "", 1, "byte order mark"),
    "no rows": ({"triton_version": "3.4.0"}, "", 1, "no rows"),
}


@pytest.mark.parametrize("name", MOE_FAULTS)
def test_moe_faults(tmp_path: Path, name: str) -> None:  # case 9
    content, key, line, words = MOE_FAULTS[name]
    path = moe_file(tmp_path, content)
    with pytest.raises(TableError) as caught:
        read_moe_table(path)
    (fault,) = caught.value.faults
    assert (fault.key, fault.line) == (key, line)
    assert words in fault.message
    assert str(caught.value).startswith(f"{path}: line {line}, column ")
    finding = only(lint(tmp_path))
    assert (finding.severity, finding.path, finding.line) == ("error", path, line)
    assert words in finding.message
    assert key in finding.message


def test_moe_reports_all_faults_at_once(tmp_path: Path) -> None:  # case 9
    content = {"M1": ROW, "2": {**ROW, "num_warps": 3, "num_stages": 0}}
    assert len(lint(moe_file(tmp_path, content))) == 3


def test_moe_directory(tmp_path: Path) -> None:  # case 9 n
    (tmp_path / MOE_NAME).mkdir()
    assert "this is a directory" in only(lint(tmp_path)).message


def test_moe_optional_fields(tmp_path: Path) -> None:
    row = {**ROW, "SPLIT_K": 1, "waves_per_eu": 0}
    assert read_moe_table(moe_file(tmp_path, {"16": row}))[0] == {16: row}


def test_moe_coverage(tmp_path: Path) -> None:  # case 3
    moe_file(tmp_path, dict.fromkeys(("1", "2", "4", "8"), ROW))
    finding = only(lint(tmp_path))
    assert finding.severity == "warning"
    assert "the largest tuned count is 8" in finding.message
    assert "vLLM takes the nearest key however far" in finding.message
    moe_file(tmp_path, dict.fromkeys(("16", "4096"), ROW))
    assert "the smallest tuned count is 16" in only(lint(tmp_path)).message
    moe_file(tmp_path, {str(count): ROW for count in token_counts()})
    assert lint(tmp_path) == []
