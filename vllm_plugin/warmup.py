"""Compile every config that the tables select, before a request or a CUDA graph needs it.

vLLM's own warm-up runs the largest batch and the captured sizes; other prefill sizes select other
configs.  Here each operator is called as the layers call it, with their own weights and with
activations that have no memory (``meta``), for every token count that has a config of its own, and
in place of a launch Triton compiles.  That fills the cache from which launches are served: Triton
specialises on dtypes, on integers being 1 or divisible by 16 and on pointers being aligned to 16
bytes, all of which are as in a server, since row strides are the widths and an operand's first
element is where the server's is.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import layers, ops, settings
from .tables import Choices


@dataclass(frozen=True)
class Limits:
    """The most tokens and sequences of a step."""

    tokens: int
    sequences: int


#: Returns the kernels that it asked for, None where they are counted as operators.
Work = Callable[[Limits], int | None]
_registered: list[Work] = []


def register(work: Work) -> None:
    """Have ``work(limits)`` called once before serving; it compiles what it will launch."""
    if work not in _registered:
        _registered.append(work)


@dataclass
class Done:
    """What a warm-up did: kernels asked for (many are compiled already), and seconds."""

    kernels: int = 0
    seconds: float = 0.0


def compile_kernel(kernel: Any, inputs: Any, config: Any) -> int:
    """Compile a template's launches for inputs and load the binaries; how many."""
    calls = kernel.calls(inputs, config)
    for call in calls:
        compiled = call.warmup()
        # Loading is left to the first launch otherwise, which may be inside a capture.
        load = getattr(compiled, "_init_handles", None)
        if load is not None and torch.cuda.is_available():
            load()
    return len(calls)


def run(model: Any, choices: Choices, vllm_config: Any) -> Done:
    """Compile for a ``Gemma4Model`` with plans; a kernel that fails is one WARNING, not the end."""
    done = Done()
    if os.environ.get("TRITON_INTERPRET") == "1":
        return done  # interpreted kernels are never compiled
    scheduler = vllm_config.scheduler_config
    limits = Limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    start = time.monotonic()
    with _compiling(choices, done):
        for work in [*operators(model, choices, limits), *_registered]:
            try:
                # Operators count while they are at work, so the sum is read afterwards.
                made = work(limits) or 0
                done.kernels += made
            except Exception as error:
                settings.warn_once(
                    f"warm-up {error}",
                    "gemma-tune: a kernel is not compiled ahead (%s: %s)",
                    type(error).__name__,
                    error,
                )
    done.seconds = time.monotonic() - start
    return done


@contextlib.contextmanager
def _compiling(choices: Choices, done: Done) -> Iterator[None]:
    """Operators compile instead of launching."""
    launch = ops.run

    def compile_instead(kernel: Any, problem: Any, inputs: Any) -> None:
        done.kernels += compile_kernel(kernel, inputs, choices.config(kernel, problem))

    ops.run = compile_instead
    try:
        yield
    finally:
        ops.run = launch


def token_counts(choices: Choices, template: str, most: int) -> list[int]:
    """Counts that together select every config which a step of up to ``most`` tokens can take.

    Look-up answers with the entry of a tuned count or, far outside of them, with the default,
    which may depend on the count: powers of two stand for those.
    """
    tuned = choices.tuned_counts(template)
    counts = {1 << shift for shift in range(most.bit_length())} | {most}
    counts |= {count for count in tuned if count <= most}
    # The largest batch may round up.
    counts |= set(sorted(count for count in tuned if count > most)[:1])
    return sorted(counts)


