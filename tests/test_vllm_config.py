"""What the plugin changes in vLLM's config: fast prefill, block size, and the hook that does it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_tables import NAME, TOKENS

from kernel_templates import attention_decode, attention_prefill
from kernel_templates.attention_problem import problem_kinds
from kernel_templates.base import record_to_dict
from tuned_configs import Device, Entry, MaxError, Run, Timing, make_table, write_table
from tuned_configs.store import table_path
from vllm_plugin import advice, block_size, config_hook, contract, fast_prefill, settings

TEXT = {
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 20,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
}


class Images:
    """The limits of a multimodal model."""

    def __init__(self, count: int, language_model_only: bool = False) -> None:
        self.count, self.language_model_only = count, language_model_only

    def get_limit_per_prompt(self, _kind: str) -> int:
        return self.count


def config(**changed: Any) -> Any:
    """A ``VllmConfig`` of the E2B on one GPU; ``part__name`` changes a part's attribute."""
    made = SimpleNamespace(
        cache_config=SimpleNamespace(
            kv_sharing_fast_prefill=False,
            block_size=16,
            user_specified_block_size=False,
            cache_dtype="auto",
            prefix_match_unit=None,
            kv_cache_dtype_skip_layers=[],
        ),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**TEXT),
            dtype=torch.bfloat16,
            quantization=None,
            runner_type="generate",
            is_mm_prefix_lm=False,
            multimodal_config=None,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, enable_dbo=False
        ),
        attention_config=SimpleNamespace(
            backend=SimpleNamespace(name="TRITON_ATTN"), backend_per_kind={}
        ),
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
    )
    for path, value in changed.items():
        *parts, name = path.split("__")
        owner: Any = made
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return made


class Processor:
    """Stands for vLLM's ``InputProcessor``."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def process_inputs(self, request_id: str, prompt: Any, params: Any, tasks: Any = ()) -> Any:
        return (request_id, prompt, params, tasks)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a GPU, without vLLM."""
    monkeypatch.delenv("GEMMA_TUNE_FAST_PREFILL", raising=False)
    monkeypatch.setattr(sys, "argv", ["vllm", "serve"])
    monkeypatch.setattr(fast_prefill, "_platform_has_triton", lambda: True)
    monkeypatch.setattr(fast_prefill, "_batch_invariant", lambda: False)
    monkeypatch.setattr(fast_prefill, "_newer_runner_forced", lambda: False)
    module = ModuleType("vllm.v1.engine.input_processor")
    module.InputProcessor = type("InputProcessor", (Processor,), vars(Processor).copy())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("gpu")
def test_fast_prefill_goes_on_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.gemma_tune")
    given = config()
    fast_prefill.change(given)
    fast_prefill.change(given)
    assert given.cache_config.kv_sharing_fast_prefill is True
    (line,) = [each.getMessage() for each in caplog.records]
    assert "20 of 35 layers" in line
    assert "GEMMA_TUNE_FAST_PREFILL=0" in line


