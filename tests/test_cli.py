"""The command line as a user meets it: exit codes, plain words, interruption, and no traceback."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from test_run import alive, descendants, lines_of
from typer.testing import CliRunner

from kernel_templates.base import templates
from tuned_configs import roots
from tuned_configs.store import read_table
from tuner import __version__, cli, console
from tuner.device import ProbeResult, known_gpus
from tuner.model import preset_names

A100 = known_gpus()[0]
FOLDER = "NVIDIA_A100-SXM4-80GB"
SMALL = ["--gpu", "a100", "--templates", "gelu_mul", "--tokens", "4", "--trials", "2"]
SMALL += ["--jobs", "1"]


@dataclasses.dataclass
class Answer:
    code: int
    text: str

    def says(self, *parts: str) -> None:
        # Tables and boxes wrap.
        words = " ".join(self.text.replace("│", " ").split())
        for part in parts:
            assert part in words, f"{part!r} is not in:\n{self.text}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and no tables, neither shipped nor the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("GEMMA_TUNE_CONFIGS", raising=False)
    monkeypatch.setattr(roots, "shipped_root", lambda: tmp_path / "shipped")
    monkeypatch.setattr(cli, "probe", lambda: ProbeResult(reason="the test has none"))
    for printer in (console.OUT, console.LOG):
        monkeypatch.setattr(printer, "_width", 400)
    return tmp_path


def answer(*words: str | Path) -> Answer:
    """What the program says in this process."""
    found = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).invoke(
        cli.app, [str(word) for word in words]
    )
    text = found.output
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert "Traceback" not in text
    return Answer(found.exit_code, text)


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XDG_DATA_HOME": str(folder / "data"),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "400",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tuner.cli", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> Answer:
    text, _ = process.communicate(timeout=240)
    assert "Traceback" not in text, text
    return Answer(process.returncode, text)


# A run without a GPU


def test_version() -> None:
    shown = answer("--version")
    assert (shown.code, shown.text) == (0, f"gemma-tune {__version__}\n")


def test_predicts_plainly_and_reuses(tmp_path: Path) -> None:
    words = ["--gpu", "a100", "--templates", "qkv_norm_rope", "--tokens", "1,64", "--trials", "4"]
    first = end(start(tmp_path, *words))
    assert first.code == 0
    first.says(
        "no GPU here",
        "results for NVIDIA A100-SXM4-80GB are PREDICTIONS",
        "Nothing is measured, and every entry is marked predicted.",
        "Predicted (nothing was measured)",
        "8 problems decided",
        "32 trials",
    )
    assert "reused" not in first.text
    path = tmp_path / "data/gemma-tune/tuned_configs" / FOLDER / "qkv_norm_rope.json"
    first.says(f"wrote {path}")
    table = read_table(path)
    assert {run.provenance for run in table.runs.values()} == {"predicted"}
    assert {run.device.driver for run in table.runs.values()} == {None}
    assert sorted({entry.problem["tokens"] for entry in table.entries}) == [1, 64]
    assert all(e.time_us is None and e.predicted_us is not None for e in table.entries)
    assert all(entry.models == ["e2b"] for entry in table.entries)
    before = path.read_text()
    second = end(start(tmp_path, *words))
    assert second.code == 0
    second.says("0 trials", "reused 8 finished problems and 32 trials of an earlier run")
    assert path.read_text() == before


def test_require_without_a_gpu() -> None:
    for found, words in (
        (ProbeResult(reason="no driver"), "no GPU here (no driver)"),
        (ProbeResult((dataclasses.replace(A100, name="NVIDIA L4"),)), "attached GPU is NVIDIA L4"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "probe", lambda found=found: found)
            refused = answer("--gpu", "a100", "--measure", "require")
        assert refused.code == 3
        refused.says("--measure require: no attached GPU matches 'a100'", words)
        assert len(refused.text.strip().splitlines()) == 1


def test_never_measures_nor_looks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> ProbeResult:
        raise AssertionError("looked for a GPU")

    monkeypatch.setattr(cli, "probe", probe)
    done = answer(*SMALL, "--measure", "never", "--out", "o")
    assert done.code == 0
    done.says("measuring was switched off", "PREDICTIONS")
    table = read_table(Path("o") / FOLDER / "gelu_mul.json")
    assert {run.provenance for run in table.runs.values()} == {"predicted"}


KNOWN_GPUS = "known: NVIDIA A100-SXM4-80GB, "


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["--gpu is missing", "--gpu a100"]),
        (["--gpu", "a1000"], ["no known GPU matches 'a1000'", KNOWN_GPUS]),
        (["--gpu", ""], ["no known GPU matches ''", KNOWN_GPUS]),
        (["--gpu", "80gb"], ["'80gb' matches different GPUs"]),
        (["--gpu", "a100", "--templates", "gelu_mul,x"], ["no template 'x'; known: "]),
        (["--gpu", "a100", "--templates", ""], ["no template ''"]),
        (["--gpu", "a100", "--model", "9b"], ["9b: no such model; wanted a preset (12b,"]),
        (["--gpu", "a100", "--model", ""], ["no such model"]),
        (["--gpu", "a100", "--tp", "3"], ["is 8", "a multiple of the tensor-parallel size 3"]),
        (["--gpu", "a100", "--tp", "0"], ["'--tp'", "1"]),
        (["--gpu", "a100", "--tokens", "0"], ["'0' is no token count; wanted for example 1,8"]),
        (["--gpu", "a100", "--tokens", "8-1"], ["'8-1' is no token count"]),
        (["--gpu", "a100", "--tokens", "1,,2"], ["'' is no token count"]),
        (["--gpu", "a100", "--tokens", ""], ["'' is no token count"]),
        (["--gpu", "a100", "--tokens", "-5"], ["'-5' is no token count"]),
        (["--gpu", "a100", "--tokens", "1e3"], ["'1e3' is no token count"]),
        (["--gpu", "a100", "--budget", "ten"], ["'ten' is no duration; wanted for example 90s"]),
        (["--gpu", "a100", "--budget", "0s"], ["'0s' is no duration"]),
        (["--gpu", "a100", "--budget", "-3m"], ["'-3m' is no duration"]),
        (["--gpu", "a100", "--budget", ""], ["'' is no duration"]),
        (["--gpu", "a100", "--trials", "0"], ["'--trials'", "1"]),
        (["--gpu", "a100", "--trials", "many"], ["'--trials'", "integer"]),
        (["--gpu", "a100", "--measure", "maybe"], ["maybe", "require"]),
        (["--gpu", "a100", "--storage", "nonsense"], ["storage 'nonsense' cannot be used"]),
        (["--gpu", "a100", "--storage", "sqlite:////no/x.db"], ["unable to open database file"]),
        (["--gpu", "a100", "--out", "file"], ["file is no folder, wanted one for the tables"]),
        (["--gpu", "a100", "--out", "file/x"], ["file/x: tables cannot be written here: Not a d"]),
        (["--gpu", "a100", "--out", "/proc/x"], ["/proc/x: tables cannot be written here"]),
        (["--gpu", "a100", "list"], ["--gpu goes behind 'list'"]),
        (["--gpu", "a100", "--no-such-option"], ["No such option"]),
        (["no-such-command"], ["No such command"]),
        (["explain", "--gpu", "zz", "--template", "gelu_mul", "--tokens", "1"], [KNOWN_GPUS]),
        (["explain", "--gpu", "a100", "--template", "x", "--tokens", "1"], ["no template 'x'"]),
        (
            ["explain", "--gpu", "a100", "--template", "gelu_mul", "--tokens", "0"],
            ["'--tokens'", "1"],
        ),
        (["explain", "--gpu", "a100", "--template", "gelu_mul"], ["--tokens"]),
        (["show", "--gpu", "a100", "--configs", "nowhere"], ["nowhere is no folder"]),
        (["show"], ["--gpu"]),
    ],
)
def test_wrong_usage(words: list[str], parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    if not words:
        words = ["--tp", "1"]
    refused = answer(*words)
    assert refused.code == 2
    refused.says(*parts)
    assert not (tmp_path / "data/gemma-tune").exists() or "--storage" in words


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"model_type": "gemma4", "text_co', ["config.json", "is not JSON"]),
        ("", ["config.json", "is not JSON"]),
        ('{"model_type": "llama"}', ["config.json"]),
        ("[]", ["config.json"]),
    ],
)
def test_broken_model_config(text: str, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(text)
    for spec in ("m", "m/config.json"):
        refused = answer("--gpu", "a100", "--model", spec)
        assert refused.code == 2
        refused.says("error: ", *parts)


def test_state_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / ".gemma-tune").touch()
    refused = answer(*SMALL)
    assert refused.code == 2
    refused.says(".gemma-tune/trials.journal: the record of trials cannot be kept: File exists")


def test_counts_beyond_the_kernel_are_refused_by_name() -> None:
    words = ["--gpu", "a100", "--templates", "qkv_norm_rope", "--trials", "1", "--jobs", "1"]
    refused = answer(*words, "--tokens", "99999999999", "--out", "o")
    assert refused.code == 1
    refused.says("wanted at most 1073741824", "no result for 4 problems", "0 problems decided")
    assert list(Path("o").rglob("*.json")) == []


def test_a_model_that_needs_none_of_the_kernels() -> None:
    refused = answer("--gpu", "a100", "--templates", "moe_routing", "--model", "e2b")
    assert refused.code == 1
    refused.says("e2b need none of: moe_routing")


def test_sqlite_storage_resumes() -> None:
    words = [*SMALL, "--storage", "sqlite:///trials.db", "--out", "o"]
    first = answer(*words)
    assert first.code == 0
    first.says("6 trials")
    assert not Path(".gemma-tune").exists()
    second = answer(*words)
    assert second.code == 0
    second.says("0 trials", "reused 3 finished problems and 6 trials")


def test_paths_with_brackets_are_shown_as_they_are() -> None:
    done = answer(*SMALL, "--out", "a[/b] :smile:")
    assert done.code == 0
    done.says("tables go to a[/b] :smile:", f"wrote a[/b] :smile:/{FOLDER}/gelu_mul.json")


def test_a_corrupt_journal_is_said_and_survived() -> None:
    assert answer(*SMALL).code == 0
    journal = Path(".gemma-tune/trials.journal")
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(whole + b'{"op_code": 4, "wor')  # a kill in mid-write
    again = answer(*SMALL)
    assert again.code == 0
    again.says("reused 3 finished problems and 6 trials")
    assert "no record" not in again.text
    journal.write_bytes(b"".join([*lines[:2], b"garbage\n", *lines[2:]]))
    mended = answer(*SMALL)
    assert mended.code == 0
    mended.says("line 3 is no record of a trial", "5 trials", "reused 0 finished problems and 1")
    assert len(list(journal.parent.glob("*.broken-*"))) == 1
    journal.write_bytes(journal.read_bytes() + b"garbage\n")
    ended = answer(*SMALL)
    assert ended.code == 0
    ended.says("is no record of a trial", "0 trials", "reused 3 finished problems and 6 trials")


def test_a_spent_budget_says_so() -> None:
    spent = answer(*SMALL, "--budget", "0.000001s", "--out", "o")
    assert spent.code == 1
    spent.says("the budget ended before 3 problems: run the same command to go on")


# A GPU that is there but cannot be used


def test_a_gpu_in_use_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = dataclasses.replace(A100, attached=True, uuid="GPU-0")
    monkeypatch.setattr(cli, "probe", lambda: ProbeResult((gpu,)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handle = os.open(tmp_path / "gemma-tune-GPU-0.lock", os.O_CREAT | os.O_RDWR)
    os.write(handle, b"4711\n")
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        refused = answer(*SMALL)
    finally:
        os.close(handle)
    assert refused.code == 1
    refused.says("another gemma-tune (process 4711) measures on GPU GPU-0")
    assert "PREDICTIONS" not in refused.text


def test_a_gpu_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = dataclasses.replace(A100, attached=True, uuid=f"GPU-{'0' * 8}")
    monkeypatch.setattr(cli, "probe", lambda: ProbeResult((gpu,)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refused = answer(*SMALL)
    assert refused.code == 1
    refused.says("error: the measuring worker does not start: ", "0 problems decided")
    assert list(roots.user_root().rglob("*.json")) == []


# Interruption


def test_interrupted_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> ProbeResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "probe", probe)
    assert CliRunner().invoke(cli.app, SMALL).exit_code == 130


def test_ctrl_c_and_kill_9_and_the_same_command_goes_on(tmp_path: Path) -> None:
    # Large enough not to be over before a busy machine gets to send the signal.
    words = ["--gpu", "a100", "--templates", "gelu_mul", "--tokens", "1-4096"]
    words += ["--trials", "12", "--jobs", "1"]
    journal = tmp_path / ".gemma-tune" / "trials.journal"

    def stopped(by: signal.Signals, more: int) -> tuple[int, subprocess.Popen[str], float]:
        process, before = start(tmp_path, *words), lines_of(journal)
        deadline = time.monotonic() + 120
        while lines_of(journal) < before + more and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = descendants(process.pid)
        sent = time.monotonic()
        if by is signal.SIGINT:
            os.killpg(process.pid, by)  # as a terminal does: the workers get it too
        else:
            process.send_signal(by)
        process.wait(60)
        took = time.monotonic() - sent
        while any(alive(child) for child in children) and time.monotonic() < sent + 20:
            time.sleep(0.05)
        assert not [child for child in children if alive(child)]
        return before, process, took

    _, process, took = stopped(signal.SIGINT, 4)
    interrupted = end(process)
    assert interrupted.code == 130
    interrupted.says("interrupted: what was decided is saved, the same command goes on from here")
    assert took < 15
    before, process, _ = stopped(signal.SIGKILL, 14)
    assert end(process).code == -signal.SIGKILL
    assert before >= 4
    for path in (tmp_path / "data").rglob("*.json"):
        read_table(path)
    recorded = lines_of(journal)
    finished = end(start(tmp_path, *words))
    assert finished.code == 0
    finished.says("39 problems decided", "reused ")
    (line,) = [line for line in finished.text.splitlines() if "problems decided" in line]
    assert f"and {recorded} trials of an earlier run" in line
    assert int(line.split(" finished problems")[0].split()[-1]) >= 1
    path = tmp_path / "data/gemma-tune/tuned_configs" / FOLDER / "gelu_mul.json"
    assert len(read_table(path).entries) == 39


def test_two_at_once_into_one_folder(tmp_path: Path) -> None:  # case 65
    common = ["--gpu", "a100", "--trials", "4", "--jobs", "1", "--out", "o", "--templates"]
    both = [
        start(tmp_path, *common, "gelu_mul,qkv_norm_rope", "--tokens", "1,64"),
        start(tmp_path, *common, "qkv_norm_rope,gelu_mul", "--tokens", "64,256"),
    ]
    for process in both:
        done = end(process)
        assert done.code == 0, done.text
        assert "moved aside" not in done.text
    for name, kinds in (("gelu_mul", 3), ("qkv_norm_rope", 4)):
        table = read_table(tmp_path / "o" / FOLDER / f"{name}.json")
        assert len(table.entries) == 3 * kinds
        assert {run.provenance for run in table.runs.values()} == {"predicted"}
    assert [path for path in (tmp_path / "o").rglob("*") if "broken" in path.name] == []


# What was found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predicted tables of gelu_mul for 1 and 64 tokens."""
    folder = tmp_path_factory.mktemp("made")
    words = ["--gpu", "a100", "--templates", "gelu_mul", "--tokens", "1,64", "--trials", "2"]
    assert end(start(folder, *words, "--jobs", "1", "--out", "t")).code == 0
    return folder / "t"


