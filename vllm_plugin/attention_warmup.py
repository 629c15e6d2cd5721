"""Compile what attention will launch, before a request needs it.

A server's profile run calls no attention, and graph capture only decode: the first prompts of every
size would wait for the compiler.  The cache does not exist yet, so its layout is the one that vLLM
gives (see ``attention_plan``), which is all that Triton's binaries depend on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kernel_templates import attention_decode, attention_prefill
from kernel_templates.attention_problem import Problem

from . import warmup
from .tables import Choices


def register(served: Sequence[tuple[Any, Problem]], choices: Choices) -> None:
    """Have these templates compiled for these kinds of layer when the plugin warms up."""
    for template, shape in served:
        warmup.register(partial(_compile, template, shape, choices))


def _compile(template: Any, shape: Problem, choices: Choices, limits: warmup.Limits) -> int:
    kernel = template.TEMPLATE
    decode = template is attention_decode
    done: set[Any] = set()
    kernels = 0
    most = limits.sequences if decode else limits.tokens
    for count in warmup.token_counts(choices, kernel.name, most):
        queries = 1 if decode else min(count, attention_prefill.QUERIES)
        problem = dataclasses.replace(shape, tokens=count, queries=queries, context=0)
        config = choices.faster(kernel, template.asked(problem))
        # What a launch specialises on does not follow from the number of tokens or sequences.
        if config is not None and config not in done:
            done.add(config)
            inputs = kernel.make_inputs(problem, 0, torch.device("meta"), 0)
            kernels += warmup.compile_kernel(kernel, inputs, config)
    return kernels
