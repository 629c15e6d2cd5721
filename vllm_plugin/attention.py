"""Gemma 4's decoder attention: our kernels in place of vLLM's ``unified_attention``.

vLLM's Triton backend calls one function for prefill, mixed batches and decode.  :func:`install`
puts a :class:`Wrapper` in its place, in that backend's module alone: it serves what the tables
hold and hands every other call on, unchanged.

What a call runs depends only on what a CUDA graph fixes, or pads to the same: heads, window, block
size, types, the number of tokens and sequences, the most queries of a sequence.  Lengths are data:
while vLLM captures a graph they are made up.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from kernel_templates import attention_decode, attention_prefill
from kernel_templates.attention_decode import DecodeInputs, rows_per_program, scratch_sizes
from kernel_templates.attention_limits import fitting
from kernel_templates.attention_problem import KV_DTYPES, AttentionInputs, Problem
from kernel_templates.launcher import Launcher

from . import ops, settings
from .contract import UNIFIED_ATTENTION
from .tables import Choices

MODULE = "vllm.v1.attention.backends.triton_attn"
NAME = "unified_attention"

#: A sequence of more queries is a prompt's: vLLM itself splits the keys of up to so many (0.33).
MOST_QUERIES = 8

#: The most queries of a sequence, rounded up: each value is a binary of its own.
ROUNDED_QUERIES = (1, 1, 2, 4, 4, 8, 8, 8, 8)

#: Float32 elements of scratch that a launch may take, 128 MiB: vLLM measures the memory that is
#: left for the cache before any attention has run.
MOST_SCRATCH = 2**25

#: Arguments that must have these values to be served.  What none of them names is an operand, is
#: vLLM's own scratch, or does not matter without another that is here (the clamp of
#: ``mm_prefix_range``, ``use_alibi_sqrt``, ``rswa_window``).  ``k_scale_cache``, ``v_scale_cache``
#: come with scales per token and head; ``q_descale`` with queries of one byte.
PLAIN: tuple[tuple[str, Any], ...] = (
    ("alibi_slopes", None),
    ("sinks", None),
    ("mm_prefix_range", None),
    ("output_scale", None),
    ("qq_bias", None),
    ("rswa_prefix_lens", None),
    ("q_descale", None),
    ("k_scale_cache", None),
    ("v_scale_cache", None),
)

#: Stands in the wrapper's memory for a kind of call that it has not met.
UNSEEN: Any = object()

_KV_NAMES = {dtype: name for name, dtype in KV_DTYPES.items()}


_launcher = Launcher()


class Kind:
    """One kind of layer in one phase: its configs by token count, or why vLLM serves it.

    ``shape`` is a problem of the kind; its counts do not matter.  ``queries`` is the most of a
    sequence in decode, 0 in prefill.  Decode of several queries is a kind of its own: it takes
    more of the GPU, and a failure there must not take decode of one query with it.
    """

    def __init__(
        self, kernel: Any, asked: Any, shape: Problem, choices: Choices, queries: int = 0
    ) -> None:
        self.kernel, self.shape = kernel, shape
        self.queries, self.decode = queries, queries > 0
        self.topic = f"{kernel.name} {kernel.describe(asked(shape))}"
        self.topic += f", up to {queries} queries" if queries > 1 else ""
        self._asked, self._choices = asked, choices
        self._configs: dict[int, Any] = {}
        decision = choices.decide(kernel.name, asked(shape))
        self.active, self.reason = decision.active, decision.reason

    def config(self, count: int) -> Any:
        """The config for so many tokens (decode: sequences), None where stock is faster."""
        count = rounded(count)
        if count not in self._configs:
            queries = 1 if self.decode else attention_prefill.QUERIES
            problem = dataclasses.replace(self.shape, tokens=count, queries=queries)
            config = self._choices.faster(self.kernel, self._asked(problem))
            if config is not None and self.queries > 1:
                config = self._fitting(config)
            self._configs[count] = config
        return self._configs[count]

    def _fitting(self, config: Any) -> Any:
        """A config tuned for one query, with a tile and stages that several leave room for."""
        problem = dataclasses.replace(self.shape, queries=self.queries)
        rows = rows_per_program(problem.group * self.queries, problem.head_dim)
        tile, warps, stages = fitting(
            problem, rows, config.tile, config.num_warps, config.num_stages, self._choices.device
        )
        return dataclasses.replace(config, tile=tile, num_warps=warps, num_stages=stages)

    def launch(self, inputs: Any, config: Any) -> None:
        """Run the kernel; what follows from the operands' layout is worked out once."""
        _launcher.launch(self.kernel, inputs, config)

    def give_up(self, error: Exception) -> None:
        """Leave this kind to vLLM for the rest of the process, with one WARNING."""
        self.active, self.reason = False, f"{type(error).__name__}: {error}"
        settings.warn_once(
            self.topic,
            "gemma-tune: %s cannot run (%s); vLLM's kernel serves",
            self.topic,
            self.reason,
        )


