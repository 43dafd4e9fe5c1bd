"""Sample a draft token for each row of logits, or list the first candidates of each.

The tokens are those that `galley.engine.sampling.draw` samples if the same logits are spread over the whole
vocabulary, for less work: the head of a trained draft has rows for some tokens only.
"""

# ruff: noqa: PLR0913, PLR0917  # kernels take arrays, not objects

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from galley.core.errors import GalleyError
from galley.core.noise import GUMBEL_MAX, LANES
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.core.trees import MAX_WIDTH
from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.kernels.compile import compile_kernels
from galley.engine.cpu.kernels.openmp import shared
from galley.engine.sampling.allowed import Words, allowed_rows, is_allowed
from galley.engine.sampling.draw import SOURCES, Outcome, draw_record
from galley.engine.sampling.gumbel import OFFSET, SLACK, UNIT, gumbel, philox
from galley.engine.sampling.largest import any_above, apply_filters, exponentials, likeliest, list_first
from galley.engine.sampling.layout import DRAW, NOTHING, Floats, Ids, no_maximum, part

# A candidate for a position, and its weight in [0, 1]. A greedy one's is its probability. A sampled one's is
# its share of exp(score / SOFTNESS) among the first LISTED candidates. The target's scores differ from the
# draft's, so the gaps between scores tell more than the draft's probabilities do.
ListedToken: TypeAlias = tuple[int, float]
ListOutcome: TypeAlias = "list[ListedToken] | GalleyError"

LISTED: Final = MAX_WIDTH
SOFTNESS: Final = 3.0

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
    drawn, confidences = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    threads, *inputs, scratch = _inputs(rows, draws, columns)
    _compiled()[0](threads, *inputs, drawn, confidences, scratch)
    outcomes: list[Outcome] = [
        no_maximum(draw) if token == NOTHING else Sampled((token,), ())
        for draw, token in zip(draws, drawn.tolist(), strict=True)
    ]
    return outcomes, confidences.tolist()


def list_rows(
    rows: Floats, draws: Sequence[Draw], columns: NDArray[np.int64] | None, count: int
) -> list[ListOutcome]:
    """Return the first `count` <= LISTED candidates of each row, or as many as there are, by score.

    The score is the logit, over the temperature, plus the noise. What the draw filters out, such as by top_p,
    is no candidate. The other arguments, and the first candidate, are those of `guess_rows`.
    """
    listed = np.empty((len(rows), LISTED), np.int64)
    weights = np.empty(listed.shape, np.float64)
    threads, *inputs, scratch = _inputs(rows, draws, columns)
    _compiled()[1](threads, *inputs, listed, weights, scratch)
    return [
        no_maximum(draw)
        if some[0] == NOTHING
        else [(token, weight) for token, weight in zip(some, of, strict=True) if token != NOTHING][:count]
        for draw, some, of in zip(draws, listed.tolist(), weights.tolist(), strict=True)
    ]


def _inputs(
    rows: Floats, draws: Sequence[Draw], columns: NDArray[np.int64] | None
) -> tuple[int, Floats, Ids, NDArray[np.void], Words, Floats]:
    """Return what the kernels take: threads, logits, tokens, draws, masks, and last the scratch space."""
    count, width = rows.shape
    tokens = np.arange(width) if columns is None else columns
    threads = openmp.worth(openmp.threads(), rows.size * _LOGIT_NS) if count > 1 else 1
    masks = accumulate((draw.allowed is not None for draw in draws), initial=0)
    records = np.array(
        [(*_NO_IDS, *draw_record(draw, mask)) for draw, mask in zip(draws, masks, strict=False)], dtype=DRAW
    )
    return threads, rows, tokens, records, allowed_rows(draws), np.empty((threads, 2, width), np.float32)


def warm_up() -> None:
    draw = Draw(SamplingParams(), (0,), 1, frozenset(), 0)
    guess_rows(np.zeros((1, 1), np.float32), [draw])
    list_rows(np.zeros((1, 1), np.float32), [draw], None, 1)


@cache
def _compiled() -> Sequence[Callable[..., None]]:
    return compile_kernels("guess", (guess_columns, list_columns), (sys.modules[__name__], *SOURCES))


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
        row, draw = _allowed_row(logits[r], draws[r], tokens, allowed, scaled), draws[r]
        best = likeliest(row)
        drawn[r], confidences[r] = NOTHING, np.float32(0)
        if best != NOTHING:
            confidences[r] = np.float32(1.0 / exponentials(row, row[best], weights))
            drawn[r] = tokens[best]
        if best != NOTHING and draw.temperature > 0:
            _scale(row, row[best], draw, scaled, weights)
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
def _allowed_row(row: Floats, draw: Any, tokens: Ids, allowed: Words, room: Floats) -> Floats:
    """Return the row; if the draw has a mask, in `room` with -inf added to what that does not allow."""
    if draw.allowed == NOTHING:
        return row
    for j in range(len(row)):
        room[j] = row[j] if is_allowed(tokens[j], allowed[draw.allowed]) else row[j] + _LOWEST
    return room


