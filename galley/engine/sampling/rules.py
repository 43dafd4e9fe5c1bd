"""The rules of a draw that the CPU's and the CUDA device's sampling share."""

from __future__ import annotations

import math

from galley.core.errors import Broken
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw

# Temperatures beyond these would over- or underflow float32; they sample as these do.
COLDEST, HOTTEST = 1e-30, 1e30


def kernel_temperature(params: SamplingParams) -> float:
    """Return the temperature that float32 can divide by; 0 is greedy."""
    return 0.0 if params.greedy else min(max(params.temperature, COLDEST), HOTTEST)


def least_logit(params: SamplingParams) -> float:
    """Return min_p as a bound of scaled logits relative to their maximum; -inf keeps all."""
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf


def masked_rows(draw: Draw) -> int:
    """Return how many of the first rows mask the stop tokens, because `min_tokens` are not reached."""
    if not draw.stop_token_ids:
        return 0
    return max(0, draw.min_tokens - (len(draw.history) - draw.prompt_len))


def has_penalties(draw: Draw) -> bool:
    params = draw.params
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def is_plain(draw: Draw) -> bool:
    """Return True if tokens depend on their logits, the filters, temperature and noise alone."""
    return not (
        has_penalties(draw) or draw.params.logit_bias or masked_rows(draw) or draw.logprobs is not None
    )


def no_maximum(draw: Draw) -> Broken:
    return Broken(f"logits for position {len(draw.history)}: must have a finite maximum")