def operators(model: Any, choices: Choices, limits: Limits) -> Iterator[Work]:
    """One piece of work for each operator, kind of module and token count, without repeats."""
    seen: set[Any] = set()

    def fresh(*key: Any) -> bool:
        new = key not in seen
        seen.add(key)
        return new

    def each(template: str, key: Any, call: Callable[[int], Any]) -> Iterator[Work]:
        if fresh(template, key):
            for count in token_counts(choices, template, limits.tokens):
                yield partial(_ignoring, call, count)

    for layer in list(model.layers)[model.start_layer : model.end_layer]:
        plan = layer.__dict__.get(layers.PLAN)
        if plan is not None:
            for key, template, call in layer_calls(layer, plan):
                yield from each(template, key, call)
        attention = getattr(layer, "self_attn", None)
        if attention is not None and (own := attention.__dict__.get(layers.PLAN)) is not None:
            yield from each("qkv_norm_rope", *attention_call(attention, own))
        mlp = getattr(layer, "mlp", None)
        if mlp is not None and layers.PLAN in mlp.__dict__:
            width, dtype = mlp.down_proj.input_size_per_partition, _dtype(layer)
            yield from each("gelu_mul", (width, dtype), partial(_gelu, width, dtype))
    for kind in layers.routed():
        yield from each("moe_routing", kind, partial(_route, *kind))


def _ignoring(call: Callable[[int], Any], count: int, _limits: Limits) -> None:
    call(count)


def _route(experts: int, top_k: int, dtype: torch.dtype, count: int) -> Any:
    scale = torch.empty(experts, dtype=dtype, device="meta")
    return ops._moe_routing(_rows(count, experts, torch.float32), scale, top_k)


def _gelu(width: int, dtype: torch.dtype, count: int) -> Any:
    return ops._gelu_mul_halves(_rows(count, 2 * width, dtype))


def layer_calls(layer: Any, plan: Any) -> Iterable[tuple[Any, str, Callable[[int], Any]]]:
    """The operators that ``layers.layer_forward`` calls, with a key of what they depend on."""
    hidden, dtype = layer.hidden_size, _dtype(layer)
    weight = layer.post_attention_layernorm.weight
    ple = layer.per_layer_input_gate is not None

    def fused(branches: int, scalar: bool, norms: int, router: bool) -> tuple[Any, str, Any]:
        def call(count: int) -> Any:
            stream = _rows(count, hidden, dtype)
            second = branches == 2
            return ops._residual_norm(
                stream,
                weight,
                stream,
                stream if second else None,
                weight if second else None,
                weight if second else None,
                layer.layer_scalar if scalar else None,
                # The router's scale stands last and has the weights' dtype: see ``plan``.
                [weight] * norms,
                router,
                plan.root,
                plan.eps,
            )

        return (hidden, dtype, branches, scalar, norms, router), "residual_norm", call

    following = 0 if plan.next_norm is None else 1
    branches = 2 if plan.experts else 1
    yield fused(1, False, 3 if plan.experts else 1, bool(plan.experts))
    if ple:
        yield fused(branches, False, 0, False)
    last = 1 if ple else branches
    yield fused(last, True, following, False)
    # A drafter that asks for hidden states takes the following norm away again.
    yield fused(last, True, 0, False)
    if ple and plan.ple_stride:
        width, stride = layer.hidden_size_per_layer_input, plan.ple_stride

        def gate(count: int) -> Any:
            up = _rows(count, stride, dtype)[:, :width]
            return ops._gelu_mul(_rows(count, width, dtype), up, stride)

        yield (width, stride, dtype), "gelu_mul", gate


def attention_call(attn: Any, plan: Any) -> tuple[Any, Callable[[int], Any]]:
    """The operator that ``layers.attention_forward`` calls, with a key of what it depends on."""
    projection = attn.q_proj if plan.q_only else attn.qkv_proj
    columns = int(projection.output_size_per_partition)
    cache, weight = attn.rotary_emb.cos_sin_cache, attn.q_norm.weight
    k_weight = None if plan.kv == "shared" else attn.k_norm.weight

    def call(count: int) -> Any:
        return ops._qkv_norm_rope(
            _rows(count, columns, weight.dtype),
            torch.empty(count, dtype=torch.int64, device="meta"),
            cache,
            weight,
            k_weight,
            attn.num_heads,
            attn.num_kv_heads,
            plan.kv,
            plan.rotary_pairs,
            plan.eps,
        )

    key = (columns, attn.num_heads, attn.num_kv_heads, plan.kv, plan.rotary_pairs, cache.dtype,
           cache.stride(0), weight.dtype)  # fmt: skip
    return key, call


def _dtype(layer: Any) -> torch.dtype:
    return layer.input_layernorm.weight.dtype  # type: ignore[no-any-return]


def _rows(count: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((count, columns), dtype=dtype, device="meta")
