"""What the plugin relies on in vLLM, read from sources: made-up ones, and wheels at hand.

``pytest --vllm-sources /opt/dl/v26/vllm --vllm-sources ...`` names unpacked ``vllm`` packages;
``pip download --no-deps vllm==0.26.0`` and ``unzip vllm-*.whl 'vllm/*.py'`` make one.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from vllm_plugin import contract

FUNCTION = '''
class Gemma4MLP:
    """A block."""

    def forward(self, x):
        """Doc."""
        # why
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))  # how
'''


def of(text: str) -> str:
    return contract.fingerprints(text)["Gemma4MLP.forward"]


def test_fingerprint_is_of_the_code_alone() -> None:
    bare = FUNCTION.replace("        # why\n", "\n").replace("  # how", "")
    assert of(FUNCTION) == of(bare) == of(bare.replace('        """Doc."""\n', ""))
    assert of(FUNCTION) != of(FUNCTION.replace("act_fn(", "norm("))


def test_a_function_that_differs_or_is_gone_rules_its_path_out() -> None:
    reasons = contract.unknown(FUNCTION)
    assert set(reasons) == set(contract.RELIES_ON)
    assert reasons["mlp"] == "Gemma4MLP.forward of this vLLM differs from those known"
    assert reasons["attention"] == "this vLLM has no Gemma4Attention.forward"


def test_assigned_names_are_found_however_they_are_made() -> None:
    text = """
class A:
    e: int = 1
    def __init__(self):
        self.a = self.b = 1
        self.c: int
        self.register_buffer("d", None)
class B:
    def __init__(self):
        self.z = self.y
"""
    assert contract.assigned(text, "A") == {"a", "b", "c", "d", "e", "__init__"}
    assert contract.assigned(text, "B") == {"z", "__init__"}


def folders(config: pytest.Config) -> list[Path]:
    given = [Path(each) for each in config.getoption("--vllm-sources")]
    installed = importlib.util.find_spec("vllm")
    if installed is not None and installed.submodule_search_locations:
        given.append(Path(installed.submodule_search_locations[0]))
    return given


def test_sources_at_hand_have_all_that_is_relied_on(request: pytest.FixtureRequest) -> None:
    at_hand = folders(request.config)
    if not at_hand:
        pytest.skip("no vLLM here; name unpacked ones with --vllm-sources")
    assert {str(folder): contract.faults(folder) for folder in at_hand} == {
        str(folder): [] for folder in at_hand
    }


def test_a_missing_attribute_or_file_is_a_fault(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    at_hand = folders(request.config)
    if not at_hand:
        pytest.skip("no vLLM here; name unpacked ones with --vllm-sources")
    others = (contract.UNIFIED_FILE, contract.UNIFIED_CALLER, contract.CONFIG_MAP_FILE)
    for file in {*others, *(file for file, _, _ in contract.ATTRIBUTES)}:
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(at_hand[0] / file, target)
    assert contract.faults(tmp_path) == []
    norm = tmp_path / "model_executor/layers/layernorm.py"
    norm.write_text(norm.read_text().replace("self.variance_epsilon = eps", "self.eps = eps"))
    (tmp_path / "config/vllm.py").unlink()
    assert contract.faults(tmp_path) == [
        "model_executor/layers/layernorm.py: RMSNorm has no variance_epsilon",
        "config/vllm.py is missing",
    ]


def test_another_attention_function_or_call_is_a_fault(tmp_path: Path) -> None:
    assert contract.attention_faults(tmp_path) == [
        f"{contract.UNIFIED_FILE} is missing",
        f"{contract.UNIFIED_CALLER} is missing",
    ]
    for file in (contract.UNIFIED_FILE, contract.UNIFIED_CALLER):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    names = ", ".join(contract.UNIFIED_ATTENTION)
    definition, call = tmp_path / contract.UNIFIED_FILE, tmp_path / contract.UNIFIED_CALLER
    definition.write_text(f"def unified_attention({names}): ...")
    call.write_text("def forward(): unified_attention(q=1, k=2)")
    assert contract.attention_faults(tmp_path) == []
    definition.write_text(f"def unified_attention({names}, new=None): ...")
    call.write_text("def forward(q): unified_attention(q, k=2)")
    assert len(contract.attention_faults(tmp_path)) == 2


def test_an_architecture_without_config_changes_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / contract.CONFIG_MAP_FILE
    path.parent.mkdir(parents=True)
    first, *others = contract.ARCHITECTURES
    entries = ", ".join(f"{name!r}: int" for name in others)
    path.write_text(f"{contract.CONFIG_MAP}: dict[str, type] = {{{entries}}}")
    assert contract.config_map_faults(tmp_path) == [
        f"{contract.CONFIG_MAP_FILE}: {contract.CONFIG_MAP} has no {first}"
    ]