@pytest.mark.usefixtures("gpu")
def test_prompt_logprobs_are_refused_with_fast_prefill_alone() -> None:
    """Case 52."""
    for _ in range(2):
        fast_prefill.change(config())
    kind = sys.modules["vllm.v1.engine.input_processor"].InputProcessor  # type: ignore[attr-defined]
    for wanted, on, refused in (
        (0, True, True),
        (5, True, True),
        (None, True, False),
        (5, False, False),
    ):
        params = SimpleNamespace(prompt_logprobs=wanted)
        processor = kind(config(cache_config__kv_sharing_fast_prefill=on))
        if refused:
            with pytest.raises(ValueError, match=f"prompt_logprobs={wanted}: .*FAST_PREFILL=0"):
                processor.process_inputs("1", "prompt", params, ("generate",))
        else:
            assert processor.process_inputs("1", "prompt", params=params, tasks=1)[3] == 1
    pooling = SimpleNamespace()
    assert kind(config()).process_inputs("1", "prompt", pooling)[2] is pooling


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_config__hf_text_config__num_kv_shared_layers": 0}, "no layers that share"),
        ({"model_config__hf_text_config__num_kv_shared_layers": None}, "no layers that share"),
        ({"model_config__hf_text_config__num_kv_shared_layers": 35}, "all layers share"),
        ({"model_config__runner_type": "pooling"}, "does not generate"),
        ({"speculative_config": object()}, "speculative decoding"),  # case 52
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__enable_dbo": True}, "DBO"),
        ({"kv_transfer_config": object()}, "other servers"),
        ({"lora_config": object()}, "LoRA"),
        ({"model_config__quantization": "fp8"}, "quantised"),
        ({"attention_config__backend": SimpleNamespace(name="FLASHINFER")}, "not one that"),
        ({"attention_config__backend_per_kind": {"full_attention": 1}}, "not one that"),
        (
            {"model_config__is_mm_prefix_lm": True, "model_config__multimodal_config": Images(1)},
            "both directions",
        ),
    ],
)
def test_fast_prefill_stays_off_with_a_reason(
    changed: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.gemma_tune")
    given = config(**changed)
    fast_prefill.change(given)
    assert given.cache_config.kv_sharing_fast_prefill is False
    (line,) = [each.getMessage() for each in caplog.records]
    assert "stays off" in line
    assert reason in line


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("limits", [None, Images(0), Images(1, language_model_only=True)])
def test_images_that_never_come_do_not_matter(limits: Images | None) -> None:
    changed = {"model_config__is_mm_prefix_lm": True, "model_config__multimodal_config": limits}
    assert fast_prefill.reason_against(config(**changed)) is None


@pytest.mark.usefixtures("gpu")
def test_users_opt_out_of_fast_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--no-kv-sharing-fast-prefill"])
    assert "is given" in str(fast_prefill.reason_against(config()))
    monkeypatch.setenv("GEMMA_TUNE_FAST_PREFILL", "0")
    assert fast_prefill.reason_against(config()) == "GEMMA_TUNE_FAST_PREFILL=0"
    monkeypatch.setenv("GEMMA_TUNE_FAST_PREFILL", "perhaps")
    with pytest.raises(ValueError, match="wanted 0 or 1"):
        fast_prefill.reason_against(config())


@pytest.mark.usefixtures("gpu")
def test_a_runner_without_fast_prefill_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_prefill, "_newer_runner_forced", lambda: True)
    assert fast_prefill.reason_against(config()) is None
    monkeypatch.setattr(fast_prefill, "_older_runner", lambda _: True)
    assert "VLLM_USE_V2_MODEL_RUNNER" in str(fast_prefill.reason_against(config()))


class Lacks:
    def _get_v2_model_runner_unsupported_features(self) -> list[str]:
        return ["KV sharing fast prefill"]


class Has:
    def _get_v2_model_runner_unsupported_features(self) -> list[str]:
        return ["diffusion"]


def test_which_runner_serves_fast_prefill_is_read_from_vllm() -> None:
    assert fast_prefill._older_runner(Lacks())
    assert not fast_prefill._older_runner(Has())
    assert not fast_prefill._older_runner(object())


KINDS = [
    {"query_heads": 8, "kv_heads": 1, "head_dim": 256, "window": 512, "dtype": "bfloat16"},
    {"query_heads": 8, "kv_heads": 1, "head_dim": 512, "window": 0, "dtype": "bfloat16"},
]


def write(folder: Path, prefill: float, decode: float, provenance: str = "measured") -> None:
    """Tables for the E2B whose larger blocks take ``prefill`` and ``decode`` of the time."""
    run = Run(
        provenance=provenance,  # type: ignore[arg-type]
        device=Device(name=NAME, capability=[0, 0], sms=1, memory_bytes=1, driver=None),
        gemma_tune="0.1.0",
        triton=None,
        torch=None,
        python=None,
        finished_at="2026-12-01T00:00:00Z",
    )
    for module, factor in ((attention_prefill, prefill), (attention_decode, decode)):
        kernel: Any = module.TEMPLATE
        entries = []
        for kind in KINDS:
            for base, time in ((16, 1.0), (64, factor)):
                block = base * (2 if kind["head_dim"] == 256 else 1)
                for tokens in TOKENS:
                    problem = module.asked(
                        attention_prefill.Problem(tokens, 1, 0, block_size=block, **kind)  # type: ignore[arg-type]
                    )
                    timing = Timing(median=time, spread=0.0)
                    entries.append(
                        Entry(
                            problem=record_to_dict(problem),
                            config=record_to_dict(module.stock_config(problem)),
                            verdict="default",
                            time_us=timing,
                            default_us=timing,
                            stock_us=timing,
                            predicted_us=None,
                            max_error=MaxError(ratio=0.0, absolute=0.0),
                            trials=1,
                            rejected={},
                            models=["E2B"],
                            source_hash=kernel.source_hash,
                            run="test",
                        )
                    )
        path = table_path(folder, NAME, kernel.name)
        write_table(path, make_table(kernel.name, "test", run, entries))


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(block_size, "_device", lambda: NAME)
    monkeypatch.setattr(block_size, "roots", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (0.7, 1.0, None),
        (0.7, 1.01, None),
        (0.99, 0.5, "attention_prefill: measured 0.99"),
        (0.7, 1.1, "attention_decode: measured 1.10"),
    ],
)
def test_blocks_grow_where_that_was_measured_as_faster(
    prefill: float,
    decode: float,
    reason: str | None,
    tables: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "vllm.gemma_tune")
    write(tables, prefill, decode)
    given = config()
    found = block_size.reason_against(given)
    assert found is None if reason is None else reason in str(found)
    block_size.change(given)
    cache = given.cache_config
    assert (cache.block_size, cache.user_specified_block_size) == (
        (64, True) if reason is None else (16, False)
    )
    assert len(caplog.records) == (reason is None)


