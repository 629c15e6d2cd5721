"""Seeded tiny Gemma 4 checkpoints, tables for the interpreter, and a run in real vLLM.

Run as a script, it answers a few prompts and prints one line of JSON: this module is both the
helper of ``test_vllm.py`` and the program that its tests start, each time in a fresh process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
PROMPTS = [[3, 17, 200, 41, 7], [5, 9, 11], list(range(20, 60))]
MARK = "RESULT "

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2},
    "moe": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
}


def config(kind: str) -> dict[str, Any]:
    """The ``config.json`` of a tiny model."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "global_head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 32,
        "max_position_embeddings": 256,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_double_wide_mlp": kind == "dense",
        **KINDS[kind],
    }


def weights(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Seeded weights by checkpoint name: matrices N(0, 1 / fan_in), norms N(1, 0.1)."""
    draw = torch.Generator().manual_seed(7)
    hidden, heads, width = values["hidden_size"], values["num_attention_heads"], 0
    ple, layers = values["hidden_size_per_layer_input"], values["num_hidden_layers"]
    found: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int, scale: float = 1.0) -> None:
        found[name] = torch.randn(shape, generator=draw) * scale * shape[-1] ** -0.5

    def norm(name: str, size: int) -> None:
        found[name] = 1.0 + 0.1 * torch.randn(size, generator=draw)

    found["model.embed_tokens.weight"] = torch.randn(VOCABULARY, hidden, generator=draw) * 0.1
    norm("model.norm.weight", hidden)
    if ple:
        table = torch.randn(VOCABULARY, layers * ple, generator=draw) * 0.1
        found["model.embed_tokens_per_layer.weight"] = table
        matrix("model.per_layer_model_projection.weight", layers * ple, hidden)
        norm("model.per_layer_projection_norm.weight", ple)
    for index in range(layers):
        at = f"model.layers.{index}."
        full = values["layer_types"][index] == "full_attention"
        shared = index >= layers - values.get("num_kv_shared_layers", 0)
        width = values["global_head_dim"] if full else values["head_dim"]
        k_eq_v = full and values.get("attention_k_eq_v", False)
        kv = values["num_global_key_value_heads"] if k_eq_v else values["num_key_value_heads"]
        matrix(f"{at}self_attn.q_proj.weight", heads * width, hidden)
        matrix(f"{at}self_attn.o_proj.weight", hidden, heads * width)
        norm(f"{at}self_attn.q_norm.weight", width)
        # Also in KV-shared layers, as in Google's checkpoints: older vLLM wants them there.
        matrix(f"{at}self_attn.k_proj.weight", kv * width, hidden)
        norm(f"{at}self_attn.k_norm.weight", width)
        if not k_eq_v:
            matrix(f"{at}self_attn.v_proj.weight", kv * width, hidden)
        inner = values["intermediate_size"] * (1 + (values["use_double_wide_mlp"] and shared))
        matrix(f"{at}mlp.gate_proj.weight", inner, hidden)
        matrix(f"{at}mlp.up_proj.weight", inner, hidden)
        matrix(f"{at}mlp.down_proj.weight", hidden, inner)
        names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        suffixes = [f"{name}_layernorm" for name in names]
        if values.get("num_experts"):
            experts, inner = values["num_experts"], values["moe_intermediate_size"]
            suffixes += [f"post_feedforward_layernorm_{n}" for n in (1, 2)]
            suffixes += ["pre_feedforward_layernorm_2"]
            matrix(f"{at}router.proj.weight", experts, hidden)
            norm(f"{at}router.scale", hidden)
            norm(f"{at}router.per_expert_scale", experts)
            matrix(f"{at}experts.gate_up_proj", experts, 2 * inner, hidden)
            matrix(f"{at}experts.down_proj", experts, hidden, inner)
        if ple:
            matrix(f"{at}per_layer_input_gate.weight", ple, hidden)
            matrix(f"{at}per_layer_projection.weight", hidden, ple)
            suffixes += ["post_per_layer_input_norm"]
        for suffix in suffixes:
            norm(f"{at}{suffix}.weight", hidden)
        found[f"{at}layer_scalar"] = torch.tensor([0.7 + 0.1 * index])
    return found


def write_config(folder: Path, kind: str) -> Path:
    """A folder with a model's ``config.json``, all that the tuner reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(kind)))
    return folder


def write_model(folder: Path, kind: str) -> Path:
    """A checkpoint that vLLM loads."""
    from safetensors.torch import save_file

    write_config(folder, kind)
    values = weights(config(kind))
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def record(model: Any) -> None:
    """Keep what every decoder layer and the final norm return (eager mode, this process)."""
    STATES.clear()

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            STATES.setdefault(name, []).append(value.detach().clone())

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"layer {index}"))
    model.model.norm.register_forward_hook(keep("norm"))


