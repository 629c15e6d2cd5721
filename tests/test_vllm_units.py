"""The plugin's parts that need vLLM's modules but no running model, and those that need neither."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_tables import NAME, write_tables
from vllm_tiny import write_config

from kernel_templates import gelu_mul, residual_norm
from tuned_configs import TableSet
from tuned_configs.keys import problem_key
from vllm_plugin import settings
from vllm_plugin.tables import Choices, find_device

ROOT = Path(__file__).parent.parent
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def run(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_entry_point_is_light() -> None:
    code = (
        "import sys, vllm_plugin; from vllm_plugin import settings, hooks; "
        "heavy = {'torch', 'triton', 'vllm', 'tuner', 'optuna', 'pydantic'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run(code) == "[]"


@pytest.mark.parametrize(
    ("value", "on"),
    [(None, False), ("", False), ("1", True), (" ON ", True), ("0", False), ("no", False)],
)
def test_switch(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv("GEMMA_TUNE", raising=False)
    if value is not None:
        monkeypatch.setenv("GEMMA_TUNE", value)
    assert settings.switched_on() is on


def test_unknown_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA_TUNE", "perhaps")
    with pytest.raises(ValueError, match="'perhaps', wanted 0, 1 or confirm"):
        settings.switched_on()


@pytest.fixture
def choices(tmp_path: Path) -> Choices:
    model = write_config(tmp_path / "dense", "dense")
    write_tables(tmp_path / "tables", model)
    return Choices(find_device(), TableSet.load(tmp_path / "tables", NAME))


PROBLEM = residual_norm.Problem(7, 128, 1, True, 1, dtype="float32")


def test_config_is_the_tables_and_is_looked_up_once(
    choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = residual_norm.default(PROBLEM, choices.device)
    assert choices.config(residual_norm.TEMPLATE, PROBLEM) == wanted
    monkeypatch.setattr(choices, "_tables", None)
    assert choices.config(residual_norm.TEMPLATE, PROBLEM) is choices.config(
        residual_norm.TEMPLATE, PROBLEM
    )


def test_last_layer_borrows_the_entries_of_the_others(choices: Choices) -> None:
    last = residual_norm.Problem(7, 128, 1, True, 0, dtype="float32")
    assert not choices.decide("residual_norm", last).active
    asked: list[Any] = []
    choices.borrow("residual_norm", vars(last), {"norms": 1})
    lookup = choices._tables.lookup
    choices._tables.lookup = lambda *values: asked.append(values[1]) or lookup(*values)  # type: ignore[method-assign, func-returns-value]
    choices.config(residual_norm.TEMPLATE, last)
    assert problem_key(asked[0]) == problem_key(vars(PROBLEM))


def test_decisions_name_what_is_missing(choices: Choices) -> None:
    assert choices.decide("residual_norm", PROBLEM).active
    other = gelu_mul.Problem(1, 999, "halves", 1998, "float32")
    decision = choices.decide("gelu_mul", other)
    assert not decision.active
    assert "no measured entry" in decision.reason
    assert "999" in decision.reason


def test_digest_depends_on_what_is_active_and_on_the_tables(
    choices: Choices, tmp_path: Path
) -> None:
    write_tables(tmp_path / "other", tmp_path / "dense", stock_us=3.0)
    other = Choices(choices.device, TableSet.load(tmp_path / "other", NAME))
    digests = {choices.digest({"a": 1}), choices.digest({"a": 2}), other.digest({"a": 1})}
    assert len(digests) == 3
    assert choices.digest({"a": 1}) in digests


def test_the_same_tables_choose_the_same(choices: Choices, tmp_path: Path) -> None:  # case 66
    """Two ranks with equal tables agree on 1,000 token counts, whatever each was asked before."""
    draw = random.Random(0)
    counts = [draw.randint(1, 8192) for _ in range(1000)]
    other = Choices(find_device(), TableSet.load(tmp_path / "tables", NAME))

    def chosen(rank: Choices, order: list[int]) -> dict[int, Any]:
        problems = {count: dataclasses.replace(PROBLEM, tokens=count) for count in order}
        return {
            count: rank.config(residual_norm.TEMPLATE, problem)
            for count, problem in problems.items()
        }

    assert chosen(choices, counts) == chosen(other, counts[::-1])
    assert choices.digest({}) == other.digest({})


class TestWithVllm:
    pytestmark = needs_vllm

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"quant_config": object()}, "quantised"),
            ({"lora_config": object()}, "LoRA"),  # case 55
            (
                {
                    "compilation_config": SimpleNamespace(
                        pass_config=SimpleNamespace(enable_sp=True)
                    )
                },
                "sequence parallelism",
            ),
            ({"additional_config": object()}, "additional_config"),
            ({"model_config": SimpleNamespace(dtype=torch.float64)}, "float64"),
        ],
    )
    def test_servers_left_alone(self, changed: dict[str, Any], reason: str) -> None:
        from vllm_plugin.attach import refuse_config
        from vllm_plugin.tables import Unavailable

        plain: dict[str, Any] = {
            "quant_config": None,
            "lora_config": None,
            "compilation_config": None,
            "additional_config": {},
            "model_config": SimpleNamespace(dtype=torch.bfloat16),
        }
        refuse_config(SimpleNamespace(**plain))
        with pytest.raises(Unavailable, match=reason):
            refuse_config(SimpleNamespace(**{**plain, **changed}))

    @pytest.mark.parametrize(
        ("planned", "first", "last", "fast_prefill", "aux", "linked"),
        [
            ("012345", 0, 6, False, (), "01234"),
            ("01345", 0, 6, False, (), "034"),  # layer 2 is vLLM's own
            ("012345", 0, 6, True, (), "0124"),  # fast prefill runs layers 4 and 5 apart
            ("012345", 3, 6, False, (), "34"),  # pipeline ranks
            ("012345", 0, 4, False, (), "012"),
            ("012345", 0, 6, False, (2,), ""),  # a drafter reads between layers
        ],
    )
    def test_layers_linked(
        self,
        planned: str,
        first: int,
        last: int,
        fast_prefill: bool,
        aux: tuple[int, ...],
        linked: str,
    ) -> None:
        from vllm_plugin import layers, plan

        stack = [SimpleNamespace(input_layernorm=f"norm {index}") for index in range(6)]
        for index in map(int, planned):
            stack[index].__dict__[layers.PLAN] = layers.LayerPlan(1e-6, "", 1.0, 0)
        model = SimpleNamespace(
            layers=stack,
            start_layer=first,
            end_layer=last,
            config=SimpleNamespace(num_hidden_layers=6, num_kv_shared_layers=2),
            aux_hidden_state_layers=aux,
            _set_aux_hidden_state_layers=lambda wanted: None,
        )
        planner = plan.Planner.__new__(plan.Planner)
        planner.unknown, planner.linked = {}, []
        planner.config = SimpleNamespace(
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill)
        )
        planner._link(model)
        found = {
            str(index): layer.__dict__[layers.PLAN].next_norm
            for index, layer in enumerate(stack)
            if layers.PLAN in layer.__dict__ and layer.__dict__[layers.PLAN].next_norm is not None
        }
        assert found == {index: f"norm {int(index) + 1}" for index in linked}


REGISTER = """
import json, multiprocessing, sys
import vllm_plugin
from vllm import ModelRegistry

