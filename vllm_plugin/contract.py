"""What the plugin relies on in vLLM's source, checked by reading it.

The patched forward passes repeat vLLM's mathematics.  So each is used only where the source of the
function that it stands for is one we have read: :data:`KNOWN` holds hashes of those, comments and
docstrings aside.  The same check runs against unpacked wheels
(``python -m vllm_plugin.contract FOLDER ...``) and, for the installed vLLM, at a server's start.
"""

from __future__ import annotations

import ast
import hashlib
import io
import sys
import textwrap
import tokenize
from collections.abc import Mapping
from pathlib import Path

GEMMA4 = "model_executor/models/gemma4.py"

#: The functions of ``gemma4.py`` whose mathematics each hot path repeats.
RELIES_ON: Mapping[str, tuple[str, ...]] = {
    "layer": ("Gemma4DecoderLayer.forward", "Gemma4Router.forward"),
    "attention": ("Gemma4Attention.forward",),
    "mlp": ("Gemma4MLP.forward",),
    "routing": ("gemma4_routing_function_torch", "gemma4_fused_routing_kernel_triton"),
    "next norm": ("_run_decoder_layers", "Gemma4Model.forward"),
    "second half": ("Gemma4Model.fast_prefill_forward", "Gemma4CrossDecoderLayers.forward"),
}

#: Fingerprints of the functions as we have read them, with the first release that has each.
KNOWN: Mapping[str, Mapping[str, str]] = {
    "Gemma4DecoderLayer.forward": {
        "9650e5d87807": "0.26",
        "cb2afb3ac940": "0.29",  # asserts added
        "dca84ae2143b": "0.31",  # experts in place of moe
    },
    "Gemma4Attention.forward": {
        "39869a31389f": "0.26",
        "5397f778ec44": "0.30",  # KV-shared layers project Q only
    },
    "Gemma4CrossDecoderLayers.forward": {"10b32c2796a5": "0.26"},
    "Gemma4MLP.forward": {"39dc6cbfc2a9": "0.26"},
    "Gemma4Model.fast_prefill_forward": {"c76cf39ce9ce": "0.26"},
    "Gemma4Model.forward": {"731c66a10633": "0.26"},
    "Gemma4Router.forward": {"65008fce1e47": "0.26"},
    "_run_decoder_layers": {"9e1c2be3c6b9": "0.26"},
    "gemma4_fused_routing_kernel_triton": {"b0768b14120f": "0.26"},
    "gemma4_routing_function_torch": {"ffd68d696348": "0.26"},
}

