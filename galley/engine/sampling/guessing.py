"""A draft's next token of each row of logits, and how sure of it the draft is.

What `sampling.draw_all` draws of the same logits spread over the whole vocabulary, for less: a draft's head
may know only some tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from galley.core import noise
from galley.core.errors import Broken, GalleyError
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.kernels import ops as kernel_ops
from galley.engine.cpu.kernels.machine_code import compile_kept, sources_digest
from galley.engine.sampling import filters as sampling_filters
from galley.engine.sampling import guess_kernels
from galley.engine.sampling import gumbel as sampling_noise
from galley.engine.sampling import largest as sampling_largest
from galley.engine.sampling import layout as sampling_layout
from galley.engine.sampling.draw import COLDEST, HOTTEST, draw_all, masked_rows, penalized
from galley.engine.sampling.layout import NOTHING

if TYPE_CHECKING:
    from galley.engine.load.draft_directory import ReducedHead

    Outcomes = list[Sampled | GalleyError]

_MODULES = (
    *(guess_kernels, kernel_ops, noise, openmp),
    *(sampling_filters, sampling_largest, sampling_layout, sampling_noise),
)
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
# What one logit costs, at least.
_LOGIT_NS = 2.0
# One draw, as the kernel reads it.
GUESS: Final = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_logit", np.float32),
    ],
    align=True,
)


def guess(logits: Tensor, draws: Sequence[Draw], head: ReducedHead | None) -> tuple[Outcomes, list[float]]:
    """A token of each draw, which has no guesses of its own, and the sureness of each.

    `logits` is float32 [draws, head_vocab], or [draws, vocab] where `head` is None. Sureness is the
    likeliest token's probability before any processing. A row without a finite maximum is Broken.
    """
    if logits.device.type != "cpu" or not all(map(_plain, draws)):
        sureness: list[float] = torch.softmax(logits, -1).amax(-1).tolist()
        return draw_all(logits if head is None else head.spread(logits), draws), sureness
    rows = np.ascontiguousarray(logits.detach().numpy())
    count, columns = rows.shape
    tokens = np.arange(columns) if head is None else head.columns
    threads = openmp.worth(openmp.threads(), rows.size * _LOGIT_NS) if count > 1 else 1
    guessed, sure = np.empty(count, np.int64), np.empty(count, np.float32)
    records = np.array([_record(draw) for draw in draws], dtype=GUESS)
    scratch = np.empty((threads, 2, columns), np.float32)
    _compiled()(threads, rows, tokens, records, guessed, sure, scratch)
    return list(map(_outcome, draws, guessed.tolist())), sure.tolist()


def warm_up() -> None:
    """Compile the kernel, or load it: seconds that no step should wait for."""
    guess(torch.zeros(1, 1), [Draw(SamplingParams(), (0,), 1, frozenset(), 0)], None)


def _plain(draw: Draw) -> bool:
    """Does the history not matter to this draw?"""
    return not (penalized(draw) or draw.params.logit_bias or masked_rows(draw) or draw.logprobs is not None)


def _record(draw: Draw) -> tuple[float, ...]:
    params = draw.params
    return (
        params.seed,
        len(draw.history),
        params.top_k,
        params.top_p,
        0.0 if params.greedy else min(max(params.temperature, COLDEST), HOTTEST),
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
    )


def _outcome(draw: Draw, token: int) -> Sampled | GalleyError:
    if token == NOTHING:
        return Broken(f"the logits for position {len(draw.history)} have no finite maximum")
    return Sampled((token,), ())


@cache
def _compiled() -> Callable[..., None]:
    """The kernel; from the cache directory, where it can be written, after a first start."""
    openmp.link()
    folder = f"guess-{sources_digest(_MODULES, _OPTIONS)}"
    function: Callable[..., None] = compile_kept(guess_kernels.guess_rows, folder, _OPTIONS)
    return function
