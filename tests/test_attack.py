"""What a hostile tester broke once: each test names the fault in its docstring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from faulty_template import Config
from typer import BadParameter
from typer.testing import CliRunner

from tuned_configs import roots
from tuned_configs.faults import TableError
from tuned_configs.lint import lint
from tuned_configs.store import read_table
from tuner import cli, compile, console, queries
from tuner.model import PRESET_FOLDER, ModelConfigError, load_model
from tuner.run import Settings, Tuner
from tuner.search import ProblemSearch, StorageError, open_storage
from tuner.trial import Outcome, Status
from tuner.worker import RemoteError

SHIPPED = roots.shipped_root() / "NVIDIA_H200" / "moe_routing.json"


@pytest.mark.parametrize("text", ["9" * 5000, "1-" + "9" * 5000, "1-" + "9" * 15, "١"])
def test_token_counts_have_a_limit(text: str) -> None:
    """Thousands of digits ended in a traceback, 2**63 tokens in PyTorch's C++ stack."""
    with pytest.raises(BadParameter):
        cli.counts_of(text)


def test_token_counts_up_to_the_limit() -> None:
    assert cli.counts_of(str(cli.MOST_TOKENS)) == (cli.MOST_TOKENS,)


@pytest.mark.parametrize("text", ["9" * 400 + "h", "٣m"])
def test_budgets_have_a_limit(text: str) -> None:
    """An infinite budget broke the live panel: no integer is infinite."""
    with pytest.raises(BadParameter):
        console.seconds_of(text)


@pytest.mark.parametrize(
    "words", [["--jobs", "99999999999999"], ["--seed", "-1"], ["--seed", str(2**32)]]
)
def test_numbers_out_of_range(words: list[str]) -> None:
    """Workers were made until the memory was full; NumPy takes no such seed."""
    found = CliRunner().invoke(cli.app, ["--gpu", "a100", "--measure", "never", *words])
    assert found.exit_code == console.USAGE


@pytest.mark.parametrize("name", ["a" * 300, "x/" * 3000])
def test_out_that_no_file_system_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check whether the folder exists raised."""
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(
        cli.app, ["--gpu", "a100", "--measure", "never", "--model", "e2b", "--out", name]
    )
    assert found.exit_code == console.USAGE
    assert "cannot be written here" in " ".join(found.output.split())


def test_lint_of_an_overlong_path() -> None:
    """As above."""
    (finding,) = lint("a" * 5000)
    assert (finding.severity, finding.message) == ("error", "cannot be read: File name too long")


def test_configs_of_an_unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """``~nobody/tables`` in the environment ended every command in a traceback."""
    monkeypatch.setenv("GEMMA_TUNE_CONFIGS", "~no-such-user/tables")
    assert roots.user_root() == Path("~no-such-user/tables")


def run_main(words: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from tuner.cli import main; main()", *words],
        text=True,
        errors="replace",
        stderr=subprocess.PIPE,
        **how,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_to_a_full_disk() -> None:
    """Rich's traceback was shown."""
    with open("/dev/full", "w") as full:
        done = run_main(["list"], stdout=full)
    assert done.returncode == console.FAILED
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_that_the_terminal_cannot_show() -> None:
    """A path of other bytes than UTF-8, or any but ASCII under ASCII, could not be printed."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    name = os.fsdecode("é-".encode() + b"\xff")
    done = run_main(["lint", name], stdout=subprocess.PIPE, env=environment)
    assert done.returncode == console.FAILED
    assert "no such file or folder" in done.stdout
    assert "Traceback" not in done.stderr


def changed(tmp_path: Path, **change: Any) -> Path:
    """A shipped table whose first entry's problem, or whose top, holds something else."""
    value = json.loads(SHIPPED.read_text())
    for name, other in change.items():
        (value if name in value else value["entries"][0]["problem"])[name] = other
    path = tmp_path / "NVIDIA_H200" / SHIPPED.name
    path.parent.mkdir()
    path.write_text(json.dumps(value))
    return path


def test_a_number_beyond_floats_in_a_table(tmp_path: Path) -> None:
    """The predicate's division overflowed in lint."""
    (first, *_) = queries.lint_all([changed(tmp_path, experts=10**400)], 8192)
    assert "entries[0].config: a number is too large" in first.message


