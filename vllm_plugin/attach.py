"""Give the modules of a freshly built Gemma 4 their plans, or say why not.

Runs in the worker, after the modules exist and before weights are loaded or anything is traced.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch

from . import contract, ranks, settings
from .report import Report
from .tables import Choices, Decision, Unavailable

#: Key of ``VllmConfig.additional_config``, part of the key of vLLM's compile cache.
DIGEST = "gemma_tune"


def attach(model: Any, vllm_config: Any) -> Report:
    """Plan what the tables serve; on any fault every module is left as vLLM made it."""
    report = Report(model, vllm_config)
    asked = False
    try:
        try:
            digest = _attach(model, vllm_config, report)
        except Unavailable as error:
            digest = "refused"
            report.refuse(str(error))
            _undo(model, vllm_config)
        asked = True
        if reason := ranks.disagreement(digest, vllm_config):
            report.refuse(reason)
            _undo(model, vllm_config)
            settings.log.warning("gemma-tune: inactive on this rank, vLLM runs stock: %s", reason)
        report.log()
    except Exception:
        _undo(model, vllm_config)
        if not asked:  # the others wait for this rank, and must not go on without it
            ranks.disagreement(None, vllm_config)
        raise
    return report


def _undo(model: Any, vllm_config: Any) -> None:
    detach(model)
    _publish(vllm_config, None)


def _attach(model: Any, vllm_config: Any, report: Report) -> str:
    """Plan, compile and publish; returns the digest of what is active."""
    from . import moe_folder

    report.note(moe_folder.use(vllm_config))
    refuse_config(vllm_config)
    choices = Choices.load()
    choices.model = str(vllm_config.model_config.model)
    report.device = choices.device.name
    for fault in choices.faults:
        settings.log.warning("gemma-tune: %s", fault)
    from vllm.model_executor.models import gemma4

    from . import attention_plan, layers, ops, plan, warmup

    unknown = contract.unknown(Path(inspect.getfile(gemma4)).read_text(encoding="utf-8"))
    ops.use(choices)
    planner = plan.Planner(choices, report, vllm_config, unknown)
    planner.plan(model.model)
    attention_plan.plan(planner.attention, vllm_config, choices, report)
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        _second_half(model.model, vllm_config, report, unknown.get("second half"))
    layers.patch()
    if not report.any_active():
        return "inactive"

    def publish() -> None:
        _publish(vllm_config, choices.digest(planner.active()))

    planner.watch_auxiliary(model.model, publish)
    publish()
    done = warmup.run(model.model, choices, vllm_config)
    if done.kernels:
        report.note(f"{done.kernels} launches compiled ahead in {done.seconds:.1f} s")
    return choices.digest(planner.active())


def _second_half(model: Any, vllm_config: Any, report: Report, reason: str | None) -> None:
    from . import second_half

    reason = reason or second_half.reason_against(model, vllm_config)
    if reason is None:
        second_half.serve(model)
    report.add(
        Decision(
            "fast prefill",
            "second half",
            reason is None,
            reason or "replayed from vLLM's CUDA graphs",
        )
    )


def detach(model: Any) -> None:
    """Take every plan away again."""
    second_half = sys.modules.get("vllm_plugin.second_half")
    if second_half is not None:
        second_half.leave(model.model)
    for module in model.modules():
        module.__dict__.pop("_gemma_tune", None)
    layers = sys.modules.get("vllm_plugin.layers")
    if layers is not None:
        layers.unroute()
    attention = sys.modules.get("vllm_plugin.attention")
    if attention is not None:
        attention.remove()


def refuse_config(config: Any) -> None:
    """Raise Unavailable for a server that the plugin leaves alone as a whole."""
    from vllm import envs

    passes = getattr(getattr(config, "compilation_config", None), "pass_config", None)
    precision = getattr(config.model_config, "dtype", None)
    reasons = (
        (config.quant_config is not None, "quantised weights: vLLM fuses norms with quantisation"),
        (config.lora_config is not None, "LoRA is on"),
        (bool(getattr(passes, "enable_sp", False)), "sequence parallelism rewrites the norms"),
        (bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)), "batch invariance is asked for"),
        (
            precision not in (torch.bfloat16, torch.float16, torch.float32),
            f"dtype {precision} has no kernels",
        ),
        (
            not isinstance(config.additional_config, dict),
            "additional_config is no dict, so that the compile cache cannot be told apart",
        ),
    )
    for holds, reason in reasons:
        if holds:
            raise Unavailable(reason)


def _publish(config: Any, digest: str | None) -> None:
    """Make the digest part of the compile cache's key, for both of vLLM's caches.

    A cached graph of stock vLLM is else loaded although our layers are in place, and the reverse.
    """
    from vllm.config import get_current_vllm_config_or_none

    for each in (config, get_current_vllm_config_or_none()):
        if each is None or not isinstance(each.additional_config, dict):
            continue
        others = {key: value for key, value in each.additional_config.items() if key != DIGEST}
        each.additional_config = others if digest is None else {**others, DIGEST: digest}
