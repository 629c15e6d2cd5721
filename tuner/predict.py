"""Predict the time of a compiled candidate on a GPU that is not here.

A plain model, meant to rank and never to be quoted as a time::

    time   = launch + max(bytes / bandwidth, FLOP / rate) + rounds x passes x pass
    rounds = programs / (programs that fit the GPU at the same time), at least 1
    passes = bytes of a program / bytes that its code moves when run through once, at least 1
    pass   = latency + instructions x instruction + barriers x barrier

Bytes and FLOP are the least that the problem needs; what spills is traffic on top. How many
programs fit follows from registers, shared memory, threads and blocks per SM; instructions and
barriers are counted in the binary's PTX. The first term is the roofline (Williams et al., 2009);
the second is what a program takes that waits for memory, works through its instructions and
repeats that.

The constants were fitted to 5,562 trials of the four templates for E2B and 26B-A4B, measured by
this project on an NVIDIA H200 on 2026-12-01. Fitted on half the kinds of problems, the model
missed the times of the other half by 12 % in the median. A config that it called 5 to 20 % faster
than the default was not faster on average, hence :data:`LEAST_GAIN`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kernel_templates.base import DeviceInfo, KernelTemplate
from kernel_templates.common import assumed_sms

from .compile import Resources

#: Start and end of a captured kernel, in seconds.
LAUNCH = 1.9e-6
#: Share of the datasheet's bandwidth that a kernel reaches.
EFFICIENCY = 0.88
#: One pass of a program through its code, in seconds: its wait for memory, ...
LATENCY = 2.3e-7
#: ... each instruction of a thread, ...
INSTRUCTION = 8.6e-10
#: ... and each barrier.
BARRIER = 1.5e-7
#: Predicted gain below which the default is kept: the model is no better than this.
LEAST_GAIN = 0.2


def blocks_per_sm(resources: Resources, device: DeviceInfo) -> int:
    """Programs that fit one SM at the same time; 0 when one does not fit."""
    threads = 32 * resources.num_warps
    # Registers are allocated per warp in units of 256, shared memory with 1 KiB reserved per block.
    registers = max(1, -(-resources.registers * 32 // 256) * 256 * resources.num_warps)
    shared = resources.shared_bytes + (1024 if device.capability >= (8, 0) else 0)
    return min(
        device.threads_per_sm // threads,
        device.registers_per_sm // registers,
        device.shared_per_sm // max(1, shared),
        device.blocks_per_sm,
    )


def predict_us(
    template: KernelTemplate[Any, Any],
    problem: Any,
    config: Any,
    resources: Sequence[Resources],
    device: DeviceInfo,
) -> float:
    """Predicted microseconds of one launch on the device; inf when a program does not fit an SM."""
    with assumed_sms(device.sms):
        inputs = template.make_inputs(problem, 0, torch.device("meta"), 0)
        calls = template.calls(inputs, config)
    cost = template.cost(problem)
    total = 0.0
    for call, usage in zip(calls, resources, strict=True):
        resident = blocks_per_sm(usage, device)
        if resident == 0:
            return math.inf
        programs = max(1, math.prod(call.grid))
        threads = 32 * usage.num_warps
        moved = cost.bytes / len(calls)
        once = usage.access_bytes * threads * programs
        passes = max(1.0, moved / once) if once else 1.0
        rounds = max(1.0, programs / (device.sms * resident))
        spilled = 2.0 * usage.spill_bytes * threads * programs
        memory = (moved + spilled) / (device.bandwidth * EFFICIENCY)
        compute = cost.flops / len(calls) / device.bf16_flops
        step = LATENCY + usage.instructions * INSTRUCTION + usage.barriers * BARRIER
        total += LAUNCH + max(memory, compute) + rounds * passes * step
    return total * 1e6
