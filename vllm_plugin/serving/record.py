"""What every decoder layer returns, and the logits, of prompts and of decode steps that are told
which token comes next.

Runs in an engine's process, on an eager model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def record(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer ``prompts`` with the tokens ``forced``, the same for each, and save what was seen.

    The file ``save`` gets ``{"layer 0": [per step: [tokens of the step, hidden]], ...,
    "logits": [per step: [prompts, vocabulary]]}`` in float32: the first step is the prompts', in
    one batch, each further one a decode step.
    """
    from vllm import SamplingParams

    prompts, forced = request["prompts"], request["forced"]
    seen: dict[str, list[torch.Tensor]] = {}

    def run(model: Any) -> int:
        with _watched(model, forced, seen):
            sampling = SamplingParams(
                temperature=0.0, max_tokens=len(forced), ignore_eos=True, detokenize=False
            )
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
            )
        for output in outputs:
            found = list(output.outputs[0].token_ids)
            if found != forced:
                raise RuntimeError(f"the tokens were {found}, wanted {forced}")
        return len(model.model.layers)

    layers = run(_model_of(llm))
    torch.save(seen, request["save"])
    return {"layers": layers, "steps": len(seen.get("logits", []))}


def _model_of(llm: Any) -> Any:
    """The model object of an engine in this process."""
    found: list[Any] = []
    llm.apply_model(found.append)
    return found[0]


@contextmanager
def _watched(model: Any, forced: list[int], seen: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Keep what layers return, and let the logits of step n want token ``forced[n]``."""
    handles = []

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            seen.setdefault(name, []).append(hidden.detach().float().cpu().clone())

        return hook

    for index, layer in enumerate(model.model.layers):
        handles.append(layer.register_forward_hook(keep(f"layer {index}")))
    stock = model.compute_logits

    def compute_logits(hidden: torch.Tensor, *args: Any, **kw: Any) -> torch.Tensor:
        logits = stock(hidden, *args, **kw)
        steps = seen.setdefault("logits", [])
        wanted = forced[min(len(steps), len(forced) - 1)]
        steps.append(logits.detach().float().cpu().clone())
        told = torch.full_like(logits, -1.0)
        told[:, wanted] = 1.0
        return told

    model.compute_logits = compute_logits
    try:
        yield
    finally:
        del model.compute_logits
        for handle in handles:
            handle.remove()
