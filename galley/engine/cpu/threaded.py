"""Run a step on several threads, either all in each product, or each with sessions of its own.

Threads that share every product and loop meet at the end of each, hundreds of times a step. Beside other
busy processes, all then wait for the one that has lost its core. Threads that share out the sessions meet
once, but each reads all weights. Which is quicker is learnt from the steps (`trials`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.llama import LlamaForward
from galley.engine.cpu.trials import Trials
from galley.engine.pages import Span
from galley.engine.parallel.ranks import Ranks
from galley.engine.states import UNTOUCHED, Residuals

# Keys of a row whose attention costs about as much as its products.
_KEYS_OF_PRODUCTS = 1024
# Rows whose products cost about as much as reading the weights.
_ROWS_OF_WEIGHTS = 8
# Fewest rows of a part, and the most work of a part in equal ones.
_LEAST_ROWS = 3
_MOST_WORK = 1.4
# By how much steps of all threads must be quicker: those that wait take cores from other processes. Beside a
# single session, which decodes, that is its draft: it would come late.
_MARGIN, _MARGIN_OF_ONE = 1.1, 1.5
_ROWS_OF_PROMPTS = 32
# Parts are not even tried if they would use less than one in this many threads.
_LEAST_USE = 2


def threaded(whole: LlamaForward, ranks: Ranks) -> LlamaForward | ThreadedForward:
    """Return `whole`, or its steps on threads of their own too if it has several; ranks must act in step."""
    threads = whole.attention.threads
    return whole if threads == 1 or ranks.size > 1 else ThreadedForward(whole, threads)


class ThreadedForward:
    """A `Forward` over another one and up to `threads` twins of it, which share its weights and pool.

    A row's bits do not depend on the rows beside it nor on the number of threads, so they do not depend on
    how a step is run either.
    """

    def __init__(
        self, whole: LlamaForward, threads: int, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.kind = whole.kind
        self.attention = whole.attention
        self._whole = whole
        self._count = threads
        self._twins: list[LlamaForward] = []  # made when they are first used, as they take memory
        self._threads = ThreadPoolExecutor(threads, "part", initializer=openmp.use_one_thread)
        self._clock = clock
        self._trials: dict[tuple[int, int], Trials] = {}

    def __call__(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        residuals: Residuals = UNTOUCHED,
    ) -> Tensor:
        edges = divide(spans, self._count)
        if (len(edges) - 1) * _LEAST_USE < self._count:
            return self._whole(spans, tokens, logit_rows, residuals)
        trials = self._trials_of(len(edges) - 1, len(tokens))
        way, since = trials.choose(), self._clock()
        if way == 0:
            logits = self._in_parts(edges, spans, tokens, logit_rows, residuals)
        else:
            logits = self._whole(spans, tokens, logit_rows, residuals)
        weights = _ROWS_OF_WEIGHTS * _KEYS_OF_PRODUCTS
        trials.record(way, (self._clock() - since) / (weights + sum(map(_work, spans))))
        return logits

    def _trials_of(self, parts: int, rows: int) -> Trials:
        margin = _MARGIN_OF_ONE if parts == 1 and rows < _ROWS_OF_PROMPTS else _MARGIN
        return self._trials.setdefault((parts, rows.bit_length()), Trials(margin))

    def _in_parts(
        self,
        edges: Sequence[int],
        spans: Sequence[Span],
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        residuals: Residuals,
    ) -> Tensor:
        while len(self._twins) < len(edges) - 1:
            self._twins.append(self._whole.twin())
        starts = [0, *accumulate(span.rows for span in spans)]
        running, parts = [], []
        for twin, (first, last) in zip(self._twins, pairwise(edges), strict=False):
            begin, end = starts[first], starts[last]
            chosen = logit_rows[bisect_left(logit_rows, begin) : bisect_left(logit_rows, end)]
            own = [row - begin for row in chosen]
            parts.append(residuals.part(begin, end))
            step = spans[first:last], tokens[begin:end], own, parts[-1]
            running.append(self._threads.submit(_run, twin, *step))
        wait(running)  # all, also if one fails: the blocks of a failed step are used again
        results = [part.result() for part in running]
        # A part without logits has as many columns as the vocabulary, also if the head has fewer.
        logits = torch.cat([result for result in results if len(result)] or results[:1]).float()
        if residuals.layers:
            residuals.join(parts)
        return logits


@torch.inference_mode()
def _run(
    forward: LlamaForward,
    spans: Sequence[Span],
    tokens: Sequence[int],
    logit_rows: Sequence[int],
    residuals: Residuals,
) -> Tensor:
    return forward.run(spans, tokens, logit_rows, residuals)


def divide(spans: Sequence[Span], parts: int) -> list[int]:
    """Return the indices of `spans` between which each part lies: [0, len(spans)] for one part.

    Parts are of about equal work, at most `parts`; one if equal parts would be too small or cannot be had.
    """
    work = [0, *accumulate(map(_work, spans))]
    whole = [0, len(spans)]
    parts = min(parts, len(spans), sum(span.rows for span in spans) // _LEAST_ROWS)
    if parts < 2:
        return whole
    edges = [_nearest(work, work[-1] * part / parts) for part in range(parts)] + [len(spans)]
    most = max(work[last] - work[first] for first, last in pairwise(edges))
    is_even = most * parts <= work[-1] * _MOST_WORK
    return edges if is_even and len(set(edges)) == len(edges) else whole


def _work(span: Span) -> int:
    return span.rows * (span.end + _KEYS_OF_PRODUCTS)


def _nearest(rising: Sequence[int], value: float) -> int:
    """Return the index of the number nearest to `value`, which is between the first and the last."""
    above = bisect_left(rising, value)
    return above - 1 if above and value - rising[above - 1] < rising[above] - value else above
