"""What the kernels of sampling read and work in, and how they are compiled."""

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

# One draw, as the kernels read it. The `ids` of all draws lie end to end; each draw's are its guesses, the
# prompt and the output (both empty if no penalty is set), the tokens of its biases, the masked tokens. Those
# beyond the logits are passed over: a draft's vocabulary may be padded otherwise, and a guess be anything.
DRAW: Final = np.dtype(
    [
        ("row", np.int64),  # its first
        ("prompt", np.int64),  # where in `ids` the prompt begins, and so the guesses end
        ("output", np.int64),
        ("bias", np.int64),
        ("mask", np.int64),
        ("end", np.int64),
        ("bias_values", np.int64),  # where in `biases` they begin
        ("seed", np.uint64),
        ("position", np.uint64),  # of the first row
        ("masked_rows", np.int64),  # how many of the first rows have the mask
        ("top_k", np.int64),  # 0: all
        ("top_p", np.float64),  # 1: all
        ("temperature", np.float32),  # 0: greedy
        ("min_logit", np.float32),  # below the largest, after the temperature; -inf: all
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("penalized", np.bool_),
    ],
    align=True,
)


class Scratch(NamedTuple):
    """Room to work in for each thread; `padded` is the vocabulary rounded up to whole blocks of the noise."""

    row: Floats  # [threads, vocab]: the logits after bias, mask and penalties
    scaled: Floats  # [threads, padded]: less their maximum, over the temperature; -inf from `vocab` on
    weights: Floats  # [threads, padded]
    blocks: NDArray[np.uint64]  # [threads, padded / 4]
    seen: NDArray[np.bool_]  # [threads, vocab or 0]: is it in the history? All False between draws
    counts: Ids  # [threads, vocab or 0]: how often is it in the output? All 0 between draws
    touched: Ids  # [threads, 1 + vocab or 1]: how many tokens are seen, then which


@part
def of_thread(scratch: Scratch, thread: int) -> Scratch:
    """One thread's room, without the first dimension."""
    return Scratch(
        scratch.row[thread],
        scratch.scaled[thread],
        scratch.weights[thread],
        scratch.blocks[thread],
        scratch.seen[thread],
        scratch.counts[thread],
        scratch.touched[thread],
    )
