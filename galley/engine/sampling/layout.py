"""The data and rules of sampling: what kernels read and write, and what CPU and CUDA device share."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from galley.core.errors import Broken
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# Part of a kernel. A division by zero gives an infinity, as in numpy. No fast-math: every sum has one order.
part = njit(nogil=True, error_model="numpy")

NOTHING: Final = -1  # in place of a token

# One draw, as the kernels read it. The `ids` of all draws lie end to end; each draw's are its draft tokens,
# their parents (none of a chain), the prompt and the output (both empty without penalties), the tokens of its
# biases, the masked tokens.
# Ids beyond the logits are ignored: a draft's vocabulary may be padded, and its tokens may be anything.
DRAW: Final = np.dtype(
    [
        ("row", np.int64),  # its first row
        ("parents", np.int64),  # start of the parents in `ids`: the end of the draft tokens
        ("prompt", np.int64),
        ("output", np.int64),
        ("bias", np.int64),
        ("mask", np.int64),
        ("end", np.int64),
        ("bias_values", np.int64),  # start of its biases in `biases`
        ("seed", np.uint64),
        ("position", np.uint64),  # position of the first row
        ("masked_positions", np.int64),  # number of first positions with the mask
        ("allowed", np.int64),  # row of its first mask of allowed tokens, or NOTHING
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


# Temperatures beyond these would over- or underflow float32; they sample as these do.
COLDEST, HOTTEST = 1e-30, 1e30


def kernel_temperature(params: SamplingParams) -> float:
    """Return the temperature that float32 can divide by; 0 is greedy."""
    return 0.0 if params.is_greedy else min(max(params.temperature, COLDEST), HOTTEST)


def least_logit(params: SamplingParams) -> float:
    """Return min_p as a bound of scaled logits relative to their maximum; -inf keeps all."""
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf


def masked_positions(draw: Draw) -> int:
    """Return at how many of the first positions stop tokens are masked: `min_tokens` are not reached."""
    if not draw.stop_token_ids:
        return 0
    return max(0, draw.min_tokens - (len(draw.history) - draw.prompt_len))


def has_penalties(draw: Draw) -> bool:
    params = draw.params
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def is_plain(draw: Draw) -> bool:
    """Return True if tokens depend on logits, filters, temperature and noise alone, without logprobs."""
    return not (
        has_penalties(draw) or draw.params.logit_bias or masked_positions(draw) or draw.logprobs is not None
    )


def no_maximum(draw: Draw) -> Broken:
    return Broken(f"logits for position {len(draw.history)}: must have a finite maximum")