def test_a_name_that_a_terminal_would_obey(tmp_path: Path) -> None:
    """``list`` printed the escape sequences of a table's device name."""
    with pytest.raises(TableError, match="device"):
        read_table(changed(tmp_path, device="NVIDIA \x1b[2J"))


def test_a_journal_that_is_a_pipe(tmp_path: Path) -> None:
    """Opening it hung for ever."""
    os.mkfifo(tmp_path / "trials.journal")
    with pytest.raises(StorageError, match="regular file"):
        open_storage(None, tmp_path)


def test_a_journal_that_never_ends(tmp_path: Path) -> None:
    """Reading it filled the memory."""
    (tmp_path / "trials.journal").symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="regular file"):
        open_storage(None, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"time_us": "fast"},
        {"time_us": float("inf")},
        {"time_us": -1.0},
        {"time_us": None},
        {"time_us": True},
        {"status": "failed"},
        {"reason": 5},
        {"resources": []},
        {"max_error": "big"},
        {"unknown": 1},
    ],
)
def test_an_outcome_of_wrong_types(change: dict[str, Any]) -> None:
    """A hand-edited journal's text was taken for a time and compared with numbers."""
    good = Outcome("config", Status.OK, time_us=2.0)
    assert Outcome.from_dict("config", good.to_dict()) == good
    with pytest.raises((KeyError, TypeError, ValueError)):
        Outcome.from_dict("config", {**good.to_dict(), **change})


class Refusing:
    """Stands for a compile worker on a machine that refuses something."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise RemoteError(self.kind, "why", "")


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("PermissionError", compile.CompilerBroken),
        ("OSError", compile.CompilerBroken),
        ("ValueError", compile.CompileError),
        ("CompilationError", compile.CompileError),
        ("print", compile.CompileError),
    ],
)
def test_a_machine_that_cannot_compile_is_no_failed_candidate(
    kind: str, wanted: type[Exception]
) -> None:
    """An unwritable Triton cache or a full /tmp was recorded as failure of every candidate, and the
    record was reused when the machine was mended: nothing valid was ever found again."""

    @compile.dataclasses.dataclass
    class Config:
        rows: int = 1

    pool = compile.CompilePool(80, 1)
    pool._idle.get()
    pool._idle.put(Refusing(kind))  # type: ignore[arg-type]
    with pytest.raises(wanted, match="why"):
        pool._compile("module", {}, Config())
    pool.close()


@pytest.mark.parametrize(
    "finals",
    [
        [1],
        "x",
        {"complete": True, "trials": "9"},
        {"complete": True, "trials": 9},
        {"complete": True, "trials": 9, "run_name": 5, "entry": {}, "run": {}},
        {"complete": True, "trials": 9, "run_name": "r", "entry": [], "run": 1},
    ],
)
def test_finals_of_wrong_types(finals: Any, tmp_path: Path) -> None:
    """A hand-edited journal's finals ended the run in a traceback."""

    class Study:
        user_attrs: ClassVar[dict[str, Any]] = {"finals": finals}

    search = object.__new__(ProblemSearch)
    search._durable = Study()  # type: ignore[assignment]
    search.exhaustive = False
    tuner = object.__new__(Tuner)
    tuner.settings = Settings(tmp_path, trials=9)
    assert tuner._stored(search, Config("fine", 4)) is None


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("head_dim", 10**400, "head_dim"),
        ("global_head_dim", 10**400, "global_head_dim"),
        ("num_experts", 10**400, "num_experts"),
        ("num_hidden_layers", 10**12, "num_hidden_layers"),
    ],
)
def test_a_model_of_absurd_size(field: str, value: int, wanted: str, tmp_path: Path) -> None:
    """Floats overflowed, and layers without a list of their kinds filled the memory."""
    config = json.loads((PRESET_FOLDER / "26b-a4b.json").read_text())
    config["text_config"][field] = value
    del config["text_config"]["layer_types"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ModelConfigError, match=wanted):
        load_model(str(path))


def test_a_model_with_a_number_of_thousands_of_digits(tmp_path: Path) -> None:
    """Python refuses to convert it, in a traceback."""
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": ' + "9" * 5000 + "}")
    with pytest.raises(ModelConfigError, match="a number cannot be read"):
        load_model(str(path))
