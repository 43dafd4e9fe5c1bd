"""From logits to tokens: processing with the history of each position, then Gumbel-max.

Each row is worked on by itself, so that its token is a function of its logits, its history and the seed, and
of no other row. Order of processing: logit_bias, min_tokens (masks the stop tokens), repetition penalty,
frequency and presence penalty, temperature, top_k, top_p, min_p. Wherever tokens tie, the order is (logit
descending, id ascending): top_k keeps exactly k, top_p the shortest such prefix that reaches its mass, and of
equal scores the lowest id wins. min_p is relative to the largest probability.

The winner is argmax of float64(scaled logit) + gumbel(seed, position, token) (services/core/noise.py). Noise
is bounded, so most tokens cannot win whatever theirs is: `_gumbel_argmax` finds the same winner with less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.core.errors import Broken
from services.core.noise import GUMBEL_MAX, GUMBEL_MIN, LANES, block_words, gumbel
from services.core.records import PositionLogprobs

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from services.core.params import SamplingParams

    Row = NDArray[np.float32]  # [vocab]
    Ids = NDArray[np.int64]

# Temperatures beyond these would over- or underflow float32; they sample as these do.
_COLDEST, _HOTTEST = 1e-30, 1e30
# Far above the rounding of the float32 arithmetic that prunes, on numbers below 64. Pruning less is safe.
_SLACK = 1e-3


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What, besides its logits, decides a session's next tokens.

    `tokens` are all confirmed ones from absolute position 0: `prompt_len` of the prompt, then the output.
    """

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    stop_token_ids: frozenset[int]
    min_tokens: int


def sample(logits: Tensor, context: SamplingContext, guesses: Sequence[int]) -> list[int]:
    """The model's own token at each position, up to and with the first that differs from its guess.

    `logits` is float32 [rows, vocab]; row i is for position len(context.tokens) + i, given `guesses[:i]`, and
    rows <= len(guesses) + 1. Rows after a disagreement have a history that did not happen, so they are not
    looked at: the answer has at least one token and at most `rows`. Raises Broken if a row that is looked at
    has a NaN or leaves no token possible.
    """
    if not 1 <= logits.shape[0] <= len(guesses) + 1:
        raise Broken(f"{logits.shape[0]} rows of logits for {len(guesses)} guesses")
    rows: NDArray[np.float32] = logits.detach().float().cpu().numpy()  # [rows, vocab]
    history = _History(context, rows.shape[1])
    sampled: list[int] = []
    for i, row in enumerate(rows):
        sampled.append(_sample_row(row, context, history, i))
        if i < len(guesses) and sampled[i] != guesses[i]:
            break
        history.append(sampled[i])
    return sampled


def logprobs(logits: Tensor, chosen: Sequence[int], top: int) -> list[PositionLogprobs]:
    """Log-probabilities of `chosen[i]` and of the `top` likeliest tokens by row i of `logits`, unprocessed.

    `logits` is float32 [rows, vocab], rows >= len(chosen). Raises Broken if a row has a NaN.
    """
    rows: NDArray[np.float32] = logits[: len(chosen)].detach().float().cpu().numpy()
    return [_row_logprobs(row, token, top) for row, token in zip(rows, chosen, strict=True)]


class _History:
    """Which tokens stand before a position, and how often, as far as the penalties want to know."""

    def __init__(self, context: SamplingContext, vocab: int) -> None:
        self._params = context.params
        self._seen: NDArray[np.bool_] | None = None  # [vocab], in prompt or output
        self._counts: NDArray[np.int64] | None = None  # [vocab], in the output
        if self._params.repetition_penalty != 1.0:
            self._seen = np.zeros(vocab, dtype=np.bool_)
            self._seen[_inside(context.tokens, vocab)] = True
        if self._params.frequency_penalty != 0.0 or self._params.presence_penalty != 0.0:
            output = _inside(context.tokens[context.prompt_len :], vocab)
            self._counts = np.bincount(output, minlength=vocab)

    @property
    def matters(self) -> bool:
        """Whether any penalty is set."""
        return self._seen is not None or self._counts is not None

    def append(self, token: int) -> None:
        """`token` is accepted: it is history for the rows that follow."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    def penalize(self, row: Row) -> None:
        """Apply the penalties to `row`, in place."""
        if self._seen is not None:
            tokens = np.flatnonzero(self._seen)
            factor = np.float32(self._params.repetition_penalty)
            row[tokens] = np.where(row[tokens] > 0, row[tokens] / factor, row[tokens] * factor)
        if self._counts is not None:
            tokens = np.flatnonzero(self._counts)
            row[tokens] -= np.float32(self._params.frequency_penalty) * self._counts[tokens].astype(
                np.float32
            )
            row[tokens] -= np.float32(self._params.presence_penalty)


def _inside(tokens: Collection[int], vocab: int) -> Ids:
    """`tokens` as an array, less those beyond these logits: a draft's vocabulary may be padded otherwise."""
    ids = np.fromiter(tokens, dtype=np.int64, count=len(tokens))
    return ids[(ids >= 0) & (ids < vocab)]


def _sample_row(row: Row, context: SamplingContext, history: _History, ahead: int) -> int:
    """The token for the position `ahead` of the first unconfirmed one."""
    row = _processed(row, context, history, ahead)
    best = int(row.argmax())  # the first NaN, if there is one
    if not math.isfinite(row[best]):
        raise Broken(f"the logits for position {len(context.tokens) + ahead} have no finite maximum")
    if context.params.greedy:
        return best
    scaled = _filtered(row, context.params)
    return _gumbel_argmax(scaled, context.params.seed, len(context.tokens) + ahead)


