"""Every fault of a table is told with file, key, line and column; nothing is a raw traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tuned_configs import DEVICE, make_entry, make_run, table_of

from tuned_configs import TableError, TableSet, read_table, table_path
from tuned_configs.jsontext import JsonError, dotted, locate, parse, positions
from tuned_configs.store import table_text

TEXT = table_text(table_of(make_entry(8), make_entry(16)))
#: Lines of TEXT.
RUN_LINE, FIRST_ENTRY_LINE, SECOND_ENTRY_LINE = 6, 9, 10


def fault_of(tmp_path: Path, content: str | bytes) -> TableError:
    path = tmp_path / "residual_norm.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TableError) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.path == path
    assert "Traceback" not in str(caught.value)
    assert "pydantic" not in str(caught.value)
    return caught.value


def changed(old: str, new: str, line: int | None = None) -> str:
    lines = TEXT.splitlines(keepends=True)
    index = next(i for i, text in enumerate(lines) if old in text and line in (None, i + 1))
    lines[index] = lines[index].replace(old, new, 1)
    return "".join(lines)


# case 9: what is wrong, the key, the line, the words
CASES: dict[str, tuple[str | bytes, str, int, str]] = {
    "trailing comma in a list": (
        changed('"run": "r"}\n', '"run": "r"},\n', SECOND_ENTRY_LINE),
        "entries[1]",
        SECOND_ENTRY_LINE,
        "trailing comma before ']'",
    ),
    "trailing comma in an object": (
        changed('"num_warps": 4}', '"num_warps": 4,}', SECOND_ENTRY_LINE),
        "entries[1].config.num_warps",
        SECOND_ENTRY_LINE,
        "trailing comma before '}'",
    ),
    "cut at byte 100": (TEXT.encode()[:100], "runs.r", RUN_LINE, "cut off"),
    "cut in an entry": (
        TEXT[: TEXT.index('"verdict"') + 12],
        "entries[0].verdict",
        FIRST_ENTRY_LINE,
        "cut off",
    ),
    "empty": (b"", "", 1, "the file is empty, wanted a JSON object"),
    "blank": (b" \n\n", "", 1, "the file is empty"),
    "a list": (b"[]", "", 1, "found [], wanted a JSON object"),
    "byte order mark": (b"\xef\xbb\xbf" + TEXT.encode(), "", 1, "byte order mark"),
    "not UTF-8": (TEXT.replace("e2b", "\x00").encode("utf-16"), "", 1, "is not UTF-8"),
    "control character": (
        changed('"e2b"', '"e\x012b"'),
        "entries[0].models[0]",
        FIRST_ENTRY_LINE,
        "Invalid control character",
    ),
    "duplicate key": (
        changed('"trials": 3', '"trials": 3, "trials": 4', SECOND_ENTRY_LINE),
        "entries[1].trials",
        SECOND_ENTRY_LINE,
        "duplicate key",
    ),
    "NaN": (
        changed('"median": 10.0', '"median": NaN', SECOND_ENTRY_LINE),
        "entries[1].time_us.median",
        SECOND_ENTRY_LINE,
        "found NaN, wanted a finite number",
    ),
    "infinity by overflow": (
        changed('"num_warps": 4', '"num_warps": 1e999'),
        "entries[0].config.num_warps",
        FIRST_ENTRY_LINE,
        "wanted a finite number",
    ),
    "number as text": (
        changed('"num_warps": 4', '"num_warps": "4"', SECOND_ENTRY_LINE),
        "entries[1].config.num_warps",
        SECOND_ENTRY_LINE,
        'found "4", wanted a bare number',
    ),
    "count as text": (
        changed('"trials": 3', '"trials": "3"'),
        "entries[0].trials",
        FIRST_ENTRY_LINE,
        'found "3", wanted a whole number',
    ),
    "tokens as text": (
        changed('"tokens": 8', '"tokens": "8"'),
        "entries[0].problem.tokens",
        FIRST_ENTRY_LINE,
        'found "8"',
    ),
    "tokens of zero": (
        changed('"tokens": 8', '"tokens": 0'),
        "entries[0].problem",
        FIRST_ENTRY_LINE,
        "wanted a whole number of at least 1 in 'tokens'",
    ),
    "true for a number": (
        changed('"trials": 3', '"trials": true'),
        "entries[0].trials",
        FIRST_ENTRY_LINE,
        "found true, wanted a whole number",
    ),
    "missing key": (
        changed('"verdict": "tuned", ', ""),
        "entries[0].verdict",
        FIRST_ENTRY_LINE,
        "missing key",
    ),
    "missing top key": (changed('  "device": "NVIDIA H200",\n', ""), "device", 1, "missing key"),
    "unknown key": (
        changed('"trials": 3', '"trials": 3, "trails": 3', SECOND_ENTRY_LINE),
        "entries[1].trails",
        SECOND_ENTRY_LINE,
        "unknown key; known here: problem, config, verdict",
    ),
    "unknown key of a device": (
        changed('"sms": 132', '"sms": 132, "smem": 1'),
        "runs.r.device.smem",
        RUN_LINE,
        "unknown key; known here: name, capability, sms",
    ),
    "unknown key of a timing": (
        changed('"spread": 0.1', '"spread": 0.1, "mean": 1'),
        "entries[0].time_us.mean",
        FIRST_ENTRY_LINE,
        "unknown key; known here: median, spread",
    ),
    "unknown verdict": (
        changed('"verdict": "tuned"', '"verdict": "fast"'),
        "entries[0].verdict",
        FIRST_ENTRY_LINE,
        "found \"fast\", wanted 'tuned' or 'default'",
    ),
    "negative time": (
        changed('"median": 10.0', '"median": -1'),
        "entries[0].time_us.median",
        FIRST_ENTRY_LINE,
        "found -1, wanted more than 0",
    ),
    "key with a space": (
        changed('"num_warps"', '"num_warps "'),
        'entries[0].config["num_warps "]',
        FIRST_ENTRY_LINE,
        "without spaces",
    ),
    "nested config": (
        changed('"num_warps": 4', '"num_warps": {"a": 1}'),
        "entries[0].config.num_warps",
        FIRST_ENTRY_LINE,
        "wanted a string, a number, true, false or a list",
    ),
    "null config": (
        changed('"num_warps": 4', '"num_warps": null'),
        "entries[0].config.num_warps",
        FIRST_ENTRY_LINE,
        "found null",
    ),
    "unknown run": (
        changed('"run": "r"', '"run": "s"', SECOND_ENTRY_LINE),
        "entries[1].run",
        SECOND_ENTRY_LINE,
        "no run 's'; known runs: r",
    ),
    "the same problem twice": (
        changed('"tokens": 16', '"tokens": 8'),
        "entries[1].problem",
        SECOND_ENTRY_LINE,
        "the same problem as entries[0]",
    ),
    "another GPU's run": (
        changed('"name": "NVIDIA H200"', '"name": "NVIDIA H100"'),
        "runs.r.device.name",
        RUN_LINE,
        "never carries another GPU's results",
    ),
    "a measured entry without a time": (
        changed('"time_us": {"median": 10.0, "spread": 0.1}, ', ""),
        "entries[0].time_us",
        FIRST_ENTRY_LINE,
        "missing, wanted in a measured entry",
    ),
    "measured figures in a predicted run": (
        changed('"provenance": "measured"', '"provenance": "predicted"'),
        "entries[0].predicted_us",
        FIRST_ENTRY_LINE,
        "missing, wanted in a predicted entry",
    ),
    "impossible date": (
        changed("2026-01-31T", "2026-02-31T"),
        "runs.r.finished_at",
        RUN_LINE,
        "wanted a UTC time",
    ),
    "from the future": (
        changed('"schema": 1', '"schema": 2'),
        "schema",
        2,
        "found 2, wanted 1: made by a newer gemma-tune",
    ),
    "newer and of another form": (b'{"schema": 3, "rows": []}', "schema", 1, "newer gemma-tune"),
    "schema true": (changed('"schema": 1', '"schema": true'), "schema", 2, "found true, wanted 1"),
    "schema 1.0": (changed('"schema": 1', '"schema": 1.0'), "schema", 2, "found 1.0, wanted 1"),
    "no schema": (changed('  "schema": 1,\n', ""), "schema", 1, "missing key"),
    "nested too deeply": (b"[" * 100_000, "", 0, "nested too deeply"),
    "a pickle": (b"\x80\x04\x95\x00.", "", 1, "byte 0x80 is not UTF-8"),
}


@pytest.mark.parametrize("name", CASES)
def test_faults(tmp_path: Path, name: str) -> None:  # case 9
    content, key, line, words = CASES[name]
    error = fault_of(tmp_path, content)
    assert words in error.message
    first = error.faults[0]
    assert first.key == key
    assert first.line == (line or None)
    if line:
        assert f"line {line}" in str(error)
    assert key in str(error)


def test_columns_point_at_the_key(tmp_path: Path) -> None:
    text = changed('"num_warps": 4', '"num_warps": "4"', SECOND_ENTRY_LINE)
    (fault,) = fault_of(tmp_path, text).faults
    line = text.splitlines()[SECOND_ENTRY_LINE - 1]
    assert fault.column == line.index('"num_warps"') + 1


def test_all_faults_are_listed_in_order(tmp_path: Path) -> None:
    text = changed('"trials": 3', '"trials": "3"', SECOND_ENTRY_LINE)
    text = text.replace('"sms": 132', '"sms": -1')
    error = fault_of(tmp_path, text)
    assert [fault.key for fault in error.faults] == ["runs.r.device.sms", "entries[1].trials"]
    assert "(and 1 more)" in str(error)


def test_a_directory_of_that_name(tmp_path: Path) -> None:  # case 9 n
    path = tmp_path / "ple.json"
    path.mkdir()
    with pytest.raises(TableError, match=r"ple\.json: this is a directory, wanted a JSON file"):
        read_table(path)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 9 o
    path = tmp_path / "ple.json"
    path.write_text(TEXT)
    path.chmod(0)
    if os.geteuid() == 0:  # root may read everything

        def refuse(_: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TableError, match=r"ple\.json: cannot be read: Permission denied"):
        read_table(path)


def test_absent_files_and_pipes(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"a\.json: cannot be read: No such file"):
        read_table(tmp_path / "a.json")
    os.mkfifo(tmp_path / "b.json")  # reading it would hang the server
    with pytest.raises(TableError, match=r"b\.json: this is not a regular file"):
        read_table(tmp_path / "b.json")


def test_broken_tables_do_not_spoil_the_others(tmp_path: Path) -> None:  # case 9
    folder = table_path(tmp_path, DEVICE, "x").parent
    folder.mkdir()
    broken = [content for content, *_ in CASES.values()]
    for index, content in enumerate(broken):
        data = content if isinstance(content, bytes) else content.encode()
        (folder / f"broken{index}.json").write_bytes(data)
    (folder / "dir.json").mkdir()
    (folder / "residual_norm.json").write_text(TEXT)
    (folder / "misnamed.json").write_text(TEXT)
    other = table_of(make_entry(8), run=make_run(device="NVIDIA H100"), template="stray")
    (folder / "stray.json").write_text(table_text(other))
    tables = TableSet.load(tmp_path, DEVICE, on_reason=lambda _: None)
    assert len(tables.faults) == len(broken) + 3
    for fault in tables.faults:
        assert fault.startswith(str(folder))
        assert "\n" not in fault
    text = "\n".join(tables.faults)
    assert "template: found 'residual_norm', wanted 'misnamed'" in text
    assert "device: found 'NVIDIA H100', wanted 'NVIDIA H200'" in text
    assert tables.lookup("residual_norm", {"tokens": 8, "hidden": 1536}) is not None
    assert tables.lookup("stray", {"tokens": 8, "hidden": 1536}) is None


# The parser itself

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)  # fmt: skip


@given(value=_json, indent=st.sampled_from([None, 0, 2]))
def test_parse_agrees_with_the_standard_parser(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert parse(text) == value
    found = positions(text)
    paths = dict(_walk(value, ()))
    assert set(found) == set(paths)
    lines = text.splitlines()
    for path, inner in paths.items():
        line, column = locate(found, path)
        rest = "\n".join([lines[line - 1][column - 1 :], *lines[line:]])
        decoder = json.JSONDecoder()
        if path and isinstance(path[-1], str):
            assert decoder.raw_decode(rest)[0] == path[-1]
        else:
            assert decoder.raw_decode(rest)[0] == inner


def _walk(value: Any, path: tuple[str | int, ...]) -> Any:
    yield path, value
    items: Any = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from _walk(inner, (*path, key))


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_damage_is_told_and_never_a_raw_error(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(TEXT)))
    end = data.draw(st.integers(start, min(len(TEXT), start + 8)))
    junk = data.draw(st.text(alphabet='{}[]:,"\\ \n1aN-.ée', max_size=4))
    text = TEXT[:start] + junk + TEXT[end:]
    fault = None
    try:
        parse(text)
    except JsonError as error:
        fault = error
    if fault is None:
        json.loads(text)
    else:
        assert fault.line is not None
        assert 1 <= fault.line <= text.count("\n") + 1


def test_damaged_constants() -> None:
    with pytest.raises(JsonError, match="found NaN1, wanted a finite number") as caught:
        parse('{"a": [1,\n NaN1]}')
    assert (caught.value.key, caught.value.line, caught.value.column) == ("a[1]", 2, 2)


def test_dotted() -> None:
    assert dotted(("entries", 3, "config", "num_warps")) == "entries[3].config.num_warps"
    assert dotted(("a b", 0)) == '["a b"][0]'
    assert dotted(()) == ""
