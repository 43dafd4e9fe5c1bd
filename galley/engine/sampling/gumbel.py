"""Gumbel-max over a row, with noise only for tokens that can win: part of the kernels of sampling."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from galley.core.noise import GUMBEL, GUMBEL_MAX, LANES, MULTIPLIERS, ROUNDS, WEYL
from galley.engine.sampling.largest import any_above
from galley.engine.sampling.layout import Floats, part

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ONE, _TWO, _THREE, _FOUR = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(LANES)  # plain indices
_BLOCKS: Final = 64  # noise computed at once
# Far above the rounding of the pruning in float32, on numbers below 200. Pruning less is safe.
SLACK: Final = 1e-3
UNIT: Final = np.float32(math.log(2.0) * 2.0**-23)
OFFSET: Final = np.float32(math.log(2.0) * (127 + 31))


@part
def philox(blocks: NDArray[np.uint64], seed: np.uint64, position: np.uint64, words: Any) -> None:
    """Write `block_words` of galley/core/noise.py to uint32 `words` [at least 4 * blocks]."""
    for i in range(len(blocks)):
        c0, c1, c2, c3 = blocks[i], position & _LOW, position >> _HALF, np.uint64(GUMBEL)
        k0, k1 = seed & _LOW, seed >> _HALF
        for _ in range(ROUNDS):
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
            k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
        at = np.uint64(i) * _FOUR
        words[at], words[at + _ONE], words[at + _TWO], words[at + _THREE] = c0, c1, c2, c3


@part
def gumbel(word: int) -> float:
    """Return `gumbel` of galley/core/noise.py, up to the last bits of its logarithms."""
    return -math.log(-math.log1p(-((float(word) + 0.5) * 2.0**-32)))


@part
def noisiest(scaled: Floats, best: int, seed: Any, position: Any, blocks: NDArray[np.uint64]) -> int:
    """Return argmax of float64(scaled) + noise, lowest id first; `scaled` is at most 0, and 0 at `best`.

    Prunes twice, in float32 with slack, then decides exactly. Before the noise: tokens that cannot beat the
    likeliest's score. Before the logarithms: tokens whose upper bound (`_reach`) is below a score found.
    """
    words = np.empty(_BLOCKS * LANES, np.uint32)
    blocks[0] = best // LANES
    philox(blocks[:1], seed, position, words)
    winner, score = best, float(scaled[best]) + gumbel(words[best % LANES])
    count = _possible(scaled, np.float32(score - GUMBEL_MAX - SLACK), blocks)
    reaches = np.empty(_BLOCKS * LANES, np.float32)
    for start in range(0, count, _BLOCKS):
        chunk = blocks[start : min(start + _BLOCKS, count)]
        philox(chunk, seed, position, words)
        _reach(scaled, chunk, words, reaches)
        tokens = len(chunk) * LANES
        if not any_above(reaches[:tokens], np.float32(score - SLACK)):
            continue
        for i in range(tokens):
            if reaches[i] > score - SLACK:
                token = int(chunk[i // LANES]) * LANES + i % LANES
                other = float(scaled[token]) + gumbel(words[i])
                if other > score or (other == score and token < winner):
                    winner, score = token, other
    return winner


@part
def _possible(scaled: Floats, least: np.float32, blocks: NDArray[np.uint64]) -> int:
    """Write the blocks with a token of at least `least`, in order, to `blocks`; return their number."""
    count = 0
    for b in range(len(blocks)):
        blocks[count] = b
        at = np.uint64(b) * _FOUR
        hits = (scaled[at] >= least) | (scaled[at + _ONE] >= least)
        count += hits | (scaled[at + _TWO] >= least) | (scaled[at + _THREE] >= least)
    return count


@part
def _reach(scaled: Floats, blocks: NDArray[np.uint64], words: NDArray[np.uint32], reaches: Floats) -> None:
    """Write a bound above the score of each token of `blocks` to `reaches` [4 * blocks].

    Noise is below -log(t), t = (word + 0.5) / 2**32 > (word >> 1) / 2**31. The bits of a float, read as an
    integer, are at most 2**23 (127 + log2(x)), and at most 0.09 * 2**23 less: a cheap logarithm.
    """
    for i in range(len(blocks)):
        at, to = blocks[i] * _FOUR, np.uint64(i) * _FOUR
        reaches[to], reaches[to + _ONE] = scaled[at], scaled[at + _ONE]
        reaches[to + _TWO], reaches[to + _THREE] = scaled[at + _TWO], scaled[at + _THREE]
    levels = np.empty(_BLOCKS * LANES, np.float32)
    bits, tokens = levels.view(np.int32), len(blocks) * LANES
    for i in range(tokens):
        levels[i] = np.int32(words[i] >> np.uint32(1))
    for i in range(tokens):
        reaches[i] += OFFSET - np.float32(bits[i]) * UNIT
