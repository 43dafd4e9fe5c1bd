"""Sampling as it is defined, a row at a time over the whole vocabulary, in the kernels' float32 steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from galley.core import noise
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.engine.sampler import draw_all

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def sample(logits: Tensor, draw: Draw, guesses: Sequence[int] = ()) -> list[int]:
    (outcome,) = draw_all(logits, [replace(draw, draft_tokens=tuple(guesses))])
    if not isinstance(outcome, Sampled):
        raise outcome
    return list(outcome.tokens)


def expected(logits: Floats, draw: Draw) -> Sampled | None:
    """Return what a draw is to give: the walk through its tree, a token at a time."""
    tokens: list[int] = []
    rows: list[int] = []
    at: list[int] = [0]
    while at:
        token = choose(logits, at[0], draw, tokens)
        if token is None or (draw.logprobs is not None and not np.isfinite(logits[at[0]].max())):
            break
        tokens.append(token)
        rows.append(at[0])
        at = [row for row in rows_after(draw, at[0]) if draw.draft_tokens[row - 1] == token]
    if not tokens:
        return None
    if draw.logprobs is None:
        return Sampled(tuple(tokens))
    pairs = zip(logits[rows], tokens, strict=True)
    return Sampled(tuple(tokens), tuple(_logprobs(row, token, draw.logprobs) for row, token in pairs))


def rows_after(draw: Draw, row: int) -> list[int]:
    """Return the rows of the draft tokens that follow that of `row`, or of the first ones for row 0."""
    parents = draw.parents or range(-1, len(draw.draft_tokens) - 1)
    return [node + 1 for node, parent in enumerate(parents) if parent + 1 == row]


def _logprobs(row: Floats, token: int, top: int) -> PositionLogprobs:
    wide = row.astype(np.float64)
    norm = float(wide.max() + np.log(np.exp(wide - wide.max()).sum()))
    return PositionLogprobs(
        float(wide[token]) - norm, tuple((int(i), float(wide[i]) - norm) for i in _ranked(row)[:top])
    )


def allowing(draw: Draw, rows: Sequence[Collection[int]], vocab: int) -> Draw:
    """Return the draw with masks that allow these tokens in each row, as a grammar gives them."""
    bits = np.zeros((len(rows), -(-vocab // 32) * 32), dtype=np.uint8)
    for row, tokens in zip(bits, rows, strict=True):
        row[list(tokens)] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    return replace(draw, allowed=words.astype(np.uint32))


def _is_allowed(draw: Draw, row: int, token: int) -> bool:
    return draw.allowed is None or bool(int(draw.allowed[row, token // 32]) >> token % 32 & 1)


def choose(logits: Floats, index: int, draw: Draw, accepted: Sequence[int]) -> int | None:
    """Return the token of a row, which follows the `accepted` draft tokens; None if it has no maximum."""
    row = logits[index].copy()
    excluded = [token for token in range(len(row)) if not _is_allowed(draw, index, token)]
    with np.errstate(invalid="ignore"):
        row[excluded] -= np.inf  # NaN stays, and +inf becomes NaN
    row = _processed(row, draw, [*draw.history[draw.prompt_len :], *accepted])
    if not np.isfinite(row.max()):
        return None
    if draw.params.is_greedy:
        return int(row.argmax())
    position = len(draw.history) + len(accepted)
    words = noise.words(draw.params.seed, position, range(len(row)))
    return int((_filtered(row, draw.params).astype(np.float64) + noise.gumbel(words)).argmax())


def _processed(row: Floats, draw: Draw, output: Sequence[int]) -> Floats:
    params, row = draw.params, row.copy()
    inside = range(len(row))
    for token in inside:
        row[token] += np.float32(params.logit_bias.get(token, 0.0))
        if len(output) < draw.min_tokens and token in draw.stop_token_ids:
            row[token] = -np.inf
    factor = np.float32(params.repetition_penalty)
    for token in {*draw.history, *output} & {*inside}:
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in {*output} & {*inside}:
        row[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        row[token] -= np.float32(params.presence_penalty)
    return row


def _filtered(row: Floats, params: SamplingParams) -> Floats:
    with np.errstate(over="ignore"):
        scaled: Floats = (row - row.max()) / np.float32(min(max(params.temperature, 1e-30), 1e30))
    if params.top_k > 0:
        scaled[_ranked(scaled)[params.top_k :]] = -np.inf
    if params.top_p < 1.0:
        ranked = _ranked(scaled)
        mass = np.exp(scaled[ranked].astype(np.float64)).cumsum()
        scaled[ranked[int(np.searchsorted(mass, params.top_p * mass[-1])) + 1 :]] = -np.inf
    if params.min_p > 0.0:
        scaled[scaled < np.float32(math.log(params.min_p))] = -np.inf
    return scaled


def _ranked(row: Floats) -> Ids:
    return np.lexsort((np.arange(len(row)), -row))
