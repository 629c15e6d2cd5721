"""What an attention tile needs of a GPU: shared memory and registers, by numbers alone.

Held against ``metadata.shared`` of Triton 3.9's own binaries for capabilities 8.0, 8.9, 9.0: see
``tests/test_attention_space.py``.
"""

from __future__ import annotations

from .attention_problem import Problem
from .base import DTYPES, DeviceInfo

#: Registers of a thread that the accumulator may fill: the rest holds scores and addresses.
ACCUMULATOR_REGISTERS = 200

#: Bytes per thread that a candidate may spill: addresses at the edges of a range of keys, which
#: cost less than a smaller tile.  Of seven prefill problems of 8192 tokens tuned on an H200 the
#: fastest config spilled 8 to 136 in five; one that spills nothing took up to 1.7x as long.
MOST_SPILL = 256

#: The first capability whose copy engine reads tiles by descriptors.
DESCRIPTOR_CAPABILITY = (9, 0)

#: The first capability whose conversions know ``float8_e4m3fn``.
FP8_CAPABILITY = (8, 9)


def shared_memory(
    problem: Problem,
    block_m: int,
    tile: int,
    num_warps: int,
    num_stages: int,
    device: DeviceInfo,
    parts: int = 1,
    descriptors: bool = False,
) -> tuple[int, str]:
    """Bytes of shared memory that a program takes, and the arithmetic.

    Q, and K and V of every tile that is buffered.  A pipeline of n stages buffers n - 1 tiles, one
    more where asynchronous matrix instructions still read the one before.  Probabilities pass
    through shared memory for a warp's own instructions; an fp8 tile does, widened, for a
    warpgroup's.  A tile fetched by descriptors has a barrier.
    """
    size, kv_size = DTYPES[problem.dtype].itemsize, problem.cache_dtype.itemsize
    head_dim, whole = problem.head_dim, device.multiplies_by_warpgroups(block_m, num_warps)
    q, k = block_m * head_dim * size, tile * head_dim * kv_size
    value_dim = head_dim // parts
    v = tile * value_dim * kv_size
    text = f"Q {block_m} x {head_dim} x {size} B"
    if num_stages > 1:
        tiles = num_stages if whole else num_stages - 1
        needed = q + tiles * (k + v) + 8 * tiles * descriptors
        text += f" + {tiles} tiles x K and V {tile} x {_widths(head_dim, value_dim)} x {kv_size} B"
    else:
        needed = q + k
        text += f" + K or V {tile} x {head_dim} x {kv_size} B"
    if not whole:
        needed += block_m * tile * size
        text += f" + P {block_m} x {tile} x {size} B"
    elif kv_size < size:
        needed += tile * head_dim * size
        text += f" + widened {tile} x {head_dim} x {size} B"
    return needed, text


def _widths(head_dim: int, value_dim: int) -> str:
    return str(head_dim) if value_dim == head_dim else f"({head_dim} and {value_dim})"


def accumulator_registers(block_m: int, head_dim: int, num_warps: int) -> float:
    """Registers of each thread that hold the accumulator."""
    return block_m * head_dim / (32 * num_warps)


def descriptor_limit(problem: Problem, tile: int, device: DeviceInfo) -> str | None:
    """Reason why tiles cannot be fetched by descriptors, or None."""
    if reason := _capability_limit("descriptors need", DESCRIPTOR_CAPABILITY, device):
        return reason
    if problem.block_size % tile:
        return f"descriptors of tiles of {tile} in blocks of {problem.block_size}"
    if problem.kv_dtype != "same":
        return f"descriptors of a cache of {problem.kv_dtype}, which must be widened"
    return None


def accumulator_limit(block_m: int, head_dim: int, num_warps: int) -> str | None:
    """Reason why the accumulator leaves too few registers, or None."""
    registers = accumulator_registers(block_m, head_dim, num_warps)
    if registers > ACCUMULATOR_REGISTERS:
        return (
            f"accumulator of {block_m} x {head_dim} takes {registers:g} registers of each of "
            f"{32 * num_warps} threads, limit {ACCUMULATOR_REGISTERS}"
        )
    return None


def fp8_limit(problem: Problem, device: DeviceInfo) -> str | None:
    """Reason why the GPU cannot read the cache, or None."""
    if problem.kv_dtype == "same":
        return None
    return _capability_limit(f"{problem.kv_dtype} needs", FP8_CAPABILITY, device)


def _capability_limit(what: str, least: tuple[int, int], device: DeviceInfo) -> str | None:
    if device.capability >= least:
        return None
    needed, found = (".".join(map(str, c)) for c in (least, device.capability))
    return f"{what} capability {needed}, this GPU has {found}"


def fitting(
    problem: Problem, block_m: int, tile: int, num_warps: int, num_stages: int, device: DeviceInfo
) -> tuple[int, int, int]:
    """``(tile, num_warps, num_stages)``, with more warps where the accumulator needs them, then
    fewer stages, then a smaller tile, then no pipeline, down to what fits the GPU."""
    while num_warps < 8 and accumulator_limit(block_m, problem.head_dim, num_warps):
        num_warps *= 2
    least = max(1, min(2, num_stages))
    tiles = [tile >> halvings for halvings in range(8) if tile >> halvings >= 16]
    pipelined = [(keys, n) for keys in tiles for n in range(num_stages, least - 1, -1)]
    for keys, stages in (*pipelined, *((keys, 1) for keys in tiles)):
        needed, _ = shared_memory(problem, block_m, keys, num_warps, stages, device)
        if needed <= device.shared_per_block:
            return keys, num_warps, stages
    return tiles[-1], num_warps, 1