def test_blocks_stay_where_nothing_was_measured(tables: Path) -> None:
    assert "not measured with both" in str(block_size.reason_against(config()))
    other = config(model_config__hf_text_config__num_attention_heads=16)
    write(tables, 0.5, 0.5)
    assert block_size.reason_against(config()) is None
    assert "not measured with both for head dim 256" in str(block_size.reason_against(other))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cache_config__user_specified_block_size": True}, "--block-size"),
        ({"cache_config__block_size": 128}, "128"),
        ({"cache_config__cache_dtype": "fp8"}, "another type"),
        ({"cache_config__kv_cache_dtype_skip_layers": ["0"]}, "several types"),
        ({"cache_config__prefix_match_unit": 16}, "prefix_match_unit"),
        ({"attention_config__backend": SimpleNamespace(name="FLASH_ATTN")}, "TRITON_ATTN"),
        ({"attention_config__backend": None}, "TRITON_ATTN"),
        ({"kv_transfer_config": object()}, "other servers"),
        ({"speculative_config": object()}, "speculative"),
        ({"lora_config": object()}, "LoRA"),
        ({"model_config__quantization": "fp8"}, "quantised"),
    ],
)
def test_blocks_stay_as_the_config_wants(
    changed: dict[str, Any], reason: str, tables: Path
) -> None:
    write(tables, 0.5, 0.5)
    given = config(**changed)
    before = dict(vars(given.cache_config))
    block_size.change(given)
    assert vars(given.cache_config) == before
    assert reason in str(block_size.reason_against(given))


