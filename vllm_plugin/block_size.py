"""The KV cache's block size, larger where this GPU's tables measured that as faster.

vLLM's Triton attention takes blocks of 16 tokens unless ``--block-size`` says otherwise.  Tiles of
keys that lie in one block are found by one id and read in one piece.  The price is a coarser prefix
cache: only whole blocks are shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from kernel_templates import attention_decode, attention_prefill
from kernel_templates.attention_problem import BLOCK_SIZE, BLOCK_SIZES, problem_kinds
from kernel_templates.base import DTYPES
from tuned_configs import Entry, TableSet
from tuned_configs.roots import roots

from . import settings
from .attention_plan import TRITON, name_of
from .tables import INTERPRETER

LARGER = max(BLOCK_SIZES)
#: What time must shrink to in prefill, and may grow to in decode: beyond what noise explains.
WINS, LOSES = 0.98, 1.02


def change(vllm_config: Any) -> None:
    """Set it as if ``--block-size`` had, or log why not."""
    reason = reason_against(vllm_config)
    if reason is not None:
        settings.log.debug("gemma-tune: the block size is left to vLLM: %s", reason)
        return
    cache = vllm_config.cache_config
    cache.block_size = LARGER
    # Else vLLM sets it once more when the model's layers have named their backend.
    cache.user_specified_block_size = True
    settings.log.info(
        "gemma-tune: KV cache blocks of %d tokens, measured faster here than vLLM's %d "
        "(--block-size %d restores them)",
        LARGER,
        BLOCK_SIZE,
        BLOCK_SIZE,
    )


def reason_against(config: Any) -> str | None:
    """Why the block size stays vLLM's, or None."""
    cache, model = config.cache_config, config.model_config
    attention = config.attention_config
    reasons = (
        (cache.user_specified_block_size, "--block-size is given"),
        (cache.block_size != BLOCK_SIZE, f"blocks of {cache.block_size} are not vLLM's default"),
        (
            name_of(attention.backend) != TRITON
            or bool(getattr(attention, "backend_per_kind", {})),
            f"the attention backend is not {TRITON} for all layers",
        ),
        (cache.cache_dtype not in ("auto", "bfloat16", "float16"), "the cache has another type"),
        (bool(getattr(cache, "kv_cache_dtype_skip_layers", None)), "the cache has several types"),
        (getattr(cache, "prefix_match_unit", None) is not None, "prefix_match_unit is given"),
        (config.kv_transfer_config is not None, "the KV cache goes to other servers"),
        (config.speculative_config is not None, "speculative decoding is on"),
        (config.lora_config is not None, "LoRA is on"),
        (getattr(model, "quantization", None) is not None, "quantised weights"),
    )
    for holds, reason in reasons:
        if holds:
            return reason
    return measured_against(config)


def measured_against(config: Any) -> str | None:
    """Why this GPU's measured tables do not favour the larger blocks, or None."""
    tables = TableSet.load(roots(), _device(), True, on_reason=settings.log.debug)
    shape = _shape(config)
    for kernel, most in ((attention_prefill.TEMPLATE, WINS), (attention_decode.TEMPLATE, LOSES)):
        ratios: list[float] = []
        small, large = (problem_kinds(shape, [size]) for size in (BLOCK_SIZE, LARGER))
        for one, other in zip(small, large, strict=True):
            times = [
                {_rest(entry): median for entry, median in _entries(tables, kernel, kind)}
                for kind in (one, other)
            ]
            both = times[0].keys() & times[1].keys()
            if not both and kernel is attention_prefill.TEMPLATE:
                return f"{kernel.name}: not measured with both for head dim {one['head_dim']}"
            ratios += [times[1][key] / times[0][key] for key in both]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
        if mean > most:
            return f"{kernel.name}: measured {mean:.2f} of the time, wanted at most {most}"
    return None


def _device() -> str:
    from vllm.platforms import current_platform

    # By the driver's interface: the front end must not start CUDA, or it could not fork workers.
    return current_platform.get_device_name() if current_platform.is_cuda() else INTERPRETER


def _shape(config: Any) -> Any:
    """What ``problem_kinds`` reads of a model, per tensor-parallel rank."""
    text, ranks = config.model_config.hf_text_config, config.parallel_config.tensor_parallel_size
    layers = []
    for index, kind in enumerate(text.layer_types):
        full = kind == "full_attention"
        kv_heads, head_dim = _heads(text, index, full)
        layers.append(
            SimpleNamespace(
                query_heads=text.num_attention_heads // ranks,
                kv_heads=max(1, kv_heads // ranks),
                head_dim=head_dim,
                window=None if full else text.sliding_window,
            )
        )
    names = {dtype: name for name, dtype in DTYPES.items()}
    return SimpleNamespace(layers=layers, dtype=names[config.model_config.dtype])


def _heads(text: Any, index: int, full: bool) -> tuple[int, int]:
    """KV heads and head dim of a layer.

    Newer transformers give them layer by layer, and raise for what differs between layers.
    """
    layers = getattr(text, "per_layer_config", None)
    if layers is not None:
        return layers[index].num_key_value_heads, layers[index].head_dim
    kv_heads = text.num_key_value_heads
    if full and getattr(text, "attention_k_eq_v", False):
        kv_heads = getattr(text, "num_global_key_value_heads", None) or kv_heads
    head_dim = (getattr(text, "global_head_dim", None) if full else None) or text.head_dim
    return kv_heads, head_dim


def _entries(tables: TableSet, kernel: Any, kind: dict[str, Any]) -> Iterator[tuple[Entry, float]]:
    """The measured entries of one kind of layer, of the running kernel, with their times."""
    for loaded in tables.tables:
        if loaded.table.template != kernel.name:
            continue
        for entry in loaded.table.entries:
            plain = entry.problem["softcap"] == 0 and entry.problem["kv_dtype"] == "same"
            same = all(entry.problem[name] == value for name, value in kind.items())
            measured = loaded.table.runs[entry.run].provenance == "measured"
            current = entry.source_hash == kernel.source_hash
            if plain and same and measured and current and entry.time_us is not None:
                yield entry, entry.time_us.median


def _rest(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry.problem[name] for name in ("tokens", "queries", "context"))