def rounded(count: int) -> int:
    """A count as look-ups see it: beyond 256 only its four highest bits count, rounded up.

    Prompts come in thousands of sizes, and each would be looked up while a server waits.
    """
    if count <= 256:
        return max(1, count)
    step = 1 << (count.bit_length() - 4)
    return -(-count // step) * step


class Wrapper:
    """Stands for vLLM's function; ``served`` and ``delegated`` count calls while they are eager."""

    def __init__(self, stock: Callable[..., Any], choices: Choices) -> None:
        self.stock, self.choices = stock, choices
        self.kinds: dict[Any, Kind | None] = {}
        self.served = self.delegated = 0

    def __call__(self, *args: Any, **kw: Any) -> Any:
        """As vLLM's function."""
        if not args and self._serve(kw):
            self.served += 1
            return None
        self.delegated += 1
        return self.stock(*args, **kw)

    def _serve(self, kw: dict[str, Any]) -> bool:
        """Whether our kernel has filled ``out``."""
        for name, wanted in PLAIN:
            if kw.get(name) is not wanted:
                return False
        q, k, new = kw["q"], kw["k"], kw["max_seqlen_q"]
        queries = ROUNDED_QUERIES[new] if new <= MOST_QUERIES else 0
        _, heads, head_dim = q.shape
        _, block_size, kv_heads, _ = k.shape
        # With the flags, so that a call whose flags differ is another kind, which is not served.
        key = (
            heads, kv_heads, head_dim, block_size, q.dtype, k.dtype, queries, len(kw),
            kw["window_size"][0], kw["softcap"], kw["causal"] is True,
            kw.get("kv_quant_mode", 0), kw.get("chunk_lookback", -1), kw.get("use_td", False),
        )  # fmt: skip
        kind = self.kinds.get(key, UNSEEN)
        if kind is UNSEEN:
            kind = self.kinds[key] = self._kind_or_none(kw, queries)
        if kind is None or not kind.active:
            return False
        try:
            return self._run(kind, kw)
        except Exception as error:
            kind.give_up(error)
            return False

    def _kind_or_none(self, kw: dict[str, Any], queries: int) -> Kind | None:
        try:
            return self._kind(kw, queries)
        except Exception as error:
            settings.warn_once(
                "attention kinds",
                "gemma-tune: attention is left to vLLM: %s: %s",
                type(error).__name__,
                error,
            )
            return None

    def _kind(self, kw: dict[str, Any], queries: int) -> Kind | None:
        """What serves calls like this one, None for vLLM."""
        q, k, v = kw["q"], kw["k"], kw["v"]
        plain = (
            kw["causal"] is True
            and kw.get("chunk_lookback", -1) == -1
            and not kw.get("use_td", False)
            and int(kw.get("kv_quant_mode", 0)) == (0 if k.dtype == q.dtype else 1)
            and v.dtype == k.dtype
            and (k.dtype == q.dtype or k.dtype in _KV_NAMES)
            and set(kw) <= set(UNIFIED_ATTENTION)
            and q.shape[2] == k.shape[3] == v.shape[3]
        )
        if not plain:
            return None
        window = kw["window_size"][0]
        template = attention_decode if queries else attention_prefill
        shape = Problem(
            tokens=1,
            queries=1,
            context=0,
            query_heads=q.shape[1],
            kv_heads=k.shape[2],
            head_dim=q.shape[2],
            window=window + 1 if window >= 0 else 0,
            block_size=k.shape[1],
            softcap=float(kw["softcap"]),
            dtype=ops.dtype_name(q.dtype),
            kv_dtype="same" if k.dtype == q.dtype else _KV_NAMES[k.dtype],
        )
        kind = Kind(template.TEMPLATE, template.asked, shape, self.choices, queries)
        settings.log.debug(
            "gemma-tune: %s: %s%s",
            kind.topic,
            "" if kind.active else "vLLM's kernel serves: ",
            kind.reason,
        )
        return kind

    def _run(self, kind: Kind, kw: dict[str, Any]) -> bool:
        q, lengths = kw["q"], kw["seqused_k"]
        sequences, table = lengths.shape[0], kw["block_table"]
        if table.shape[0] != sequences or kw["cu_seqlens_q"].shape[0] != sequences + 1:
            return False
        config = kind.config(sequences if kind.decode else q.shape[0])
        if config is None:
            return False
        k_scale = v_scale = None
        if kind.shape.kv_dtype != "same":
            k_scale, v_scale = kw["k_descale"], kw["v_descale"]
            if not (one_scale(k_scale) and one_scale(v_scale)):
                return False
        new = kind.queries or kw["max_seqlen_q"]
        operands = (
            q, kw["k"], kw["v"], table, kw["cu_seqlens_q"], lengths, new, kind.shape.window,
            kw["softmax_scale"], kind.shape.softcap, k_scale, v_scale, kw["out"],
        )  # fmt: skip
        if not kind.decode:
            kind.launch(AttentionInputs(*operands), config)
            return True
        parts: tuple[torch.Tensor, ...] = ()
        if config.splits > 1:
            heads, head_dim = kind.shape.query_heads, kind.shape.head_dim
            sums, rows = scratch_sizes(sequences, heads, new, head_dim, config.splits)
            while sums > MOST_SCRATCH and config.splits > 1:
                config = dataclasses.replace(config, splits=config.splits // 2)
                sums, rows = scratch_sizes(sequences, heads, new, head_dim, config.splits)
            # Of a captured graph these lie in its pool, which lives as long as it does.
            scratch = torch.empty(sums + 2 * rows, dtype=torch.float32, device=q.device)
            parts = scratch.split((sums, rows, rows))
        kind.launch(DecodeInputs(*operands, *parts), config)
        return True


def one_scale(scale: Any) -> bool:
    """Whether a [sequences, KV heads] view is one float32 element, expanded."""
    return (
        isinstance(scale, torch.Tensor) and scale.dtype == torch.float32 and not any(scale.stride())
    )


def install(choices: Choices) -> Wrapper:
    """Put the wrapper in place, or give the one that is there these tables.

    LookupError, with nothing changed, where vLLM's function is not as we have read it.
    """
    module = importlib.import_module(MODULE)
    stock = getattr(module, NAME, None)
    if isinstance(stock, Wrapper):
        stock.choices = choices
        stock.kinds.clear()
        return stock
    if stock is None:
        raise LookupError(f"this vLLM's {MODULE} has no {NAME}")
    found = tuple(inspect.signature(stock).parameters)
    if found != UNIFIED_ATTENTION:
        odd = sorted(set(found) ^ set(UNIFIED_ATTENTION))
        raise LookupError(f"{NAME} of this vLLM has other arguments ({', '.join(odd) or 'order'})")
    wrapper = Wrapper(stock, choices)
    setattr(module, NAME, wrapper)
    return wrapper


def remove() -> None:
    """Put vLLM's function back, if ours is there."""
    module = importlib.import_module(MODULE)
    wrapper = getattr(module, NAME, None)
    if isinstance(wrapper, Wrapper):
        setattr(module, NAME, wrapper.stock)
