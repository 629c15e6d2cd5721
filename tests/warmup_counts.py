"""Program of ``test_warmup.py``: compile ahead, then count what serving would still compile.

No GPU: the driver only names a target, and a launch is Triton's own path up to the launch, with
tensors that lie in memory.  Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from tuned_configs import TableSet
from tuner.compile import CrossDriver
from tuner.device import known_gpus
from vllm_plugin import layers, ops, warmup
from vllm_plugin.tables import Choices

HIDDEN, WIDTH, PLE, LAYERS, HEAD = 1536, 6144, 256, 35, 256
DTYPE = torch.bfloat16
#: Counts that no table has, and that real batches have.
SERVED = (1, 2, 3, 5, 7, 11, 17, 33, 100, 129, 250, 500, 777, 1000, 1024, 1500, 3000, 4097, 7999)


def norm(size: int = HIDDEN) -> Any:
    return SimpleNamespace(weight=torch.ones(size, dtype=DTYPE))


def model() -> Any:
    """What warm-up reads of an E2B: a sliding layer and the last one."""
    found = []
    for last in (False, True):
        attn = SimpleNamespace(
            qkv_proj=SimpleNamespace(output_size_per_partition=10 * HEAD),
            rotary_emb=SimpleNamespace(cos_sin_cache=torch.ones(64, HEAD, dtype=DTYPE)),
            q_norm=norm(HEAD), k_norm=norm(HEAD), num_heads=8, num_kv_heads=1,
        )  # fmt: skip
        attn.__dict__[layers.PLAN] = layers.AttentionPlan("separate", False, HEAD // 2, 1e-6)
        mlp = SimpleNamespace(down_proj=SimpleNamespace(input_size_per_partition=WIDTH))
        mlp.__dict__[layers.PLAN] = layers.MlpPlan()
        layer = SimpleNamespace(
            hidden_size=HIDDEN, input_layernorm=norm(), post_attention_layernorm=norm(),
            per_layer_input_gate=object(), hidden_size_per_layer_input=PLE,
            layer_scalar=torch.ones(1, dtype=DTYPE), self_attn=attn, mlp=mlp,
        )  # fmt: skip
        following: Any = None if last else norm()
        layer.__dict__[layers.PLAN] = layers.LayerPlan(1e-6, "", 1.0, LAYERS * PLE, following)
        found.append(layer)
    return SimpleNamespace(layers=found, start_layer=0, end_layer=2)


def serve(choices: Choices, count: int) -> None:
    """The operators of a step with so many tokens, as the layers call them."""

    def compile_only(kernel: Any, problem: Any, inputs: Any) -> None:
        for call in kernel.calls(inputs, choices.config(kernel, problem)):
            call.warmup()

    ops.run = compile_only
    weight, scalar = torch.ones(HIDDEN, dtype=DTYPE), torch.ones(1, dtype=DTYPE)
    # A captured batch is a slice of a larger buffer.
    stream = torch.empty(count + 3, HIDDEN, dtype=DTYPE)[:count]
    for factor, norms in ((None, 1), (None, 0), (scalar, 1), (scalar, 0)):
        ops._residual_norm(
            stream, weight, stream, None, None, None, factor, [weight] * norms, False, 1.0, 1e-6
        )
    ops._gelu_mul_halves(torch.empty(count, 2 * WIDTH, dtype=DTYPE))
    embedding = torch.empty(count, LAYERS, PLE, dtype=DTYPE)
    for index in (0, 17):
        gate = torch.empty(count, PLE, dtype=DTYPE)
        ops._gelu_mul(gate, embedding[:, index], LAYERS * PLE)
    head = torch.ones(HEAD, dtype=DTYPE)
    ops._qkv_norm_rope(
        torch.empty(count, 10 * HEAD, dtype=DTYPE),
        torch.arange(count),
        torch.ones(64, HEAD, dtype=DTYPE),
        head, head, 8, 1, "separate", HEAD // 2, 1e-6,
    )  # fmt: skip


def main(tables: Path, ahead: bool) -> None:
    (device,) = (gpu for gpu in known_gpus() if gpu.name == "NVIDIA H200")
    choices = Choices(device, TableSet.load(tables, device.name, measured_only=False))
    driver.set_active(CrossDriver(device.target))
    compiled: list[str] = []

    def hook(*_: Any, fn: Any, **__: Any) -> None:
        compiled.append(str(fn.name))

    # The hook by which vLLM's monitor notices compilations, disk cache or not.
    triton.knobs.runtime.jit_post_compile_hook = hook
    scheduler = SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256)
    done = warmup.Done()
    if ahead:
        done = warmup.run(model(), choices, SimpleNamespace(scheduler_config=scheduler))
    before = len(compiled)
    for count in SERVED:
        serve(choices, count)
    result = {"ahead": before, "serving": compiled[before:], "kernels": done.kernels}
    print("RESULT " + json.dumps({**result, "seconds": done.seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "ahead")