#: Class attributes that the plugin reads: file, class, attributes assigned in its body.
ATTRIBUTES: tuple[tuple[str, str, str], ...] = (
    (
        GEMMA4,
        "Gemma4DecoderLayer",
        "self_attn mlp input_layernorm post_attention_layernorm pre_feedforward_layernorm "
        "post_feedforward_layernorm post_feedforward_layernorm_1 post_feedforward_layernorm_2 "
        "pre_feedforward_layernorm_2 enable_moe_block router per_layer_input_gate "
        "per_layer_projection post_per_layer_input_norm layer_scalar",
    ),
    (
        GEMMA4,
        "Gemma4Attention",
        "num_heads num_kv_heads head_dim q_size kv_size is_sliding is_kv_shared_layer config "
        "qkv_proj o_proj q_norm k_norm v_norm rotary_emb attn",
    ),
    (
        GEMMA4,
        "Gemma4MLP",
        "gate_up_proj act_fn down_proj",
    ),
    (
        GEMMA4,
        "Gemma4Router",
        "hidden_size norm scale root_size proj",
    ),
    (
        GEMMA4,
        "Gemma4Model",
        "start_layer end_layer layers config",
    ),
    (
        GEMMA4,
        "Gemma4ForCausalLM",
        "model",
    ),
    (
        "model_executor/layers/layernorm.py",
        "RMSNorm",
        "weight variance_epsilon variance_size_override has_weight",
    ),
    (
        "model_executor/layers/activation.py",
        "GeluAndMul",
        "approximate",
    ),
    (
        "model_executor/layers/rotary_embedding/base.py",
        "RotaryEmbeddingBase",
        "head_size rotary_dim is_neox_style cos_sin_cache",
    ),
    (
        "model_executor/layers/rotary_embedding/gemma4_rope.py",
        "Gemma4RotaryEmbedding",
        "rope_angles",
    ),
    (
        "model_executor/models/interfaces.py",
        "EagleModelMixin",
        "aux_hidden_state_layers",
    ),
    (
        "config/vllm.py",
        "VllmConfig",
        "additional_config lora_config quant_config cache_config model_config",
    ),
    (
        "forward_context.py",
        "ForwardContext",
        "attn_metadata batch_descriptor cudagraph_runtime_mode skip_compiled ubatch_slices",
    ),
    (
        "forward_context.py",
        "BatchDescriptor",
        "num_tokens num_reqs uniform",
    ),
    (
        "config/vllm.py",
        "VllmConfig",
        "attention_config kv_transfer_config parallel_config speculative_config "
        "try_verify_and_update_config",
    ),
    (
        "config/cache.py",
        "CacheConfig",
        "block_size cache_dtype kv_sharing_fast_prefill prefix_match_unit "
        "user_specified_block_size",
    ),
    (
        "config/attention.py",
        "AttentionConfig",
        "backend backend_per_kind",
    ),
    (
        "config/multimodal.py",
        "MultiModalConfig",
        "language_model_only get_limit_per_prompt",
    ),
    (
        "model_executor/layers/attention/attention.py",
        "Attention",
        "attn_backend kv_sharing_target_layer_name",
    ),
    (
        "v1/engine/input_processor.py",
        "InputProcessor",
        "vllm_config process_inputs",
    ),
    (
        "v1/attention/backend.py",
        "AttentionBackend",
        "get_name",
    ),
    (
        "model_executor/models/registry.py",
        "_LazyRegisteredModel",
        "module_name",
    ),
)


#: Parameters of vLLM's ``unified_attention``, in order, the same in all releases read.
UNIFIED_ATTENTION: tuple[str, ...] = (
    "q",
    "k",
    "v",
    "out",
    "cu_seqlens_q",
    "max_seqlen_q",
    "seqused_k",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "window_size",
    "block_table",
    "softcap",
    "q_descale",
    "k_descale",
    "v_descale",
    "seq_threshold_3D",
    "num_par_softmax_segments",
    "softmax_segm_output",
    "softmax_segm_max",
    "softmax_segm_expsum",
    "alibi_slopes",
    "output_scale",
    "qq_bias",
    "sinks",
    "mm_prefix_range",
    "rswa_prefix_lens",
    "rswa_window",
    "use_alibi_sqrt",
    "kv_quant_mode",
    "k_scale_cache",
    "v_scale_cache",
    "chunk_lookback",
    "use_td",
    "mm_prefix_clamp_sliding_window",
)
UNIFIED_FILE = "v1/attention/ops/triton_unified_attention.py"
UNIFIED_CALLER = "v1/attention/backends/triton_attn.py"

#: Where vLLM keeps what each architecture changes in a config, and ours among them.
CONFIG_MAP_FILE, CONFIG_MAP = "model_executor/models/config.py", "MODELS_CONFIG_MAP"
ARCHITECTURES = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)