def _processed(row: Row, context: SamplingContext, history: _History, ahead: int) -> Row:
    """`row` after bias, mask and penalties; `row` itself if none is set."""
    bias = context.params.logit_bias
    output_len = len(context.tokens) - context.prompt_len + ahead
    masked = context.stop_token_ids if output_len < context.min_tokens else frozenset[int]()
    if not (bias or masked or history.matters):
        return row
    row = row.copy()
    for token in _inside(bias, len(row)):
        row[token] += np.float32(bias[int(token)])
    row[_inside(masked, len(row))] = -np.inf
    history.penalize(row)
    return row


def _filtered(row: Row, params: SamplingParams) -> Row:
    """`row` less its maximum, divided by the temperature, with what top_k, top_p and min_p drop at -inf.

    Taking the maximum off changes no probability; the coldest temperature then overflows to -inf at worst.
    """
    temperature = min(max(params.temperature, _COLDEST), _HOTTEST)
    with np.errstate(over="ignore"):
        scaled: Row = (row - row.max()) / np.float32(temperature)
    if params.top_k > 0:
        _keep_first(scaled, params.top_k)
    if params.top_p < 1.0:
        _keep_first(scaled, _nucleus_size(scaled, params.top_p))
    if params.min_p > 0.0:
        scaled[scaled < np.float32(math.log(params.min_p))] = -np.inf
    return scaled


def _keep_first(row: Row, count: int) -> None:
    """Put all but the first `count` tokens, by (logit descending, id ascending), to -inf, in place."""
    if count >= len(row):
        return
    last = _nth_largest(row, count)
    spare = count - int(np.count_nonzero(row > last))
    dropped_equals = np.flatnonzero(row == last)[spare:]
    row[row < last] = -np.inf
    row[dropped_equals] = -np.inf


def _nucleus_size(scaled: Row, top_p: float) -> int:
    """How many of the likeliest tokens it takes to reach `top_p` of the probability; at least 1.

    Tokens below an even share of the rest, (1 - top_p) / vocab, have less than the rest together, so they
    stand beyond the cut and need no sorting.
    """
    weights = np.exp(scaled)
    total = float(weights.sum(dtype=np.float64))
    even_share = np.float32((1.0 - top_p) * total / len(weights))
    likely = np.sort(weights[weights >= even_share])[::-1]
    return int(np.searchsorted(likely.cumsum(dtype=np.float64), top_p * total)) + 1


def _nth_largest(row: Row, n: int) -> np.float32:
    """The n-th largest of `row`, 1 <= n <= len(row).

    No less than the n-th largest among the maxima of disjoint segments: below that, nothing is partitioned.
    """
    width = len(row) // (2 * n)
    if width > 1:
        maxima = row[: 2 * n * width].reshape(2 * n, width).max(axis=1)
        row = row[row >= np.partition(maxima, n)[n]]
    found: np.float32 = np.partition(row, len(row) - n)[len(row) - n]
    return found


def _gumbel_argmax(scaled: Row, seed: int, position: int) -> int:
    """argmax of float64(scaled) + noise, the lowest id of equals; `scaled` has maximum 0.

    Prunes twice, in float32 with slack, then decides exactly. Before the noise: the likeliest token scores at
    least GUMBEL_MIN, so no token below GUMBEL_MIN - GUMBEL_MAX can win. Before the float64 logarithms: noise
    is below -log(t), so that `reach` is above every score, and a token whose reach is less than a score that
    is there has lost.
    """
    if len(scaled) % LANES:
        scaled = np.concatenate((scaled, np.full(-len(scaled) % LANES, -np.inf, dtype=np.float32)))
    possible = scaled >= np.float32(GUMBEL_MIN - GUMBEL_MAX - _SLACK)
    blocks = np.flatnonzero(possible.view(np.uint32))  # four bools at a time: a block
    logits = scaled.reshape(-1, LANES).take(blocks, axis=0).ravel()  # [4 blocks]
    noise_words = block_words(seed, position, blocks).ravel()
    reach = logits - np.log((noise_words + np.float32(0.5)) * np.float32(2.0**-32))
    far = int(reach.argmax())
    floor = float((logits[far] + gumbel(noise_words[far : far + 1]))[0])
    at = np.flatnonzero(reach >= np.float32(floor - _SLACK))  # in ascending order of token ids
    scores = logits[at].astype(np.float64) + gumbel(noise_words[at])
    winner = int(at[scores.argmax()])  # the first of equals
    return int(blocks[winner // LANES]) * LANES + winner % LANES


def _row_logprobs(row: Row, token: int, top: int) -> PositionLogprobs:
    best = row.max()
    if not math.isfinite(best):
        raise Broken("the logits have no finite maximum")
    norm = float(best) + math.log(float(np.exp(row - best).sum(dtype=np.float64)))
    listed = tuple((int(i), float(row[i]) - norm) for i in _first(row, min(top, len(row))))
    return PositionLogprobs(float(row[token]) - norm, listed)


def _first(row: Row, count: int) -> Ids:
    """The first `count` tokens by (logit descending, id ascending), in that order; count <= len(row)."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    likely = np.flatnonzero(row >= _nth_largest(row, count))
    return likely[np.lexsort((likely, -row[likely]))][:count]
