"""Which token counts are worth tuning."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

#: A captured size nearer than this factor to a tuned count does not get one of its own.
NEAR = 1.25


def token_counts(
    max_num_seqs: int = 256,
    num_speculative_tokens: int = 0,
    cudagraph_sizes: Iterable[int] = (),
    max_num_batched_tokens: int = 8192,
) -> tuple[int, ...]:
    """The counts of tokens per forward pass to tune for, sorted, from 1 to the largest batch.

    Powers of two and the largest batch itself; the fullest decode batch; with a draft of
    ``num_speculative_tokens``, powers of two times (draft + 1), since a verifying step has that
    many tokens per sequence.  Under CUDA graphs a step is padded to a captured size: of
    ``cudagraph_sizes`` one is added wherever two neighbouring counts leave one that is farther than
    ``NEAR`` from both.  ValueError for limits that no server accepts.
    """
    if max_num_seqs < 1 or num_speculative_tokens < 0 or max_num_batched_tokens < 1:
        raise ValueError(
            f"max_num_seqs {max_num_seqs} and max_num_batched_tokens {max_num_batched_tokens} must "
            f"be at least 1, num_speculative_tokens {num_speculative_tokens} at least 0"
        )
    sequences = [*_powers_of_two(max_num_seqs), max_num_seqs]
    decode = [count * (num_speculative_tokens + 1) for count in sequences]
    wanted = [*_powers_of_two(max_num_batched_tokens), max_num_batched_tokens, max_num_seqs]
    counts = sorted({count for count in [*wanted, *decode] if count <= max_num_batched_tokens})
    captured = set(cudagraph_sizes)
    added = []
    for low, high in itertools.pairwise(counts):
        between = [size for size in captured if size > low * NEAR and size * NEAR < high]
        if between:
            # Nearest to the middle in log scale: its larger ratio to a neighbour is the smallest.
            added.append(min((max(size / low, high / size), size) for size in between)[1])
    return tuple(sorted([*counts, *added]))


def vllm_capture_sizes(max_size: int = 512) -> tuple[int, ...]:
    """The sizes vLLM captures CUDA graphs for by default, up to ``max_size``.

    Source: ``VllmConfig._set_cudagraph_sizes`` in vLLM's ``vllm/config/vllm.py`` (1, 2, 4, then
    multiples of 8 below 256, then multiples of 16).  There ``max_size`` is
    ``min(max_num_seqs * (draft + 1) * 2, 512, max_num_batched_tokens)`` unless given.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_size + 1, 16)]
    return tuple(size for size in sizes if size <= max_size)


def _powers_of_two(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length())]