@pytest.fixture
def tables(made: Path, tmp_path: Path) -> Path:
    """The tables as the user's own, free to be spoilt."""
    own = tmp_path / "data/gemma-tune/tuned_configs"
    (own / FOLDER).mkdir(parents=True)
    (own / FOLDER / "gelu_mul.json").write_bytes((made / FOLDER / "gelu_mul.json").read_bytes())
    return own


def test_nothing_at_hand() -> None:
    listed = answer("list")
    assert listed.code == 0
    listed.says(*templates(), *preset_names(), *(gpu.name for gpu in known_gpus()))
    assert FOLDER not in listed.text
    shown = answer("show", "--gpu", "a100")
    assert shown.code == 1
    shown.says("no entries for GPU 'a100'")
    linted = answer("lint")
    assert linted.code == 0
    linted.says("0 errors, 0 other findings")
    words = ["--template", "gelu_mul", "--model", "e2b", "--tokens", "37"]
    explained = answer("explain", "--gpu", "a100", *words)
    assert explained.code == 0
    explained.says("NVIDIA A100-SXM4-80GB, e2b, 37 tokens", "default used", "default: rows=")


def test_tables_at_hand(tables: Path) -> None:
    listed = answer("list")
    assert listed.code == 0
    listed.says("NVIDIA A100-SXM4-80GB", "gelu_mul", " 0 ", " 6 ", "e2b")
    shown = answer("show", "--gpu", "a100")
    assert shown.code == 0
    shown.says("gelu_mul on NVIDIA A100-SXM4-80GB", "predicted 20", "num_warps=", "width 6144")
    assert "measured" not in shown.text
    for words in (["--model", "31b"], ["--template", "moe_routing"]):
        assert answer("show", "--gpu", "a100", *words).code == 1
    assert answer("show", "--gpu", "a100", "--model", "e2b", "--template", "gelu_mul").code == 0
    assert answer("show", "--gpu", "h100").code == 1
    assert answer("show", "--gpu", "a100", "--configs", tables).code == 0


