"""Predict the time of a compiled candidate on a GPU that is not here.

A plain model of memory-bound kernels, meant to rank and never to be quoted as a time::

    time = launch + max(memory, compute) x waves
    memory  = bytes / (bandwidth x copy efficiency x fill)
    compute = FLOP / (32-bit vector rate)
    fill    = min(1, bytes in flight per SM / bytes needed to cover the latency)
    waves   = tail effect of the last, partly filled round of programs

Bytes in flight follow from occupancy (registers, shared memory, threads and blocks per SM, read off
the binary).  Spilled bytes are traffic.  Sources: the roofline model (Williams et al., 2009) and
Little's law as applied to GPU memory (Volkov, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kernel_templates.base import DeviceInfo, KernelTemplate
from kernel_templates.common import assumed_sms

from .compile import Resources

#: Share of the datasheet's bandwidth that a plain copy reaches (4.27 of 4.8 TB/s on an H200).
COPY_EFFICIENCY = 0.89
#: Latency of a load that misses every cache, in seconds (about 600 ns on recent data-centre GPUs).
LATENCY = 6e-7
#: Start of a captured kernel, in seconds.
LAUNCH = 1.5e-6
#: A program issues its tile's loads in a burst; a thread keeps at most this many bytes waiting.
BYTES_PER_THREAD = 64
#: Predicted gain below which the default is kept: the model is no better than this.
LEAST_GAIN = 0.05


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
        programs = math.prod(call.grid)
        threads = 32 * usage.num_warps
        # A persistent program repeats its tile; the cap below stands for the tile's own size.
        tile_bytes = cost.bytes / max(1, programs)
        in_flight = min(tile_bytes, threads * BYTES_PER_THREAD)
        active_sms = min(device.sms, programs)
        together = min(resident, -(-programs // device.sms))
        needed = device.bandwidth / device.sms * LATENCY
        fill = min(1.0, together * in_flight / needed) * active_sms / device.sms
        slots = device.sms * resident
        waves = max(1.0, math.ceil(programs / slots) * slots / programs) if programs > slots else 1
        # A short tail overlaps with the rounds before it: count half of it.
        waves = 1 + (waves - 1) / 2
        spilled = 2.0 * usage.spill_bytes * threads * programs
        memory = (cost.bytes / len(calls) + spilled) / (device.bandwidth * COPY_EFFICIENCY * fill)
        vector_rate = device.sms * 128 * 2 * 1.4e9
        compute = cost.flops / len(calls) / vector_rate
        total += LAUNCH + LATENCY + max(memory, compute) * waves
    return total * 1e6
