"""The vLLM plugin: tuned Gemma 4 kernels in a live server.

vLLM calls :func:`register` in the API server, the engine core and every worker.  It only names a
model class by text; everything else happens when that class is imported in a worker.  Whatever goes
wrong here or later, vLLM runs stock and one WARNING says why.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of ``vllm.general_plugins``; idempotent, never raises."""
    try:
        from .hooks import install

        install()
    except Exception as error:
        import logging

        # vLLM 0.32's front end sets its log up after the plugins: then this line shows bare.
        logging.getLogger("vllm.gemma_tune").warning(
            "gemma-tune: inactive, vLLM runs stock: %s: %s", type(error).__name__, error
        )
