"""``gemma-tune verify``: the rule on made-up states, the parent with a stand-in for engines, and,
where vLLM is installed, a tiny model with right and with wrong kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm import MARKS
from typer.testing import CliRunner
from vllm_runs import environment
from vllm_tables import write_tables
from vllm_tiny import write_config

from tuner import cli
from vllm_plugin.serving import verify as verifying
from vllm_plugin.serving.verify import Verdict, compare, inactive
from vllm_plugin.serving.verify_report import lines, shown, verify_table

States = dict[str, list[torch.Tensor]]


def states(noise: float, seed: int, wrong: str = "", scale: float = 1.3) -> States:
    """A truth that all share, with noise of its own; one layer may be off by more."""
    truth = torch.Generator().manual_seed(0)
    draw = torch.Generator().manual_seed(seed)
    found: States = {}
    for name, width in (("layer 0", 64), ("layer 1", 64), ("layer 10", 64), ("logits", 512)):
        for rows in (40, 6, 6):
            values = torch.randn(rows, width, generator=truth)
            off = noise * (scale if name == wrong else 1.0)
            error = torch.randn(rows, width, generator=draw)
            found.setdefault(name, []).append(values + off * error)
    return found


def verdict(tuned: States, stock: States | None = None) -> Verdict:
    places = compare(states(0.0, 1), stock or states(0.01, 2), tuned)
    return Verdict(model="tiny", places=places)


def test_equal_errors_pass() -> None:
    found = verdict(states(0.01, 3))
    assert found.good
    assert found.first_bad is None
    assert [(place.name, place.phase) for place in found.places] == [
        (name, phase)
        for name in ("layer 0", "layer 1", "layer 10", "logits")
        for phase in ("prompts", "decode")
    ]
    assert [place.rows for place in found.places[:2]] == [40, 12]
    assert "verified" in "\n".join(lines(found))


def test_smaller_errors_pass() -> None:
    assert verdict(states(0.0, 3)).good


def test_a_larger_error_fails_where_it_is() -> None:
    found = verdict(states(0.01, 3, "layer 1"))
    assert not found.good
    assert found.first_bad is not None
    assert (found.first_bad.name, found.first_bad.phase) == ("layer 1", "prompts")
    assert "WORSE than stock: first in layer 1 (prompts)" in "\n".join(lines(found))
    assert found.first_bad in shown(found.places)
    assert verify_table(found).row_count >= 4


def test_noise_of_few_rows_is_no_failure_and_that_of_many_is_none() -> None:
    """The same ratio of errors, 1.12: of few rows it may be chance, of many it is not."""

    def made(rows: int) -> bool:
        draw = torch.Generator().manual_seed(5)
        truth = torch.randn(rows, 8, generator=draw)
        one, other = (
            truth + torch.randn(rows, 8, generator=draw) * size for size in (1e-2, 1.12e-2)
        )
        return Verdict(
            model="", places=compare(*({"layer 0": [each]} for each in (truth, one, other)))
        ).good

    assert made(12)
    assert not made(100_000)


def test_one_wrong_row_among_many_is_found() -> None:
    """Its error is about as large as the standard error that it causes."""
    draw = torch.Generator().manual_seed(5)
    truth = torch.randn(791, 64, generator=draw)
    stock, tuned = (truth + 0.004 * torch.randn(791, 64, generator=draw) for _ in range(2))
    sides = [{"layer 0": [each]} for each in (truth, stock, tuned)]
    assert compare(*sides)[0].good
    tuned[400] = torch.randn(64, generator=draw)
    place = compare(*sides)[0]
    assert place.tuned_rms <= place.allowed_rms
    assert not place.good


def test_nan_is_never_good() -> None:
    broken = states(0.01, 3)
    broken["layer 10"][0][3, 5] = torch.nan
    found = verdict(broken)
    assert found.first_bad is not None
    assert found.first_bad.name == "layer 10"


def test_a_stock_far_from_the_truth_says_nothing() -> None:
    found = verdict(states(2.0, 3), states(2.0, 2))
    assert not found.good
    assert "nothing can be said: in layer 0" in "\n".join(lines(found))


def test_first_choices_that_are_clear_must_be_kept() -> None:
    truth, stock, tuned = states(0.0, 1), states(1e-4, 2), states(1e-4, 3)
    best = int(truth["logits"][0][2].argmax())
    for each in (truth, stock, tuned):
        each["logits"][0][2, best] += 5.0
    assert compare(truth, stock, tuned)[-2].good
    # Within the RMS of a row, and still another token.
    tuned["logits"][0][2, best] = -9.0
    place = compare(truth, stock, tuned)[-2]
    assert place.clear is not None
    assert place.tuned_top == place.clear - 1
    assert not place.good


def test_states_that_do_not_belong_together() -> None:
    other = states(0.01, 3)
    other["layer 1"][0] = other["layer 1"][0][:-1]
    with pytest.raises(ValueError, match="layer 1, prompts: recorded"):
        verdict(other)
    del other["layer 1"]
    with pytest.raises(ValueError, match="wanted three alike"):
        verdict(other)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([], "the plugin said nothing"),
        (["gemma-tune 0.1: x: inactive, vLLM runs stock: no GPU found"], "no GPU found"),
        (["gemma-tune 0.1: x: 0 of 9 hot paths active; a"], "0 of 9"),
        (["gemma-tune: a note", "gemma-tune 0.1: x: 3 of 9 hot paths active; a"], None),
    ],
)
def test_what_the_plugin_said(said: list[str], reason: str | None) -> None:
    found = inactive(said)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


class FakeEngine:
    """Records made-up states, by its name."""

    def __init__(self, name: str, settings: Any, environment: Any, log: Path) -> None:
        self.name, self.settings, self.environment = name, settings, environment
        MADE.append(self)
        self.closed = False

    def answer(self, seconds: float) -> dict[str, Any]:
        return {"ready": True, "seconds": 1.0}

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        noise = {"truth": 0.0, "stock": 0.01, "tuned": 0.01}[self.name]
        torch.save(states(noise, len(self.name) + len(MADE)), request["save"])
        assert len(request["forced"]) == 4
        return {"layers": 3}

    def said(self) -> list[str]:
        return ["gemma-tune 0.1: tiny: 3 of 4 hot paths active"]

    def close(self, seconds: float) -> None:
        self.closed = True


MADE: list[FakeEngine] = []


def test_three_engines_one_after_another(tmp_path: Path) -> None:
    MADE.clear()
    found = verifying.verify(
        "tiny", {"model": "x"}, "bfloat16", "TRITON_ATTN", 100, 3, tmp_path, lambda _: None,
        start=FakeEngine,  # type: ignore[arg-type]
    )  # fmt: skip
    assert found.good
    assert [engine.name for engine in MADE] == ["truth", "stock", "tuned"]
    assert [engine.settings["dtype"] for engine in MADE] == ["float32", "bfloat16", "bfloat16"]
    assert [engine.environment["GEMMA_TUNE"] for engine in MADE] == ["0", "0", "1"]
    assert all(engine.settings["enforce_eager"] and engine.closed for engine in MADE)
    assert Verdict.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--model", "no-such-model"], 2, "no-such-model"),
        (["--layers", "99"], 2, "layers is 99, wanted 1 to 35"),
        (["--steps", "-1"], 2, "steps"),
    ],
)
def test_wrong_usage(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.cli_serving.require_vllm", lambda: None)
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli.app, ["verify", *words])
    assert found.exit_code == code
    assert message in found.output + str(found.stderr)


class TestWithVllm:
    pytestmark = MARKS

    @pytest.mark.parametrize(
        ("kind", "broken", "code"), [("dense", "", 0), ("moe", "", 0), ("dense", "wrong", 1)]
    )
    def test_a_tiny_model(self, kind: str, broken: str, code: int, tmp_path: Path) -> None:
        """Right kernels pass; one that is off by 1 % in one layer's norm is found."""
        model = write_config(tmp_path / kind, kind)
        write_tables(tmp_path / "tables", model)
        program = tmp_path / "run.py"
        program.write_text(WRONG if broken else "from tuner.cli import main\nmain()\n")
        options = ["--model", kind, "--dtype", "float32", "--kv-gib", "0.0625", "--steps", "2"]
        done = subprocess.run(
            [sys.executable, str(program), "verify", *options],
            env={
                **environment(model, tmp_path / "tables", {}),
                "PYTHONPATH": str(Path(__file__).parents[1]),
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == code, done.stdout + done.stderr
        found = Verdict.model_validate(json.loads((tmp_path / "verify/verify.json").read_text()))
        assert found.good == (code == 0)
        if broken:
            assert found.first_bad is not None
            assert found.first_bad.name == "layer 2"


#: Starts engines whose third layer's norms have another epsilon than the model's.
WRONG = """
import sys
from vllm_plugin.serving import engine
child = '''
import sys
from vllm_plugin.serving import child, record
stock = record.record
def spoiled(llm, request):
    def spoil(model):
        plan = model.model.layers[2].__dict__.get("_gemma_tune")
        if plan is not None:
            plan.eps = 0.02
    llm.apply_model(spoil)
    return stock(llm, request)
record.record = spoiled
child.main()
'''
init = engine.Engine.__init__
def started(self, name, settings, environment, log):
    init(self, name, settings, environment, log, (sys.executable, "-c", child))
engine.Engine.__init__ = started
from tuner.cli import main
main()
"""
