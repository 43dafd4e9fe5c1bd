"""The data that the kernels of sampling read and write, and how they are compiled."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# Part of a kernel. A division by zero gives an infinity, as in numpy. No fast-math: every sum has one order.
part = njit(nogil=True, error_model="numpy")

NOTHING: Final = -1  # in place of a token

# One draw, as the kernels read it. The `ids` of all draws lie end to end; each draw's are its draft tokens,
# the prompt and the output (both empty without penalties), the tokens of its biases, the masked tokens.
# Ids beyond the logits are ignored: a draft's vocabulary may be padded, and its tokens may be anything.
DRAW: Final = np.dtype(
    [
        ("row", np.int64),  # its first row
        ("prompt", np.int64),  # start of the prompt in `ids`: the end of the draft tokens
        ("output", np.int64),
        ("bias", np.int64),
        ("mask", np.int64),
        ("end", np.int64),
        ("bias_values", np.int64),  # start of its biases in `biases`
        ("seed", np.uint64),
        ("position", np.uint64),  # position of the first row
        ("masked_rows", np.int64),  # number of first rows with the mask
        ("top_k", np.int64),  # 0: all
        ("top_p", np.float64),  # 1: all
        ("temperature", np.float32),  # 0: greedy
        ("min_logit", np.float32),  # relative to the largest, after temperature; -inf: all
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("penalized", np.bool_),
    ],
    align=True,
)


class Scratch(NamedTuple):
    """Work space for each thread; `padded` is the vocabulary rounded up to whole blocks of noise."""

    row: Floats  # [threads, vocab]: the logits after bias, mask and penalties
    scaled: Floats  # [threads, padded]: minus their maximum, over the temperature; -inf from `vocab` on
    weights: Floats  # [threads, padded]
    blocks: NDArray[np.uint64]  # [threads, padded / 4]
    seen: NDArray[np.bool_]  # [threads, vocab or 0]: in the history. All False between draws
    counts: Ids  # [threads, vocab or 0]: times in the output. All 0 between draws
    touched: Ids  # [threads, 1 + vocab or 1]: number of seen tokens, then their ids


@part
def of_thread(scratch: Scratch, thread: int) -> Scratch:
    return Scratch(
        scratch.row[thread],
        scratch.scaled[thread],
        scratch.weights[thread],
        scratch.blocks[thread],
        scratch.seen[thread],
        scratch.counts[thread],
        scratch.touched[thread],
    )
