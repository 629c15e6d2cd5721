"""vLLM's Triton attention as a peer: ``unified_attention``, called as vLLM's backend calls it.

:func:`operands` are the arguments that ``TritonAttentionImpl.forward`` passes
(``vllm/v1/attention/backends/triton_attn.py``, 0.26 to 0.33) for bf16 decoder layers of Gemma 4.
Its launch constants cannot be set from outside.  :func:`launches` therefore puts recorders in the
place of the module's two kernels while ``unified_attention`` runs, which gives the launches that it
would have made, and changes ``BLOCK_M``, ``BLOCK_Q``, ``TILE_SIZE``, the grid, warps and stages in
them; everything else stays as vLLM has it.

``TEMPLATE`` gives compile workers these launches.  It is no template of the package: nothing tunes
it and no table names it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernel_templates import attention_problem
from kernel_templates.attention_problem import AttentionInputs, attention, describe, draw_inputs
from kernel_templates.base import Cost, DeviceInfo, KernelCall, KernelTemplate, ModelShape

MODULE = "vllm.v1.attention.ops.triton_unified_attention"
KERNELS = ("kernel_unified_attention", "reduce_segments")
#: ``MIN_LAUNCH_GRID_SIZE_2D`` and ``NUM_PAR_SOFTMAX_SEGMENTS`` of the backend.
LEAST_PROGRAMS, SEGMENTS = 128, 16
#: Triton's own, which vLLM leaves in force.
WARPS, STAGES = 4, 3


@dataclass(frozen=True)
class Problem(attention_problem.Problem):
    """As the templates' problem.  Batches of one query a sequence and at most ``split_up_to``
    sequences go to the kernel that splits keys ("3D").  vLLM takes this limit from the KV heads of
    the model, not of the layer: 128 over those of the sliding layers, which for Gemma 4 is a size
    that it captures graphs for, so that rounding to one changes nothing."""

    split_up_to: int = LEAST_PROGRAMS

    @staticmethod
    def of(problem: attention_problem.Problem, model_kv_heads: int) -> Problem:
        """The peer's problem for a layer of a model with so many KV heads."""
        values = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
        return Problem(**values, split_up_to=LEAST_PROGRAMS // model_kv_heads)

    @property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return self.context + max(self.new)


@dataclass(frozen=True)
class Constants:
    """Launch constants of the kernel; all 0 for vLLM's own."""

    block_m: int = 0
    tile: int = 0
    num_warps: int = 0
    num_stages: int = 0


STOCK = Constants()

#: Constants tried in prefill beside vLLM's own, by head dim: those of block_m 16 to 128, tile 16 to
#: 128, 4 to 16 warps and 2 or 3 stages that, compiled for sm_90, fit 227 KiB and spill little
#: (head 512 with block_m 128 spills thousands of bytes, or does not compile).
SWEEP: dict[int, tuple[Constants, ...]] = {
    256: (
        Constants(64, 32, 4, 3),
        Constants(64, 64, 8, 2),
        Constants(128, 32, 8, 3),
        Constants(128, 64, 8, 2),
        Constants(128, 64, 8, 3),
    ),
    512: (
        Constants(16, 32, 8, 3),
        Constants(32, 32, 4, 2),
        Constants(32, 32, 8, 2),
        Constants(64, 16, 8, 3),
        Constants(64, 32, 8, 2),
    ),
}


def candidates(problem: Problem) -> list[Constants]:
    """vLLM's own constants, then those of :data:`SWEEP` that hold a query's heads."""
    swept = SWEEP[256 if problem.head_dim <= 256 else 512]
    return [STOCK, *(found for found in swept if found.block_m >= problem.group)]


def operands(problem: Problem, inputs: AttentionInputs) -> dict[str, Any]:
    """Keyword arguments of ``unified_attention``, scratch included.

    ``q, out``: [tokens, query heads, head dim]; ``k, v``: [blocks, slots, KV heads, head dim] views
    of the cache; scratch: [split_up_to, query heads, 16, head dim] and [split_up_to, query heads,
    16], float32.
    """
    heads, head_dim = inputs.q.shape[1:]
    device, rows = inputs.q.device, (problem.split_up_to, heads, SEGMENTS)
    # One element for the layer, expanded to [sequences, KV heads]; not read in a bf16 cache.
    scale = torch.ones((), device=device).expand(problem.sequences, problem.kv_heads)
    return {
        "q": inputs.q,
        "k": inputs.keys,
        "v": inputs.values,
        "out": inputs.attended,
        "cu_seqlens_q": inputs.starts,
        "max_seqlen_q": inputs.max_new,
        "seqused_k": inputs.lengths,
        "max_seqlen_k": problem.longest,
        "softmax_scale": inputs.scale,
        "causal": True,
        "window_size": window(problem),
        "block_table": inputs.block_table,
        "softcap": problem.softcap or 0,
        "q_descale": None,
        "k_descale": scale,
        "v_descale": scale,
        "seq_threshold_3D": problem.split_up_to,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": torch.empty((*rows, head_dim), device=device),
        "softmax_segm_max": torch.empty(rows, device=device),
        "softmax_segm_expsum": torch.empty(rows, device=device),
    }


def window(problem: Problem) -> tuple[int, int]:
    """(keys to the left, to the right) beside the query's own, -1 for no limit."""
    return (problem.window - 1, 0) if problem.window else (-1, -1)


def launches(arguments: dict[str, Any], constants: Constants = STOCK) -> list[KernelCall]:
    """The launches that ``unified_attention`` makes, with these constants in the first."""
    module = importlib.import_module(MODULE)
    kernels = {name: getattr(module, name) for name in KERNELS}
    calls: list[KernelCall] = []
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Recorder(kernel, calls))
        module.unified_attention(**arguments)
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    if constants != STOCK:
        calls[0] = _changed(calls[0], constants)
    return calls


