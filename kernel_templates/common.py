"""What several templates share: small ``@triton.jit`` helpers, grids and input builders."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl


@triton.jit
def rounded(x, like):
    """Round float32 ``x`` to the element type of pointer ``like``, kept in float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def rms_normalised(x, sum_of_squares, size: tl.constexpr, eps, like):
    """``x / sqrt(mean(x^2) + eps)`` in float32, rounded to the element type of ``like``.

    ``sum_of_squares`` broadcasts against ``x``; ``size`` is the unmasked row length.
    """
    return rounded(x * tl.rsqrt(sum_of_squares / size + eps), like)


@triton.jit
def vector_range(start: tl.constexpr, end: tl.constexpr, vector: tl.constexpr):
    """``arange`` whose stated contiguity makes each thread access ``vector`` elements at once."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(start, end), vector), vector)


@triton.jit
def tile_rows(tile, ROWS: tl.constexpr):
    """Row indices of a tile, int64 because row x stride can pass 2^31."""
    return (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def _cuda_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


_absent_sms = contextvars.ContextVar("absent_sms", default=1)


@contextlib.contextmanager
def assumed_sms(count: int) -> Iterator[None]:
    """Within this context, grids for tensors outside a GPU assume ``count`` multiprocessors."""
    token = _absent_sms.set(count)
    try:
        yield
    finally:
        _absent_sms.reset(token)


def sm_count(tensor: torch.Tensor) -> int:
    """Multiprocessors of the tensor's GPU; 1, or what is assumed, where there is none."""
    return _cuda_sms(tensor.device.index or 0) if tensor.is_cuda else _absent_sms.get()


def tile_grid(tiles: int, programs_per_sm: int, tensor: torch.Tensor) -> tuple[int]:
    """Grid over ``tiles``: one program each, or a persistent grid of ``programs_per_sm`` per SM."""
    if programs_per_sm == 0:
        return (tiles,)
    return (min(tiles, programs_per_sm * sm_count(tensor)),)


def randn_rows(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    pad: int = 0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Normal random ``[rows, columns]`` view with row stride ``columns + pad``.

    The padding holds random values too, so that reading it is seen as an error.
    """
    return scaled_randn((rows, columns + pad), dtype, device, generator, scale)[:, :columns]


def scaled_randn(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    scale: float = 1.0,
    mean: float = 0.0,
) -> torch.Tensor:
    """Normal random tensor; on ``meta`` only the shape exists."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    # Drawn in float32: half-precision generators differ between devices.
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    return values.mul_(scale).add_(mean).to(dtype)


def empty_rows(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, pad: int = 0
) -> torch.Tensor:
    """Uninitialised ``[rows, columns]`` view with row stride ``columns + pad``."""
    return torch.empty((rows, columns + pad), dtype=dtype, device=device)[:, :columns]


def generator(seed: int, device: torch.device) -> torch.Generator:
    """A seeded generator for ``device`` (``meta`` draws nothing and takes a CPU one)."""
    place = device if device.type == "cuda" else torch.device("cpu")
    return torch.Generator(device=place).manual_seed(seed)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm as vLLM's native implementation rounds it.

    Normalised in float32, rounded to the dtype of ``x``, then multiplied by the weight in that
    dtype (no ``1 + weight``).  Source: vLLM 0.26, ``vllm/ir/ops/layernorm.py``.
    """
    wide = x.float()
    normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normal if weight is None else normal * weight.to(x.dtype)
