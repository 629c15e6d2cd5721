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

Kernels that work in tiles (attention) have a model of their own, because their config decides how
often K and V are read and how much is computed::

    time   = launch + max(bytes / bandwidth, waves x (steps x step + prologue), longest + prologue)
    step   = max(programs of an SM x (load, arithmetic), one program's own step) + spills
    load   = bytes of a step / L2 bandwidth of an SM
    one    = latency + max(load, arithmetic), or their sum without a pipeline

Its constants were fitted to 288 trials of attention for the same models on the same H200 and day.
Fitted on either model it missed the times of the other by 15 to 16 % in the median; with the
rounded constants below it misses all by 14 %, and the config that it picks takes 1.07x of the best
on average (1.41x at worst, at 256 tokens).  Of GPUs without warpgroup instructions nothing was
measured: their rate is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kernel_templates.base import DeviceInfo, KernelTemplate, TileWork
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
#: Of a tiled kernel: share of the dense rate that a warpgroup's instructions reach, ...
GROUP_RATE = 0.5
#: ... that a warp's reach on a GPU whose full rate takes a warpgroup, ...
WARP_RATE = 0.3
#: ... bytes per second that an SM gets from L2, ...
L2_BANDWIDTH = 35e9
#: ... the wait in a step, the start and end of a program, the start of a second kernel, in seconds,
STEP, PROLOGUE, SECOND = 7e-7, 2e-6, 2.6e-6
#: ... and each byte per thread that a step spills.
SPILL = 1e-9
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
    if template.tile_work is not None:
        work = template.tile_work(problem, config)
        return _tiled_us(work, template.cost(problem).bytes, resources[0], device)
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


def _tiled_us(work: TileWork, nbytes: int, usage: Resources, device: DeviceInfo) -> float:
    resident = blocks_per_sm(usage, device)
    if resident == 0:
        return math.inf
    grouped = device.multiplies_by_warpgroups(work.rows, usage.num_warps)
    share = WARP_RATE if device.has_warpgroups and not grouped else GROUP_RATE
    arithmetic = work.step_flops / (device.bf16_flops / device.sms * share)
    load = work.step_bytes / L2_BANDWIDTH
    overlapped = max(load, arithmetic) + STEP
    one = overlapped if work.pipelined else load + arithmetic + 2 * STEP
    busy = min(resident, max(1.0, work.programs / device.sms))
    step = max(busy * load, busy * arithmetic, one)
    waves = max(1.0, work.programs / (device.sms * resident))
    prologue = PROLOGUE + busy * work.program_bytes / L2_BANDWIDTH
    steps = work.steps / work.programs
    body = max(waves * (steps * step + prologue), work.longest * one + prologue)
    body += waves * steps * usage.spill_bytes * SPILL
    time = LAUNCH + max(body, nbytes / (device.bandwidth * EFFICIENCY))
    if work.scratch_bytes:
        time += SECOND + work.scratch_bytes / (device.bandwidth * EFFICIENCY)
    return time * 1e6
