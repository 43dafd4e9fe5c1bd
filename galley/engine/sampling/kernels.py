"""The compiled part of sampling: all rows of a step in one call, without the interpreter lock.

Plain loops over one row at a time, small enough to stay in the CPU's cache. All but the few that pick single
tokens are simple enough for the compiler to vectorise.
"""

# ruff: noqa: PLR0913, PLR0917  # kernels take arrays, not objects

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from galley.engine.cpu.kernels.openmp import shared
from galley.engine.sampling.allowed import Words, copy_allowed
from galley.engine.sampling.gumbel import noisiest
from galley.engine.sampling.largest import apply_filters, exponentials, likeliest, list_first
from galley.engine.sampling.layout import NOTHING, Floats, Ids, Scratch, of_thread, part


@shared
def _draw_some(
    thread: int,
    first: int,
    last: int,
    logits: Floats,
    draws: Any,
    ids: Ids,
    biases: Floats,
    allowed: Words,
    tokens: Ids,
    path: Ids,
    drawn: Ids,
    scratch: Scratch,
) -> None:
    own = of_thread(scratch, thread)
    for d in range(first, last):
        draw = draws[d]
        start = draws[d - 1].end if d > 0 else 0
        end = draw.row + draw.parents - start + 1
        drawn[d] = _draw(
            logits[draw.row : end],
            draw,
            ids[start : draw.end],
            biases,
            allowed,
            tokens[draw.row : end],
            path[draw.row : end],
            start,
            own,
        )


def draw_rows(
    threads: int,
    logits: Floats,
    draws: Any,
    ids: Ids,
    biases: Floats,
    allowed: Words,
    tokens: Ids,
    path: Ids,
    drawn: Ids,
    scratch: Scratch,
) -> None:
    """Sample the rows of `logits` [rows, vocab] that each draw comes to, until no draft token has its token.

    A row whose logits have no finite maximum also ends its draw, without a token. A draw's tokens go to
    `tokens` [rows] from its first row on, the rows that they were sampled from to `path` [rows], and their
    number to `drawn` [draws].
    """
    _draw_some(threads, len(draws), logits, draws, ids, biases, allowed, tokens, path, drawn, scratch)


@part
def _draw(
    logits: Floats,
    draw: Any,
    ids: Ids,
    biases: Floats,
    allowed: Words,
    tokens: Ids,
    path: Ids,
    at: int,
    scratch: Scratch,
) -> int:
    """Sample one draw; return how many tokens. `ids` are its own, which start at `at` of all ids.

    The row after draft token i is row i + 1. A token's noise, penalties and mask are those of its position
    and of the draft tokens on its path.
    """
    drafts, parents = ids[: draw.parents - at], ids[draw.parents - at : draw.prompt - at]
    if draw.penalized:
        _remember(ids[draw.prompt - at : draw.output - at], 0, scratch)
        _remember(ids[draw.output - at : draw.bias - at], 1, scratch)
    i, count = 0, 0
    while True:
        row, is_masked = logits[i], count < draw.masked_positions
        is_constrained = draw.allowed != NOTHING
        if draw.penalized or draw.mask > draw.bias or is_masked or is_constrained:
            row = scratch.row
            if is_constrained:
                copy_allowed(logits[i], allowed[draw.allowed + i], row)
            else:
                for j in range(len(row)):
                    row[j] = logits[i, j]
            _edit(row, draw, ids[draw.bias - at :], biases, is_masked, scratch)
        tokens[count] = _choose(row, draw, draw.position + np.uint64(count), scratch)
        if tokens[count] == NOTHING:
            break
        path[count] = draw.row + i
        count += 1
        child = _child(drafts, parents, i - 1, tokens[count - 1])
        if child == NOTHING:
            break
        if draw.penalized:
            _remember(tokens[count - 1 : count], 1, scratch)
        i = child + 1
    _forget(scratch)
    return count


@part
def _child(drafts: Ids, parents: Ids, node: int, token: int) -> int:
    """Return the draft token after `node` that is `token`, or NOTHING; node -1 is before all of them."""
    if len(parents) == 0:
        return node + 1 if node + 1 < len(drafts) and drafts[node + 1] == token else NOTHING
    for child in range(node + 1, len(drafts)):
        if parents[child] == node and drafts[child] == token:
            return child
    return NOTHING


@part
def _remember(tokens: Ids, times: int, scratch: Scratch) -> None:
    for token in tokens:
        if not 0 <= token < len(scratch.seen):
            continue
        if not scratch.seen[token]:
            scratch.seen[token] = True
            scratch.touched[0] += 1
            scratch.touched[scratch.touched[0]] = token
        scratch.counts[token] += times


@part
def _forget(scratch: Scratch) -> None:
    for i in range(1, 1 + scratch.touched[0]):
        token = scratch.touched[i]
        scratch.seen[token] = False
        scratch.counts[token] = 0
    scratch.touched[0] = 0


@part
def _edit(row: Floats, draw: Any, ids: Ids, biases: Floats, masked: bool, scratch: Scratch) -> None:
    """Apply bias, mask and penalties in place; `ids` are the draw's from its biases on."""
    count = draw.mask - draw.bias
    for i in range(count):
        if 0 <= ids[i] < len(row):
            row[ids[i]] += biases[draw.bias_values + i]
    if masked:
        for token in ids[count : draw.end - draw.bias]:
            if 0 <= token < len(row):
                row[token] = -np.inf
    for i in range(1, 1 + scratch.touched[0]):
        token = scratch.touched[i]
        factor = draw.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        if scratch.counts[token] > 0:
            row[token] -= draw.frequency_penalty * np.float32(scratch.counts[token])
            row[token] -= draw.presence_penalty


@part
def _choose(row: Floats, draw: Any, position: np.uint64, scratch: Scratch) -> int:
    best = likeliest(row)
    if best == NOTHING or draw.temperature == 0:
        return best
    scaled, largest = scratch.scaled, row[best]
    for j in range(len(row)):
        scaled[j] = (row[j] - largest) / draw.temperature
    apply_filters(scaled, scratch.weights, len(row), draw)
    return noisiest(scaled, best, draw.seed, position, scratch.blocks)


def list_likeliest(
    logits: Floats, rows: Ids, tops: Ids, norms: NDArray[np.float64], ids: Ids, scratch: Scratch
) -> None:
    """Write the log-sum-exp of each of `rows` to `norms`, and its likeliest tokens to `ids` [rows, top].

    Lists tops[i] tokens of row i. The norm is NaN where the logits have no finite maximum.
    """
    weights = scratch.weights[0]
    for i in range(len(rows)):
        row = logits[rows[i]]
        best = likeliest(row)
        norms[i] = np.nan
        if best != NOTHING:
            norms[i] = float(row[best]) + math.log(exponentials(row, row[best], weights))
            list_first(row, ids[i, : tops[i]])