def seen(queue=None):
    for _ in range(3):
        vllm_plugin.register()
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    kind = MODELS_CONFIG_MAP["Gemma4ForCausalLM"]
    wraps = sum("_gemma_tune_stands_for" in vars(each) for each in kind.__mro__)
    found = [ModelRegistry.models["Gemma4ForCausalLM"].module_name, wraps]
    return found if queue is None else queue.put(found)

if __name__ == "__main__":
    answers = [seen()]
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=seen, args=(queue,))
        child.start()
        answers.append(queue.get(timeout=200))
        child.join()
    print(json.dumps(answers))
"""


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_registered_again_and_in_children(tmp_path: Path) -> None:  # case 68
    """Three times over, here, in a forked and in a spawned process: once in place in each."""
    program = tmp_path / "register.py"
    program.write_text(REGISTER)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "GEMMA_TUNE": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [["vllm_plugin.model", 1]] * 3


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("value", "loaded"), [(None, True), ("gemma_tune", True), ("other", False), ("", False)]
)
def test_vllms_own_list_of_plugins(value: str | None, loaded: bool, tmp_path: Path) -> None:
    """Case 68: ``VLLM_PLUGINS`` unset, naming the plugin, naming another, empty."""
    info = tmp_path / "gemma_tune-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gemma-tune\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ngemma_tune = vllm_plugin:register\n"
    )
    code = (
        "import os; value = os.environ.pop('LISTED'); "
        "value == 'unset' or os.environ.update(VLLM_PLUGINS=value); "
        "from vllm.plugins import load_general_plugins as load; load(); load(); "
        "from vllm import ModelRegistry; "
        "print(ModelRegistry.models['Gemma4ForCausalLM'].module_name)"
    )
    said = run(
        code,
        LISTED="unset" if value is None else value,
        GEMMA_TUNE="1",
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    stock = "vllm.model_executor.models.gemma4"
    assert said.splitlines()[-1] == ("vllm_plugin.model" if loaded else stock)
