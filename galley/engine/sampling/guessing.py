"""Sample a draft token for each row of logits, and how confident the draft is in it.

The result is what `galley.engine.sampling.draw` samples of the same logits spread over the whole vocabulary,
for less work: the head of a trained draft has rows for some tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.kernels.compile import compile_kernels
from galley.engine.sampling import guess_kernels
from galley.engine.sampling.draw import SOURCES, Outcome, draw_record
from galley.engine.sampling.layout import DRAW, NOTHING, Floats
from galley.engine.sampling.rules import no_maximum

# Time a logit costs, at least.
_LOGIT_NS = 2.0
# The places of a draw's ids, of which a plain draw has none.
_NO_IDS = (0,) * 7


def guess_rows(
    rows: Floats, draws: Sequence[Draw], columns: NDArray[np.int64] | None = None
) -> tuple[list[Outcome], list[float]]:
    """Sample one token a row of float32 `rows` [draws, columns], each of a draw that `is_plain`.

    `columns` are the rising token ids that the columns stand for; None: the whole vocabulary. Also returns
    the probability of each row's likeliest token before any processing. A row without a finite maximum gives
    Broken.
    """
    count, width = rows.shape
    tokens = np.arange(width) if columns is None else columns
    threads = openmp.worth(openmp.threads(), rows.size * _LOGIT_NS) if count > 1 else 1
    drawn, confidences = np.empty(count, np.int64), np.empty(count, np.float32)
    records = np.array([(*_NO_IDS, *draw_record(draw)) for draw in draws], dtype=DRAW)
    scratch = np.empty((threads, 2, width), np.float32)
    _compiled()(threads, rows, tokens, records, drawn, confidences, scratch)
    outcomes: list[Outcome] = [
        no_maximum(draw) if token == NOTHING else Sampled((token,), ())
        for draw, token in zip(draws, drawn.tolist(), strict=True)
    ]
    return outcomes, confidences.tolist()


def warm_up() -> None:
    """Compile the kernel, or load it from the cache: seconds that no step should wait for."""
    guess_rows(np.zeros((1, 1), np.float32), [Draw(SamplingParams(), (0,), 1, frozenset(), 0)])


@cache
def _compiled() -> Callable[..., None]:
    """Return `guess_rows` of the kernels as machine code."""
    return compile_kernels("guess", (guess_kernels.guess_rows,), (guess_kernels, *SOURCES))[0]