def test_explain(tables: Path) -> None:
    words = ["--gpu", "a100", "--template", "gelu_mul", "--model", "e2b", "--tokens"]
    explained = answer("explain", *words, "37")
    assert explained.code == 0
    explained.says(
        "NVIDIA A100-SXM4-80GB, e2b, 37 tokens",
        "gelu_mul, width 6144: gelu * up:",
        "config: ",
        "why: ",
        "64",
        f"from: {tables / FOLDER / 'gelu_mul.json'}, predicted for NVIDIA A100-SXM4-80GB",
        "a prediction: not for a server before it is measured on that GPU",
    )
    far = answer("explain", *words, "8192")
    assert far.code == 0
    far.says("default: ", "64")
    other = answer("explain", "--gpu", "a100", "--template", "moe_routing", "--tokens", "37")
    assert other.code == 1
    other.says("e2b does not use moe_routing")


def spoilt(tables: Path, change: Any) -> Path:
    path = tables / FOLDER / "gelu_mul.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table, indent=1))
    return path


def test_lint_of_sound_tables(tables: Path) -> None:
    for words in ([], [tables], [tables / FOLDER / "gelu_mul.json"]):
        found = answer("lint", *words, "--max-tokens", "64")
        assert (found.code, found.text) == (0, "0 errors, 0 other findings\n")
    found = answer("lint")
    assert found.code == 0
    found.says("the largest tuned count is 64, less than a quarter of the 8192", "3 other")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t: t["entries"][1]["config"].update(num_warps=3),
            "num_warps is 3, wanted one of 1, 2, 4, 8",
        ),
        (lambda t: t["entries"][1]["config"].update(block=1000), "block is 1000, wanted one of"),
        (lambda t: t["entries"][1]["config"].update(blocks=1), "unknown field 'blocks'"),
        (lambda t: t["entries"][1]["config"].pop("rows"), "missing field 'rows'"),
        (lambda t: t["entries"][1]["predicted_us"].update(config=-1), "found -1, wanted more"),
        (lambda t: t["entries"][1].update(verdict="best"), "found \"best\", wanted 'tuned'"),
        (lambda t: t["entries"][1].update(note="mine"), "note: unknown key"),
        (lambda t: t.update(schema=2), "found 2, wanted 1: made by a newer gemma-tune"),
        (lambda t: t.update(template="nosuch"), "no kernel named 'nosuch'"),
    ],
)
def test_lint_of_edited_tables(tables: Path, change: Any, says: str) -> None:
    path = spoilt(tables, change)
    found = answer("lint", path)
    assert found.code == 1
    found.says(f"{path}:", ": error: ", says)
    # Everything else still answers.
    assert answer("list").code == 0
    assert answer("show", "--gpu", "a100").code in (0, 1)
    words = ["--template", "gelu_mul", "--tokens", "37"]
    assert answer("explain", "--gpu", "a100", *words).code == 0