STATES: dict[str, list[torch.Tensor]] = {}


def answer(model: Path, eager: bool, save: Path | None, extra: dict[str, Any]) -> dict[str, Any]:
    """Tokens and log-probabilities of the answers, and what the worker has in place.

    With prefix caching the prompts are asked twice, and the second answers count.
    """
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "enforce_eager": eager,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": False,
    }
    llm = LLM(model=str(model), **{**options, **extra})
    if save is not None:
        llm.apply_model(record)
    sampling = SamplingParams(temperature=0.0, max_tokens=6, logprobs=5, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    if extra.get("enable_prefix_caching"):
        llm.generate(asked, sampling)
    outputs = llm.generate(asked, sampling)
    result: dict[str, Any] = {
        "cached": [each.num_cached_tokens for each in outputs],
        "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        "logprobs": [
            [sorted((str(token), value.logprob) for token, value in step.items()) for step in steps]
            for steps in (each.outputs[0].logprobs for each in outputs)
        ],
    }
    if save is not None:
        torch.save(STATES, save)
    if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == "1":
        # Under the module's name, by which a worker process can import it.
        result |= llm.apply_model(importlib.import_module("vllm_tiny").inspect)[0]
    from vllm import ModelRegistry

    result["front_end"] = ModelRegistry.models["Gemma4ForCausalLM"].module_name
    result["digest"] = llm.llm_engine.vllm_config.additional_config.get("gemma_tune")
    return result


def inspect(model: Any) -> dict[str, Any]:
    """What the plugin has in place in the worker and which of its kernels have run."""
    plans: dict[str, int] = {}
    for module in model.modules():
        if "_gemma_tune" in module.__dict__:
            name = type(module).__name__
            plans[name] = plans.get(name, 0) + 1
    ops = sys.modules.get("vllm_plugin.ops")
    used = {} if ops is None or ops._choices is None else ops._choices._configs
    linked = _linked(model)
    model.model._set_aux_hidden_state_layers((1,))
    return {
        "plans": plans,
        "linked": linked,
        "linked_for_a_drafter": _linked(model),
        "used": sorted({name for (name, _), config in used.items() if config is not None}),
        "broken": sorted(ops._broken) if ops else [],
        "patched": "vllm_plugin.layers" in sys.modules,
        "attention": attention_calls(),
        "fast_prefill": bool(getattr(model.model, "fast_prefill_enabled", False)),
        "loaded": "vllm_plugin" in sys.modules,
    }


def attention_calls() -> dict[str, Any] | None:
    """What passed through our wrapper of vLLM's attention function; None if it is not there."""
    module = sys.modules.get("vllm.v1.attention.backends.triton_attn")
    wrapper = getattr(module, "unified_attention", None)
    if not hasattr(wrapper, "kinds"):
        return None
    kinds = [kind for kind in wrapper.kinds.values() if kind is not None]
    return {
        "served": wrapper.served,
        "delegated": wrapper.delegated,
        "kinds": sorted(kind.topic for kind in kinds if kind.active),
    }


def _linked(model: Any) -> int:
    plans = (module.__dict__.get("_gemma_tune") for module in model.modules())
    return sum(getattr(plan, "next_norm", None) is not None for plan in plans)


def believe_in_triton() -> None:
    """Let vLLM on a CPU run its Triton attention, interpreted; before it is imported.

    It takes Triton for usable where a backend is active, and on a CPU asks for one named "cpu".
    """
    from types import SimpleNamespace

    from triton.backends import backends

    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is imported already and has made up its mind about Triton")
    fake: Any = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    backends.setdefault("cpu", fake)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum.TRITON_ATTN.get_path()
    CpuPlatform.get_attn_backend_cls = classmethod(lambda *_, **__: path)
    # Its cache update asks without looking at the platform.
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--save", type=Path, help="file for the hidden states of every layer")
    parser.add_argument("--extra", type=json.loads, default={})
    parser.add_argument(
        "--triton", action="store_true", help="vLLM's Triton attention, interpreted"
    )
    parser.add_argument("--break", dest="broken", default="", help="module:attribute that raises")
    arguments = parser.parse_args()
    if arguments.triton:
        believe_in_triton()
    if arguments.broken:
        make_raise(arguments.broken)
    result = answer(arguments.model, arguments.eager, arguments.save, arguments.extra)
    print(MARK + json.dumps(result))
    sys.stdout.flush()


def make_raise(where: str) -> None:
    """Replace a function of ours by one that raises."""
    module, _, path = where.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)

    def raises(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"broken on purpose: {where}")

    setattr(owner, name, raises)


if __name__ == "__main__":
    main()