@dataclass(frozen=True)
class _Recorder:
    """Takes a kernel's place: ``recorder[grid](**arguments)`` notes the launch."""

    kernel: Any
    calls: list[KernelCall]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(num_warps: int = WARPS, num_stages: int = STAGES, **arguments: Any) -> None:
            self.calls.append(KernelCall(self.kernel, grid, arguments, num_warps, num_stages))

        return launch


def _changed(call: KernelCall, constants: Constants) -> KernelCall:
    block_q = constants.block_m // call.args["num_queries_per_kv"]
    tiles = call.args["query_ptr"].shape[0] // block_q + call.args["num_seqs"]
    changes = {"BLOCK_M": constants.block_m, "BLOCK_Q": block_q, "TILE_SIZE": constants.tile}
    return KernelCall(
        call.kernel, (tiles, *call.grid[1:]), {**call.args, **changes},
        constants.num_warps, constants.num_stages,
    )  # fmt: skip


def binary(call: KernelCall) -> tuple[object, ...]:
    """What Triton specialises a launch on: constants by value, integers by 1 and multiples of 16.

    Launches that agree here share a binary.
    """
    constant = {parameter.name for parameter in call.kernel.params if parameter.is_constexpr}
    parts: list[object] = [call.kernel.__name__, call.num_warps, call.num_stages]
    for name, value in sorted(call.args.items()):
        if isinstance(value, torch.Tensor):
            parts.append((name, value.dtype))
        elif name in constant or isinstance(value, bool) or not isinstance(value, int):
            parts.append((name, value))
        else:
            parts.append((name, value == 1, value % 16 == 0))
    return tuple(parts)


@dataclass
class PeerInputs(AttentionInputs):
    """Inputs that know their problem."""

    problem: Problem | None = None


def _make_inputs(problem: Problem, seed: int, device: torch.device, pad: int = 0) -> PeerInputs:
    drawn = draw_inputs(problem, seed, device, pad)
    fields = {f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn)}
    return PeerInputs(**fields, problem=problem)


def _calls(inputs: PeerInputs, config: Constants) -> list[KernelCall]:
    assert inputs.problem is not None
    return launches(operands(inputs.problem, inputs), config)


def _problems(model: ModelShape, tokens: Sequence[int]) -> list[Problem]:
    return []


def _default(problem: Problem, device: DeviceInfo) -> Constants:
    return STOCK


def _cost(problem: Problem) -> Cost:
    return attention_problem.work(problem)


TEMPLATE = KernelTemplate(
    name="vllm_unified_attention",
    problem=Problem,
    config=Constants,
    calls=_calls,
    reference=attention,
    make_inputs=_make_inputs,
    problems=_problems,
    default=_default,
    cost=_cost,
    describe=describe,
    same_kernel=(),
)
