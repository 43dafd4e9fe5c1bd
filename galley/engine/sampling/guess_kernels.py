"""The compiled part of guessing: one token a row of a head that knows only some tokens.

Same noise and order of processing as in `kernels`, over the columns that exist.
"""

# ruff: noqa: PLR0913, PLR0917  # kernels take arrays, not objects; loops which thread they run on

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from galley.core.noise import GUMBEL_MAX, LANES
from galley.engine.cpu.kernels.openmp import shared
from galley.engine.sampling.filters import apply_filters
from galley.engine.sampling.gumbel import OFFSET, SLACK, UNIT, gumbel, philox
from galley.engine.sampling.largest import any_above, exponentials, likeliest
from galley.engine.sampling.layout import NOTHING, Floats, Ids, part

_COLUMNS: Final = 64  # noise computed at once


@shared
def _guess_some(
    thread: int,
    first: int,
    last: int,
    logits: Floats,
    tokens: Ids,
    draws: Any,
    drawn: Ids,
    confidences: Floats,
    scratch: Floats,
) -> None:
    """Run the rows [first, last) of `guess_rows`."""
    scaled, weights = scratch[thread, 0], scratch[thread, 1]
    for r in range(first, last):
        row, draw = logits[r], draws[r]
        best = likeliest(row)
        drawn[r], confidences[r] = NOTHING, np.float32(0)
        if best != NOTHING:
            confidences[r] = np.float32(1.0 / exponentials(row, row[best], weights))
            drawn[r] = tokens[best]
        if best != NOTHING and draw.temperature > 0:
            for j in range(len(row)):
                scaled[j] = (row[j] - row[best]) / draw.temperature
            apply_filters(scaled, weights, len(scaled), draw)
            drawn[r] = _noisiest(scaled, best, tokens, draw.seed, draw.position)


def guess_rows(
    threads: int, logits: Floats, tokens: Ids, draws: Any, drawn: Ids, confidences: Floats, scratch: Floats
) -> None:
    """Write for each row of `logits` [rows, columns] the token that its draw (DRAW) samples, or NOTHING.

    `tokens` [columns], rising, are the token ids of the columns. `confidences` [rows] get the likeliest
    token's probability at temperature 1. scratch: float32 [threads, 2, columns].
    """
    _guess_some(threads, len(draws), logits, tokens, draws, drawn, confidences, scratch)


@part
def _noisiest(scaled: Floats, best: int, tokens: Ids, seed: np.uint64, position: np.uint64) -> Any:
    """Return the winning token, column by column; see `gumbel.noisiest`."""
    blocks, words = np.empty(_COLUMNS, np.uint64), np.empty(_COLUMNS * LANES, np.uint32)
    reaches = np.empty(_COLUMNS, np.float32)
    _draw_words(tokens[best : best + 1], seed, position, blocks, words)
    winner, score = best, float(scaled[best]) + gumbel(words[0])
    for start in range(0, len(scaled), _COLUMNS):
        chunk = scaled[start : start + _COLUMNS]
        if not any_above(chunk, np.float32(score - GUMBEL_MAX - SLACK)):
            continue
        _draw_words(tokens[start : start + len(chunk)], seed, position, blocks, words)
        _reach(chunk, words, reaches)
        if not any_above(reaches[: len(chunk)], np.float32(score - SLACK)):
            continue
        for i in range(len(chunk)):
            if reaches[i] > score - SLACK:
                other = float(chunk[i]) + gumbel(words[i])
                if other > score or (other == score and start + i < winner):
                    winner, score = start + i, other
    return tokens[winner]


@part
def _draw_words(
    tokens: Ids, seed: np.uint64, position: np.uint64, blocks: NDArray[np.uint64], words: NDArray[np.uint32]
) -> None:
    """Write the word of each of at most _COLUMNS tokens to `words`, whose rest is undefined."""
    for i in range(len(tokens)):
        blocks[i] = tokens[i] // LANES
    philox(blocks[: len(tokens)], seed, position, words)
    for i in range(len(tokens)):
        words[i] = words[i * LANES + tokens[i] % LANES]


@part
def _reach(scaled: Floats, words: NDArray[np.uint32], reaches: Floats) -> None:
    """Write a bound above each score; see `gumbel._reach`."""
    levels = np.empty(_COLUMNS, np.float32)
    bits = levels.view(np.int32)
    for i in range(len(scaled)):
        levels[i] = np.int32(words[i] >> np.uint32(1))
    for i in range(len(scaled)):
        reaches[i] = scaled[i] + (OFFSET - np.float32(bits[i]) * UNIT)