def test_shapes_that_transformers_gives_layer_by_layer() -> None:
    """Newer transformers raise for a value of the whole model that differs between layers."""

    class PerLayer(SimpleNamespace):
        @property
        def head_dim(self) -> int:
            raise AttributeError("'head_dim' is a per-layer attribute")

    old = config()
    kinds = old.model_config.hf_text_config.layer_types
    old.model_config.hf_text_config = PerLayer(
        layer_types=kinds,
        num_attention_heads=8,
        sliding_window=512,
        per_layer_config=[
            SimpleNamespace(num_key_value_heads=1, head_dim=512 if kind[0] == "f" else 256)
            for kind in kinds
        ],
    )
    assert problem_kinds(block_size._shape(old), [16]) == problem_kinds(
        block_size._shape(config()), [16]
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shapes_are_those_of_a_rank(ranks: int) -> None:
    """The 26B: 8 and 2 KV heads, never less than one on a rank (case 28)."""
    text = {"num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024}
    changed = {f"model_config__hf_text_config__{name}": value for name, value in text.items()}
    given = config(**changed, parallel_config__tensor_parallel_size=ranks)
    given.model_config.hf_text_config.attention_k_eq_v = True
    given.model_config.hf_text_config.num_global_key_value_heads = 2
    sliding, full = problem_kinds(block_size._shape(given), [16])
    assert (sliding["query_heads"], sliding["kv_heads"]) == (16 // ranks, 8 // ranks)
    assert (full["kv_heads"], full["head_dim"]) == (max(1, 2 // ranks), 512)


class Stock:
    """Stands for vLLM's ``Gemma4Config``."""

    seen: list[Any] = []  # noqa: RUF012 (one list for all)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        Stock.seen.append(vllm_config)
        if vllm_config == "bad":
            raise ValueError("vLLM's own")

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> str:
        return f"model {model_config}"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = ModuleType(config_hook.MODULE)
    module.MODELS_CONFIG_MAP = {  # type: ignore[attr-defined]
        **dict.fromkeys(contract.ARCHITECTURES[:2], Stock),
        "Other": Stock,
    }
    monkeypatch.setitem(sys.modules, config_hook.MODULE, module)
    monkeypatch.setattr(Stock, "seen", [])
    return module.MODELS_CONFIG_MAP  # type: ignore[attr-defined, no-any-return]


def test_hook_runs_after_vllms_own(known: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours: list[Any] = []
    monkeypatch.setattr(config_hook, "change", ours.append)
    config_hook.install()
    once = dict(known)
    config_hook.install()
    assert known == once
    assert known["Other"] is Stock
    assert set(known) == {*contract.ARCHITECTURES[:2], "Other"}
    entry = known["Gemma4ForCausalLM"]
    assert issubclass(entry, Stock)
    entry.verify_and_update_config("good")
    with pytest.raises(ValueError, match="vLLM's own"):
        entry.verify_and_update_config("bad")
    assert (Stock.seen, ours) == (["good", "bad"], ["good"])
    assert entry.verify_and_update_model_config(1) == "model 1"
    config_hook.remove()
    assert set(known.values()) == {Stock}


def test_a_fault_in_one_change_leaves_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("injected")

    changed: list[Any] = []
    monkeypatch.setattr(fast_prefill, "change", fails)
    for other in (advice, block_size):
        monkeypatch.setattr(other, "change", changed.append)
    config_hook.change("config")
    assert changed == ["config", "config"]
    (record,) = caplog.records
    assert record.getMessage() == (
        "gemma-tune: fast prefill is left as it was: RuntimeError: injected"
    )


E2B_TYPES = (["sliding_attention"] * 4 + ["full_attention"]) * 7


@pytest.mark.parametrize(
    ("starts", "together"),
    [([0, 13], True), ([0, 14], False), ([0, 15], False), ([0, 21], False), ([0, 5, 13], True)],
)
def test_pipeline_splits_of_shared_layers(starts: list[int], together: bool) -> None:  # case 54
    found = advice.separated(E2B_TYPES, 20, starts)
    assert (found == []) is together
    if starts == [0, 14]:
        # Layer 13 is the last sliding one of its own, 14 the last full one.
        assert {source for _, source in found} == {13}
        assert {E2B_TYPES[layer] for layer, _ in found} == {"sliding_attention"}
    assert advice.separated(E2B_TYPES, 0, starts) == []


@pytest.mark.parametrize(
    ("ranks", "shared", "starts", "said"),
    [
        (2, 20, [0, 18], "VLLM_PP_LAYER_PARTITION=13,22"),
        (3, 20, [0, 12, 24], "VLLM_PP_LAYER_PARTITION=7,6,22"),
        (16, 20, list(range(0, 32, 2)), "14 ranks are the most"),
        (2, 20, [0, 13], None),
        (2, 0, [0, 18], None),
        (1, 20, [0], None),
    ],
)
def test_a_pipeline_split_that_vllm_refuses_is_said_before(
    ranks: int,
    shared: int,
    starts: list[int],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # case 54
    monkeypatch.setattr(settings, "_said", set())
    monkeypatch.setattr(advice, "_first_layers", lambda *_: starts)
    given = config(parallel_config__pipeline_parallel_size=ranks)
    given.model_config.hf_text_config.layer_types = E2B_TYPES
    given.model_config.hf_text_config.num_kv_shared_layers = shared
    advice.change(given)
    advice.change(given)
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


@pytest.mark.parametrize(
    ("target", "draft", "gemma", "warned"),
    [
        ("TRITON_ATTN", "FLASHINFER", True, True),
        (None, "FLASHINFER", True, True),
        ("TRITON_ATTN", "TRITON_ATTN", True, False),
        ("TRITON_ATTN", None, True, False),
        ("TRITON_ATTN", "FLASHINFER", False, False),
    ],
)
def test_a_draft_with_another_backend_is_said(
    target: str | None, draft: str | None, gemma: bool, warned: bool
) -> None:  # case 25
    def backend(name: str | None) -> Any:
        return None if name is None else SimpleNamespace(name=name)

    speculative = SimpleNamespace(
        attention_backend=backend(draft), use_gemma4_mtp=lambda: gemma, method="mtp"
    )
    given = config(speculative_config=speculative, attention_config__backend=backend(target))
    found = advice.warnings(given)
    assert len(found) == warned
    if warned:
        assert "the draft's attention backend is FLASHINFER" in found[0]
        assert (target or "chosen by vLLM") in found[0]
