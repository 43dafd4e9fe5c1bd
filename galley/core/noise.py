"""Gumbel noise as a function of (seed, position, token), the same on every machine.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11, section 3)
with key = (seed_lo, seed_hi) and counter = (token >> 2, position_lo, position_hi, domain). The word of a
token is output[token & 3]. Draft and target add the same noise to their log-probabilities and take the
argmax, so the draft predicts what the target will sample (Daliri, Musco, Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978).

Words are integers and agree bit for bit everywhere (tests/core/golden). `gumbel` takes two logarithms and
agrees to 1e-6 between libraries; only the target's value decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_Words = NDArray[np.uint64]

# The last word of the counter: what the noise is for. Uncorrelated uses take different domains.
GUMBEL: Final = 0
SPOIL: Final = 1  # which tokens the oracle draft spoils

LANES: Final = 4  # words of one Philox block: tokens 4 b .. 4 b + 3 share block b

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)

_MASK: Final = 0xFFFFFFFF
_LOW = np.array(_MASK, dtype=np.uint64)
_HALF = np.array(32, dtype=np.uint64)
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64)[:, None]  # [2, 1]

# The largest and the smallest value of `gumbel`: at the words 0 and 2**32 - 1.
GUMBEL_MAX: Final = -math.log(-math.log1p(-(0.5 * 2.0**-32)))
GUMBEL_MIN: Final = -math.log(-math.log1p(-((2.0**32 - 0.5) * 2.0**-32)))


def halves(value: int) -> tuple[int, int]:
    """Return the low and the high 32 bits of `value`. Raise ValueError unless it fits 64 bits."""
    if not 0 <= value < 2**64:
        raise ValueError(f"value: must be in [0, 2**64), got {value}")
    return value & _MASK, value >> 32


def round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    return [((key[0] + i * WEYL[0]) & _MASK, (key[1] + i * WEYL[1]) & _MASK) for i in range(ROUNDS)]


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Return the Philox 4x32-10 words [..., 4] of each `counter` [..., 4] under `key`."""
    lanes = np.ascontiguousarray(counter.reshape(-1, LANES).T, dtype=np.uint64)  # [4, n]
    return _philox(lanes, key).reshape(counter.shape)


def block_words(
    seed: int, position: int, blocks: NDArray[np.int64], domain: int = GUMBEL
) -> NDArray[np.uint32]:
    """Return the words [n, 4] of the tokens 4 b .. 4 b + 3 of each block b in `blocks` [n]."""
    lanes = np.empty((LANES, len(blocks)), dtype=np.uint64)
    lanes[0] = blocks
    lanes[1:] = np.array([[*halves(position), domain]], dtype=np.uint64).T
    return _philox(lanes, halves(seed))


def words(
    seed: int, position: int, token_ids: Sequence[int] | NDArray[np.integer], domain: int = GUMBEL
) -> NDArray[np.uint32]:
    """Return the word [n] of each of `token_ids` [n] at `position`. Raise ValueError for ids >= 2**34."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= LANES << 32):
        raise ValueError(f"token_ids: must be in [0, 2**34), got {tokens.min()} to {tokens.max()}")
    blocks = block_words(seed, position, tokens >> 2, domain)  # [n, 4]
    return np.take_along_axis(blocks, (tokens & 3)[..., None], axis=-1)[..., 0]


def gumbel(of_words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return Gumbel noise of the words, elementwise, in [GUMBEL_MIN, GUMBEL_MAX]; falls as words rise.

    The added half keeps t off 0 and 1. In float32, t would round to 1 and the noise be infinite at about one
    position in a thousand.
    """
    t = (of_words.astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log1p(-t))
    return noise


def _philox(lanes: _Words, key: tuple[int, int]) -> NDArray[np.uint32]:
    """Return the words [n, 4] after ten rounds over `lanes` [4, n], which are overwritten.

    Works in place, even and odd lanes side by side: three times as fast on a whole vocabulary.
    """
    even, odd = lanes[0::2], lanes[1::2]  # [2, n]
    product = np.empty_like(even)
    crossed = product[::-1]  # each half of the state takes the other's product
    keys = np.array(round_keys(key), dtype=np.uint64)[:, :, None]  # [rounds, 2, 1]
    for of_round in keys:
        np.multiply(even, _MULTIPLIERS, out=product)  # 32 x 32 -> 64 bits: exact
        np.right_shift(crossed, _HALF, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, of_round, out=even)
        np.bitwise_and(crossed, _LOW, out=odd)
    words_of = np.empty((lanes.shape[1], LANES), dtype=np.uint32)
    words_of.T[:] = lanes
    return words_of
