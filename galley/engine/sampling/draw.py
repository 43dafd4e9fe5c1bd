"""Sample tokens on the CPU: process logits with each position's history, then take the Gumbel-max.

Each row is processed by itself, so its token is a function of its logits, its history and the seed, and of no
other row. A draw begins at its first row and goes on with the row after the draft token that was drawn, so
only one path of a tree is sampled.

Order of processing: grammar mask, logit_bias, min_tokens (masks the stop tokens), repetition penalty,
frequency and presence penalty, temperature, top_k, top_p, min_p. Ties are ordered by (logit descending, id
ascending): top_k keeps exactly k, top_p the shortest such prefix that reaches its mass, and of equal scores
the lowest id wins. min_p is relative to the largest probability.

The winner is argmax of float64(scaled logit) + gumbel(seed, position, token) (galley/core/noise.py). Noise
is bounded, so most tokens cannot win whatever their noise is: the kernels find the same winner with less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.core import noise
from galley.core.errors import Broken, GalleyError
from galley.core.noise import LANES
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, GrowingTokens, Sampled, TokenRange
from galley.engine.cpu.kernels import openmp, ops
from galley.engine.cpu.kernels.compile import compile_kernels
from galley.engine.sampling import allowed, gumbel, kernels, largest, layout
from galley.engine.sampling.allowed import allowed_rows
from galley.engine.sampling.layout import (
    DRAW,
    NOTHING,
    Floats,
    Ids,
    Scratch,
    has_penalties,
    kernel_temperature,
    least_logit,
    masked_positions,
    no_maximum,
)

Outcome = Sampled | GalleyError

SOURCES = (ops, noise, openmp, allowed, gumbel, largest, layout)

# Time a logit costs, at least.
_LOGIT_NS = 0.3


def check_rows(rows: int, draws: Sequence[Draw]) -> None:
    expected = sum(len(draw.draft_tokens) + 1 for draw in draws)
    if rows != expected:
        raise Broken(f"logits: must have {expected} rows for these draws, got {rows}")
    for draw in draws:
        if draw.parents and len(draw.parents) != len(draw.draft_tokens):
            raise Broken(f"parents: must be {len(draw.draft_tokens)}, got {len(draw.parents)}")


def host_rows(logits: Tensor) -> Floats:
    return np.ascontiguousarray(logits.detach().float().numpy())


def draw_rows(rows: Floats, draws: Sequence[Draw]) -> list[Outcome]:
    """Sample rows of float32 `rows` [rows, vocab] for each draw, until no draft token is the one drawn.

    Each draw has len(draft_tokens) + 1 rows, in the order of `draws`. Logprobs are those before any
    processing. A row with NaN, or without a possible token, is bad: its draw ends before it, with the
    accepted draft tokens alone, so that no draft changes what is confirmed. A draw whose first row is bad
    gives Broken.
    """
    threads = openmp.worth(openmp.threads(), rows.size * _LOGIT_NS) if len(draws) > 1 else 1
    scratch = _scratch(threads, rows.shape[1], penalized=any(map(has_penalties, draws)))
    tokens, path = np.empty((2, len(rows)), dtype=np.int64)
    counts = np.empty(len(draws), dtype=np.int64)
    records, ids, biases = _pack(draws)
    _compiled()[0](threads, rows, records, ids, biases, allowed_rows(draws), tokens, path, counts, scratch)
    drawn = list(zip(draws, records["row"].tolist(), counts.tolist(), strict=True))
    listed = [
        (index, min(draw.logprobs, rows.shape[1]))
        for draw, first, count in drawn
        if draw.logprobs is not None
        for index in range(first, first + count)
    ]
    logprobs = _logprobs(rows, path, listed, tokens, scratch)
    return [_outcome(draw, tokens[first : first + count].tolist(), logprobs) for draw, first, count in drawn]


def _outcome(draw: Draw, tokens: list[int], logprobs: Iterator[PositionLogprobs | None]) -> Outcome:
    """Return the result of a draw; takes the entries of all its tokens off `logprobs`."""
    entries = [] if draw.logprobs is None else list(islice(logprobs, len(tokens)))
    if None in entries:
        tokens = tokens[: entries.index(None)]
    if not tokens:
        return no_maximum(draw)
    return Sampled(tuple(tokens), tuple(entry for entry in entries[: len(tokens)] if entry is not None))


def warm_up() -> None:
    """Compile the kernels, or load them from the cache: seconds that no step should wait for."""
    draw = Draw(SamplingParams(), (0,), 1, frozenset(), 0, logprobs=1)
    draw_rows(host_rows(torch.zeros(1, LANES)), [draw])


@cache
def _compiled() -> Sequence[Callable[..., None]]:
    functions = (kernels.draw_rows, kernels.list_likeliest)
    return compile_kernels("sampling", functions, (kernels, *SOURCES))


def _scratch(threads: int, vocab: int, *, penalized: bool) -> Scratch:
    blocks = -(-vocab // LANES)
    remembered = vocab if penalized else 0
    return Scratch(
        row=np.empty((threads, vocab), dtype=np.float32),
        scaled=np.full((threads, blocks * LANES), -np.inf, dtype=np.float32),
        weights=np.empty((threads, blocks * LANES), dtype=np.float32),
        blocks=np.empty((threads, blocks), dtype=np.uint64),
        seen=np.zeros((threads, remembered), dtype=np.bool_),
        counts=np.zeros((threads, remembered), dtype=np.int64),
        touched=np.zeros((threads, 1 + remembered), dtype=np.int64),
    )


def _pack(draws: Sequence[Draw]) -> tuple[NDArray[np.void], Ids, Floats]:
    """Return the draws' records (DRAW), their token ids end to end, and their biases."""
    records: list[tuple[float, ...]] = []
    row = 0
    ids: list[Collection[int]] = []
    biases: list[float] = []
    end = masks = 0
    for draw in draws:
        history: Collection[int] = draw.history if has_penalties(draw) else ()
        masked: Collection[int] = draw.stop_token_ids if masked_positions(draw) else ()
        parents = end + len(draw.draft_tokens)
        prompt = parents + len(draw.parents)
        output = prompt + min(draw.prompt_len, len(history))
        bias = prompt + len(history)
        mask = bias + len(draw.params.logit_bias)
        end = mask + len(masked)
        places = (row, parents, prompt, output, bias, mask, end, len(biases))
        records.append((*places, *draw_record(draw, masks)))
        masks += 0 if draw.allowed is None else len(draw.allowed)
        row += len(draw.draft_tokens) + 1
        ids += (draw.draft_tokens, draw.parents, history, draw.params.logit_bias, masked)
        biases += draw.params.logit_bias.values()
    return np.array(records, dtype=DRAW), _joined(ids, end), np.array(biases, dtype=np.float32)