@pytest.mark.parametrize("keep", [0, 1, 400, -2])
def test_truncated_tables(tables: Path, keep: int) -> None:
    path = tables / FOLDER / "gelu_mul.json"
    path.write_text(path.read_text()[:keep])
    found = answer("lint", path)
    assert found.code == 1
    found.says(f"{path}", "error: ", "1 errors")
    listed = answer("list")
    assert listed.code == 0
    listed.says("NVIDIA A100-SXM4-80GB")
    shown = answer("show", "--gpu", "a100")
    assert shown.code == 1
    shown.says(str(path), "no entries for GPU 'a100'")
    words = ["--template", "gelu_mul", "--tokens", "37"]
    explained = answer("explain", "--gpu", "a100", *words)
    assert explained.code == 0
    explained.says("default used", str(path))


def test_lint_of_nothing(tmp_path: Path) -> None:
    found = answer("lint", "nowhere")
    assert found.code == 1
    found.says("nowhere: error: no such file or folder")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["--gpu", "--model", "--tp", "--templates", "--tokens", "--draft-tokens", "--budget"]),
        ([], ["--trials", "--measure", "--storage", "--out", "--jobs", "--seed", "e2b", "a100"]),
        ([], ["default: (1-8192)", "default: (no limit)", "default: (a file in .gemma-tune)"]),
        ([], ["list", "show", "lint", "explain", "Run it again to go on after an interruption"]),
        (["list"], ["List kernels, models, known GPUs"]),
        (
            ["show"],
            ["--gpu", "--template", "--model", "--configs", "default: (shipped and user's)"],
        ),
        (["lint"], ["--max-tokens", "Exit code 1 on errors"]),
        (["explain"], ["--gpu", "--template", "--tokens", "--model", "--tp", "--configs"]),
    ],
)
def test_help(words: list[str], parts: list[str]) -> None:
    for option in ("-h", "--help"):
        shown = answer(*words, option)
        assert shown.code == 0
        shown.says(*parts)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", (1,)),
        (" 8, 1 ,8", (1, 8)),
        ("1-8", (1, 2, 4, 8)),
        ("3-9,100", (3, 4, 8, 9, 100)),
        ("5-5", (5,)),
    ],
)
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    assert cli.counts_of(text) == counts


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), (" 10m ", 600), ("1.5h", 5400), ("0.5s", 0.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert console.seconds_of(text) == seconds