@part
def _scale(row: Floats, largest: np.float32, draw: Any, scaled: Floats, weights: Floats) -> None:
    """Write the logits, minus the largest, over the temperature, to `scaled`, and filter them."""
    for j in range(len(row)):
        scaled[j] = (row[j] - largest) / draw.temperature
    apply_filters(scaled, weights, len(scaled), draw)


@shared
def _list_some(
    thread: int,
    first: int,
    last: int,
    logits: Floats,
    tokens: Ids,
    draws: Any,
    allowed: Words,
    listed: Ids,
    weights: NDArray[np.float64],
    scratch: Floats,
) -> None:
    scaled, room = scratch[thread, 0], scratch[thread, 1]
    for r in range(first, last):
        row, draw = _allowed_row(logits[r], draws[r], tokens, allowed, scaled), draws[r]
        best = likeliest(row)
        listed[r, :] = NOTHING
        weights[r, :] = -np.inf
        count = min(listed.shape[1], len(row))
        if best == NOTHING:
            continue
        if draw.temperature > 0:
            _scale(row, row[best], draw, scaled, room)
            _list_noisiest(scaled, tokens, draw.seed, draw.position, listed[r, :count], weights[r, :count])
            _weigh(weights[r])
        else:
            total = exponentials(row, row[best], room)
            list_first(row, listed[r, :count])
            for i in range(count):
                weights[r, i] = math.exp(row[listed[r, i]] - row[best]) / total
        for i in range(count):
            listed[r, i] = tokens[listed[r, i]] if weights[r, i] > 0 else NOTHING


def list_columns(
    threads: int,
    logits: Floats,
    tokens: Ids,
    draws: Any,
    allowed: Words,
    listed: Ids,
    weights: NDArray[np.float64],
    scratch: Floats,
) -> None:
    """Write the first candidates of each row, then NOTHING, to `listed` [rows, most], and their weights.

    The other arguments are those of `guess_columns`. A row without a finite maximum gets no candidate.
    """
    _list_some(threads, len(draws), logits, tokens, draws, allowed, listed, weights, scratch)


@part
def _weigh(scores: NDArray[np.float64]) -> None:
    """Turn falling scores into weights: see `ListedToken`. The score -inf becomes 0."""
    first, total = scores[0], 0.0
    for i in range(len(scores)):
        scores[i] = math.exp((scores[i] - first) / SOFTNESS)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total


@part
def _list_noisiest(
    scaled: Floats,
    tokens: Ids,
    seed: np.uint64,
    position: np.uint64,
    listed: Ids,
    scores: NDArray[np.float64],
) -> None:
    """List the columns with the highest scores, the highest first; see `_noisiest`, which finds one."""
    blocks, words = np.empty(_COLUMNS, np.uint64), np.empty(_COLUMNS * LANES, np.uint32)
    reaches = np.empty(_COLUMNS, np.float32)
    likely = np.empty(len(listed), np.int64)
    list_first(scaled, likely)
    for i in range(len(likely)):
        column = int(likely[i])
        _draw_words(tokens[column : column + 1], seed, position, blocks, words)
        _insert(column, float(scaled[column]) + gumbel(words[0]), listed, scores)
    for start in range(0, len(scaled), _COLUMNS):
        chunk = scaled[start : start + _COLUMNS]
        if not any_above(chunk, np.float32(scores[-1] - GUMBEL_MAX - SLACK)):
            continue
        _draw_words(tokens[start : start + len(chunk)], seed, position, blocks, words)
        _reach(chunk, words, reaches)
        if not any_above(reaches[: len(chunk)], np.float32(scores[-1] - SLACK)):
            continue
        for i in range(len(chunk)):
            if reaches[i] > scores[-1] - SLACK and not (likely == start + i).any():
                _insert(start + i, float(chunk[i]) + gumbel(words[i]), listed, scores)


@part
def _insert(column: int, score: float, listed: Ids, scores: NDArray[np.float64]) -> None:
    """Insert a column unless all listed ones have higher scores, or equal ones and come first."""
    at = len(listed)
    while at > 0 and (score > scores[at - 1] or (score == scores[at - 1] and column < listed[at - 1])):
        at -= 1
    for i in range(len(listed) - 1, at, -1):
        listed[i], scores[i] = listed[i - 1], scores[i - 1]
    if at < len(listed):
        listed[at], scores[at] = column, score


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
