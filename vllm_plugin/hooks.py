"""What the plugin tells vLLM at its start: which class to build for Gemma 4's text model."""

from __future__ import annotations

from . import settings

ARCHITECTURE = "Gemma4ForCausalLM"
#: The class keeps vLLM's name, by which other parts of vLLM know it.
MODEL = f"vllm_plugin.model:{ARCHITECTURE}"


def install() -> None:
    """Name our subclass for Gemma 4's text model; the multimodal wrappers build it by that name.

    Naming it again is harmless.  Where vLLM has no such model, or another plugin has put its own in
    place, nothing is changed.
    """
    if not settings.switched_on():
        settings.log.debug(
            "gemma-tune: off; %s=1 in the environment turns it on", settings.SWITCH_VARIABLE
        )
        return
    from vllm import ModelRegistry

    registered = ModelRegistry.models.get(ARCHITECTURE)
    if registered is None:
        raise LookupError(f"this vLLM knows no {ARCHITECTURE}")
    module = getattr(registered, "module_name", "")
    if module == MODEL.partition(":")[0]:
        return
    if module != "vllm.model_executor.models.gemma4":
        raise LookupError(f"{ARCHITECTURE} is already replaced by {module or registered!r}")
    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    from . import config_hook

    try:
        config_hook.install()
    except Exception as error:
        settings.log.warning(
            "gemma-tune: fast prefill and block size are left to vLLM: %s: %s",
            type(error).__name__,
            error,
        )
    settings.log.debug("gemma-tune %s: %s is built by %s", settings.version(), ARCHITECTURE, MODEL)
