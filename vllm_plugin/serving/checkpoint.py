"""Model folders without a download: a config, and weights drawn by a seed when vLLM loads it.

vLLM's ``load_format="dummy"`` fills every weight with values of 1e-3: norms vanish and all logits
are alike.  Weights drawn here keep activations at the size of a trained model's, so that kernels
see real numbers and an error shows.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

#: Elements drawn at once: a table of per-layer embeddings has 2.3 billion.
MOST_DRAWN = 2**28

#: What vLLM's configs want beside the shapes.
_USUAL: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def write_folder(
    config: Mapping[str, Any], folder: Path, layers: int | None = None, dtype: str = "bfloat16"
) -> Path:
    """A folder whose ``config.json`` is the text model of ``config``, cut to its first ``layers``.

    KV-shared layers are the last ones of the whole model; a cut model keeps their share of layers,
    at least one where there are any, and at least one of its own before them of each kind.
    ValueError when ``layers`` is not between 1 and the model's own.
    """
    text = dict(config.get("text_config") or config)
    text = {**_USUAL, **{name: value for name, value in text.items() if not name.startswith("_")}}
    text.update(architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", torch_dtype=dtype)
    text.pop("dtype", None)
    whole = int(text["num_hidden_layers"])
    if layers is not None and layers != whole:
        text.update(cut(text, layers))
    text.setdefault("vocab_size_per_layer_input", text["vocab_size"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(text, indent=1), encoding="utf-8")
    return folder


def cut(text: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of a text config that change when only the first ``layers`` are kept."""
    whole = int(text["num_hidden_layers"])
    if not 1 <= layers <= whole:
        raise ValueError(f"layers is {layers}, wanted 1 to {whole}")
    types = list(text["layer_types"])[:layers]
    shared = int(text.get("num_kv_shared_layers") or 0)
    shared = min(layers - 1, max(1, shared * layers // whole)) if shared else 0
    # A shared layer reads the cache of the last layer of its kind before the shared ones.
    while shared and not set(types[layers - shared :]) <= set(types[: layers - shared]):
        shared -= 1
    return {"num_hidden_layers": layers, "layer_types": types, "num_kv_shared_layers": shared}


def seed_weights(seed: int = 0) -> None:
    """From now on vLLM's dummy loader of this process draws weights from ``seed``.

    Equal for equal names and shapes, whatever the order of modules or the plugin changes.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self: Any, model: torch.nn.Module, *_: Any, **__: Any) -> None:
        draw(model, seed)

    DummyModelLoader.load_weights = load_weights


def draw(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter in place; buffers (scales, tables of cosines) keep what they hold.

    Matrices N(0, 1 / fan in), embeddings N(0, 0.02), norms and scales N(1, 0.1), the norms of Q and
    K so that scores have a deviation of 1.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.device.type == "meta":
                continue
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(zlib.crc32(name.encode()) + seed)
            mean, deviation = moments(name, tuple(parameter.shape))
            # Values of bfloat16 whatever the parameter's type: a float32 model has equal weights.
            for part in parameter.data.split(
                max(1, MOST_DRAWN * len(parameter) // parameter.numel())
            ):
                drawn = torch.empty_like(part, dtype=torch.bfloat16)
                part.copy_(drawn.normal_(mean, deviation, generator=generator))
        tie_values(model)


def tie_values(model: torch.nn.Module) -> None:
    """Give layers whose values are their keys (26B, full attention) equal rows for both, as vLLM
    does when it loads a checkpoint, which has the keys' alone."""
    for module in model.modules():
        config, projection = getattr(module, "config", None), getattr(module, "qkv_proj", None)
        if projection is None or getattr(module, "is_sliding", True):
            continue
        if getattr(config, "attention_k_eq_v", False):
            rows, keys = (
                projection.weight.data,
                slice(module.q_size, module.q_size + module.kv_size),
            )
            rows[keys.stop :].copy_(rows[keys])


def moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a weight, by its name and shape."""
    if "embed_tokens" in name:
        return 0.0, 0.02
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # Gemma 4 scales scores by 1: with weights of 1 each query would attend to a single key, and
        # the smallest rounding would choose another one.
        return shape[0] ** -0.25, 0.1 * shape[0] ** -0.25
    if len(shape) < 2:
        return 1.0, 0.1
    return 0.0, float(shape[-1]) ** -0.5
