"""Sample a draft token for each row of logits, and report the row's highest probability.

The tokens are those that `galley.engine.sampling.draw` samples if the same logits are spread over the whole
vocabulary, for less work: the head of a trained draft has rows for some tokens only.
"""

# ruff: noqa: PLR0913, PLR0917  # kernels take arrays, not objects

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from galley.core.noise import GUMBEL_MAX, LANES
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.kernels.compile import compile_kernels
from galley.engine.cpu.kernels.openmp import shared
from galley.engine.sampling.allowed import Words, allowed_rows, is_allowed
from galley.engine.sampling.draw import SOURCES, Outcome, draw_record
from galley.engine.sampling.gumbel import OFFSET, SLACK, UNIT, gumbel, philox
from galley.engine.sampling.largest import any_above, apply_filters, exponentials, likeliest
from galley.engine.sampling.layout import DRAW, NOTHING, Floats, Ids, no_maximum, part

# Time a logit costs, at least.
_LOGIT_NS = 2.0
# The places of a draw's ids, of which a plain draw has none.
_NO_IDS = (0,) * 8
_COLUMNS: Final = 64  # noise computed at once
_LOWEST: Final = np.float32(-np.inf)


def guess_rows(
    rows: Floats, draws: Sequence[Draw], columns: NDArray[np.int64] | None = None
) -> tuple[list[Outcome], list[float]]:
    """Sample one token per row of float32 `rows` [draws, columns]; every draw must be plain (`is_plain`).

    `columns` are their token ids in ascending order; None: the whole vocabulary. Also returns each row's
    highest probability among the allowed tokens, before any other processing. A row without a finite maximum
    gives Broken.
    """
    count, width = rows.shape
    tokens = np.arange(width) if columns is None else columns
    threads = openmp.worth(openmp.threads(), rows.size * _LOGIT_NS) if count > 1 else 1
    drawn, confidences = np.empty(count, np.int64), np.empty(count, np.float32)
    masks = accumulate((draw.allowed is not None for draw in draws), initial=0)
    records = np.array(
        [(*_NO_IDS, *draw_record(draw, mask)) for draw, mask in zip(draws, masks, strict=False)], dtype=DRAW
    )
    scratch = np.empty((threads, 2, width), np.float32)
    _compiled()(threads, rows, tokens, records, allowed_rows(draws), drawn, confidences, scratch)
    outcomes: list[Outcome] = [
        no_maximum(draw) if token == NOTHING else Sampled((token,), ())
        for draw, token in zip(draws, drawn.tolist(), strict=True)
    ]
    return outcomes, confidences.tolist()


def warm_up() -> None:
    guess_rows(np.zeros((1, 1), np.float32), [Draw(SamplingParams(), (0,), 1, frozenset(), 0)])


@cache
def _compiled() -> Callable[..., None]:
    return compile_kernels("guess", (guess_columns,), (sys.modules[__name__], *SOURCES))[0]


@shared
def _guess_some(
    thread: int,
    first: int,
    last: int,
    logits: Floats,
    tokens: Ids,
    draws: Any,
    allowed: Words,
    drawn: Ids,
    confidences: Floats,
    scratch: Floats,
) -> None:
    scaled, weights = scratch[thread, 0], scratch[thread, 1]
    for r in range(first, last):
        row, draw = logits[r], draws[r]
        if draw.allowed != NOTHING:
            for j in range(len(row)):
                scaled[j] = row[j] if is_allowed(tokens[j], allowed[draw.allowed]) else row[j] + _LOWEST
            row = scaled
        best = likeliest(row)
        drawn[r], confidences[r] = NOTHING, np.float32(0)
        if best != NOTHING:
            confidences[r] = np.float32(1.0 / exponentials(row, row[best], weights))
            drawn[r] = tokens[best]
        if best != NOTHING and draw.temperature > 0:
            largest = row[best]
            for j in range(len(row)):
                scaled[j] = (row[j] - largest) / draw.temperature
            apply_filters(scaled, weights, len(scaled), draw)
            drawn[r] = _noisiest(scaled, best, tokens, draw.seed, draw.position)


def guess_columns(
    threads: int,
    logits: Floats,
    tokens: Ids,
    draws: Any,
    allowed: Words,
    drawn: Ids,
    confidences: Floats,
    scratch: Floats,
) -> None:
    """Write to `drawn` the token that each row's draw samples from `logits` [rows, columns], or NOTHING.

    `tokens` [columns] are ascending ids. `confidences` [rows] get the highest probability at temperature 1,
    of the tokens that the draw's mask in `allowed` [rows, words] allows. scratch: float32 [threads, 2,
    columns].
    """
    _guess_some(threads, len(draws), logits, tokens, draws, allowed, drawn, confidences, scratch)


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
    levels = np.empty(_COLUMNS, np.float32)
    bits = levels.view(np.int32)
    for i in range(len(scaled)):
        levels[i] = np.int32(words[i] >> np.uint32(1))
    for i in range(len(scaled)):
        reaches[i] = scaled[i] + (OFFSET - np.float32(bits[i]) * UNIT)