def fingerprint(text: str, function: ast.FunctionDef) -> str:
    """Hash of a function's source without comments, docstring and blank lines."""
    lines = text.splitlines()
    skipped: set[int] = set()
    if ast.get_docstring(function) is not None:
        first = function.body[0]
        skipped = set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    kept = [
        "" if number in skipped else lines[number - 1]
        for number in range(function.lineno, (function.end_lineno or 0) + 1)
    ]
    body = textwrap.dedent("\n".join(kept)) + "\n"
    kept = body.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(body).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            kept[row - 1] = kept[row - 1][:column]
    code = "\n".join(line.rstrip() for line in kept if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def fingerprints(text: str) -> dict[str, str]:
    """Fingerprint of every function and method of a module's source, by qualified name."""
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                found[owner + inner.name] = fingerprint(text, inner)
    return found


def unknown(text: str) -> dict[str, str]:
    """The hot paths whose functions in this ``gemma4.py`` we have not read, with the reason."""
    found = fingerprints(text)
    reasons: dict[str, str] = {}
    for path, names in RELIES_ON.items():
        for name in names:
            if name not in found:
                reasons[path] = f"this vLLM has no {name}"
            elif found[name] not in KNOWN.get(name, {}):
                reasons[path] = f"{name} of this vLLM differs from those known"
    return reasons


def assigned(text: str, owner: str) -> set[str]:
    """Names that a class assigns, annotates, defines or registers as a buffer or parameter."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef) or node.name != owner:
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                found.add(inner.attr)
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                found.add(inner.target.id)
            elif isinstance(inner, ast.FunctionDef):
                found.add(inner.name)
            elif (
                isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Attribute)
                and inner.func.attr.startswith("register_")
                and inner.args
                and isinstance(inner.args[0], ast.Constant)
            ):
                found.add(str(inner.args[0].value))
    return found


def faults(folder: Path) -> list[str]:
    """What the plugin relies on and this unpacked ``vllm`` lacks; empty when all is there."""
    text = (folder / GEMMA4).read_text(encoding="utf-8")
    lines = [f"{path}: {reason}" for path, reason in unknown(text).items()]
    for file, owner, names in ATTRIBUTES:
        path = folder / file
        if not path.is_file():
            lines.append(f"{file} is missing")
            continue
        missing = sorted(set(names.split()) - assigned(path.read_text(encoding="utf-8"), owner))
        lines += [f"{file}: {owner} has no {name}" for name in missing]
    return lines + attention_faults(folder) + config_map_faults(folder)


def attention_faults(folder: Path) -> list[str]:
    """Where vLLM's attention function, or its call, is not as the wrapper expects."""
    lines: list[str] = []
    for file in (UNIFIED_FILE, UNIFIED_CALLER):
        if not (folder / file).is_file():
            lines.append(f"{file} is missing")
    if lines:
        return lines
    definition = ast.parse((folder / UNIFIED_FILE).read_text(encoding="utf-8"))
    found = [
        tuple(argument.arg for argument in node.args.args)
        for node in definition.body
        if isinstance(node, ast.FunctionDef) and node.name == "unified_attention"
    ]
    if found != [UNIFIED_ATTENTION]:
        lines.append(f"{UNIFIED_FILE}: unified_attention has other parameters than known")
    calls = [
        node
        for node in ast.walk(ast.parse((folder / UNIFIED_CALLER).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "unified_attention"
    ]
    if len(calls) != 1 or calls[0].args or any(each.arg is None for each in calls[0].keywords):
        lines.append(f"{UNIFIED_CALLER}: unified_attention is not called once, by names")
    return lines


def config_map_faults(folder: Path) -> list[str]:
    """The architectures that vLLM's map of config changes lacks."""
    path = folder / CONFIG_MAP_FILE
    if not path.is_file():
        return [f"{CONFIG_MAP_FILE} is missing"]
    keys: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = getattr(node, "value", None)
        target = getattr(node, "target", None)
        if isinstance(value, ast.Dict) and getattr(target, "id", "") == CONFIG_MAP:
            keys |= {str(each.value) for each in value.keys if isinstance(each, ast.Constant)}
    return [
        f"{CONFIG_MAP_FILE}: {CONFIG_MAP} has no {name}"
        for name in ARCHITECTURES
        if name not in keys
    ]


def main(folders: list[str]) -> int:
    """Print the faults of each folder, and the fingerprints of functions that are not known."""
    bad = 0
    for folder in folders:
        found = faults(Path(folder))
        bad += bool(found)
        print(f"{folder}: {'all present' if not found else ''}")
        for line in found:
            print(f"  {line}")
        current = fingerprints((Path(folder) / GEMMA4).read_text(encoding="utf-8"))
        for name in sorted({name for names in RELIES_ON.values() for name in names}):
            if name in current and current[name] not in KNOWN.get(name, {}):
                print(f"  {name}: {current[name]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
