"""From logits to tokens: processing with the history of each position, then Gumbel-max, a step in one call.

Each row is worked on by itself, so that its token is a function of its logits, its history and the seed, and
of no other row. Order of processing: logit_bias, min_tokens (masks the stop tokens), repetition penalty,
frequency and presence penalty, temperature, top_k, top_p, min_p. Wherever tokens tie, the order is (logit
descending, id ascending): top_k keeps exactly k, top_p the shortest such prefix that reaches its mass, and of
equal scores the lowest id wins. min_p is relative to the largest probability.

The winner is argmax of float64(scaled logit) + gumbel(seed, position, token) (galley/core/noise.py). Noise
is bounded, so most tokens cannot win whatever theirs is: the kernels find the same winner with less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.core.errors import Broken, GalleyError
from galley.core.noise import LANES
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.engine.cpu.kernels import openmp
from galley.engine.sampling.compile import compiled
from galley.engine.sampling.layout import DRAW, Floats, Ids, Scratch

# What one logit costs, at least.
_LOGIT_NS = 0.3
# Temperatures beyond these would over- or underflow float32; they sample as these do.
COLDEST, HOTTEST = 1e-30, 1e30


def draw_all(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled | GalleyError]:
    """The model's own tokens of each draw, up to and with the first that differs from its guess.

    `logits` is float32 [rows, vocab], and is left as it is: each draw has len(guesses) + 1 rows, in the order
    of `draws`. Rows after a disagreement have a history that did not happen and are not looked at. Logprobs
    are of the logits before any processing. A row that has a NaN or leaves no token possible is bad: a draw
    ends before it, with the accepted guesses alone, so that no guess changes what is confirmed; it is Broken
    if its first row is bad. Other draws are not touched by it. Raises Broken if the rows are not the draws'.
    """
    ends = list(accumulate(len(draw.draft_tokens) + 1 for draw in draws))
    if logits.shape[0] != sum(ends[-1:]):
        raise Broken(f"{logits.shape[0]} rows of logits for {sum(ends[-1:])} to draw")
    if logits.device.type != "cpu":
        from galley.engine.cuda import sampling as device_sampling  # noqa: PLC0415  # which draws by this module

        return device_sampling.draw_all(logits, draws)
    return draw_rows(np.ascontiguousarray(logits.detach().float().numpy()), draws)


def draw_rows(rows: Floats, draws: Sequence[Draw]) -> list[Sampled | GalleyError]:
    """`draw_all` of rows that are on the host, and of which there are as many as the draws have."""
    ends = list(accumulate(len(draw.draft_tokens) + 1 for draw in draws))
    threads = openmp.worth(openmp.threads(), rows.size * _LOGIT_NS) if len(draws) > 1 else 1
    scratch = _scratch(threads, rows.shape[1], penalized=any(map(penalized, draws)))
    tokens, drawn = np.empty(len(rows), dtype=np.int64), np.empty(len(draws), dtype=np.int64)
    compiled().draw_rows(threads, rows, *_pack(draws), tokens, drawn, scratch)
    drawings = [
        _Drawing(draw, end - len(draw.draft_tokens) - 1, count)
        for draw, end, count in zip(draws, ends, drawn.tolist(), strict=True)
    ]
    listed = _logprobs(rows, [drawing for drawing in drawings if drawing.listed], tokens, scratch)
    return [drawing.outcome(tokens, listed) for drawing in drawings]


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache: seconds that no step should wait for."""
    draw_all(torch.zeros(1, LANES), [Draw(SamplingParams(), (0,), 1, frozenset(), 0, logprobs=1)])


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A draw, its first row, and how many tokens it gave: none if that row has no finite maximum."""

    draw: Draw
    first: int
    count: int

    @property
    def listed(self) -> bool:
        """Are there tokens whose logprobs are wanted?"""
        return self.count > 0 and self.draw.logprobs is not None

    def outcome(self, tokens: Ids, listed: Iterator[PositionLogprobs | None]) -> Sampled | GalleyError:
        """What the draw comes to; takes its own logprobs off `listed`."""
        # All of its own are taken, whether or not one of them is bad.
        entries = list(islice(listed, self.count)) if self.listed else []
        good = entries.index(None) if None in entries else self.count
        if good == 0:
            return no_maximum(self.draw)
        own = tuple(int(token) for token in tokens[self.first : self.first + good])
        return Sampled(own, tuple(entry for entry in entries[:good] if entry is not None))


def no_maximum(draw: Draw) -> Broken:
    """What a draw comes to whose first row is bad."""
    return Broken(f"the logits for position {len(draw.history)} have no finite maximum")


# --------------------------------------------------------------------------------- for the kernels --


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
    """The draws, their ids and their biases, as DRAW of the kernels says."""
    records: list[tuple[float, ...]] = []
    row = 0
    ids: list[Collection[int]] = []
    biases: list[float] = []
    end = 0
    for draw in draws:
        history: Collection[int] = draw.history if penalized(draw) else ()
        masked: Collection[int] = draw.stop_token_ids if masked_rows(draw) else ()
        prompt = end + len(draw.draft_tokens)
        output = prompt + min(draw.prompt_len, len(history))
        bias = prompt + len(history)
        mask = bias + len(draw.params.logit_bias)
        end = mask + len(masked)
        records.append((row, prompt, output, bias, mask, end, len(biases), *_record(draw)))
        row += len(draw.draft_tokens) + 1
        ids += (draw.draft_tokens, history, draw.params.logit_bias, masked)
        biases += draw.params.logit_bias.values()
    flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=end)
    return np.array(records, dtype=DRAW), flat, np.array(biases, dtype=np.float32)


def _record(draw: Draw) -> tuple[float, ...]:
    params = draw.params
    return (
        params.seed,
        len(draw.history),
        masked_rows(draw),
        params.top_k,
        params.top_p,
        0.0 if params.greedy else min(max(params.temperature, COLDEST), HOTTEST),
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        penalized(draw),
    )


def masked_rows(draw: Draw) -> int:
    """How many of the first rows are for positions before `min_tokens` of output, so without stop tokens."""
    if not draw.stop_token_ids:
        return 0
    return max(0, draw.min_tokens - (len(draw.history) - draw.prompt_len))


def penalized(draw: Draw) -> bool:
    """Does what stands in the history change the logits?"""
    params = draw.params
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


# --------------------------------------------------------------------------------------- logprobs --


def _logprobs(
    rows: Floats, drawings: Sequence[_Drawing], tokens: Ids, scratch: Scratch
) -> Iterator[PositionLogprobs | None]:
    """Of every token of `drawings`, in order; None where the logits have no finite maximum."""
    wanted = [
        (row, min(drawing.draw.logprobs or 0, rows.shape[1]))
        for drawing in drawings
        for row in range(drawing.first, drawing.first + drawing.count)
    ]
    if not wanted:
        return
    at, tops = np.array(wanted, dtype=np.int64).T.copy()
    norms = np.empty(len(at), dtype=np.float64)
    ids = np.zeros((len(at), tops.max()), dtype=np.int64)
    compiled().list_likeliest(rows, at, tops, norms, ids, scratch)
    own = rows[at, tokens[at]] - norms
    listed = rows[at[:, None], ids] - norms[:, None]
    for i, top in enumerate(tops.tolist()):
        best = zip(ids[i, :top].tolist(), listed[i, :top].tolist(), strict=True)
        yield None if math.isnan(norms[i]) else PositionLogprobs(float(own[i]), tuple(best))