def _joined(parts: Iterable[Collection[int]], length: int) -> Ids:
    joined, end = np.empty(length, dtype=np.int64), 0
    for part in filter(None, parts):
        start, end = end, end + len(part)
        if isinstance(part, GrowingTokens | TokenRange):
            part.copy_to(joined[start:end])
        else:
            joined[start:end] = np.fromiter(part, dtype=np.int64, count=len(part))
    return joined


def draw_record(draw: Draw, masks: int) -> tuple[float, ...]:
    """Return the fields of DRAW that do not say where its ids lie; its own masks begin at row `masks`."""
    params = draw.params
    return (
        params.seed,
        len(draw.history),
        masked_positions(draw),
        NOTHING if draw.allowed is None else masks,
        params.top_k,
        params.top_p,
        kernel_temperature(params),
        least_logit(params),
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        has_penalties(draw),
    )


def _logprobs(
    rows: Floats, path: Ids, listed: Sequence[tuple[int, int]], tokens: Ids, scratch: Scratch
) -> Iterator[PositionLogprobs | None]:
    """Yield the logprobs of each listed token, with the likeliest tokens of its row, as many as listed.

    Yields None for logits without a finite maximum.
    """
    if not listed:
        return
    indices, tops = np.array(listed, dtype=np.int64).T.copy()
    at = path[indices]
    norms = np.empty(len(at), dtype=np.float64)
    ids = np.zeros((len(at), tops.max()), dtype=np.int64)
    _compiled()[1](rows, at, tops, norms, ids, scratch)
    own = rows[at, tokens[indices]] - norms
    likeliest = rows[at[:, None], ids] - norms[:, None]  # [listed, top]
    for i, top in enumerate(tops.tolist()):
        best = zip(ids[i, :top].tolist(), likeliest[i, :top].tolist(), strict=True)
        yield None if math.isnan(norms[i]) else PositionLogprobs(float(own[i]), tuple(best))
