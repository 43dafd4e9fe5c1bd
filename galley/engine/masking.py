"""Compute which tokens grammars allow, on a thread of its own while the forward pass runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from galley.common.logs import log_internal
from galley.core.errors import Broken, GalleyError
from galley.core.grammar.limits import GrammarFailed
from galley.core.step import Draw, Sampled, StepTrace

if TYPE_CHECKING:
    from galley.core.grammar.compiled import GrammarState

# What a row of a usual schema takes.
_ROW_NS = 50_000

# The bits of the allowed tokens of each row of a draw, [rows, words], or why there are none.
Mask: TypeAlias = "NDArray[np.uint32] | GalleyError"
Masks: TypeAlias = "list[Mask | None]"
ComputeMask: TypeAlias = "Callable[[GrammarState, Draw], NDArray[np.uint32]]"


def confirmed_mask(state: GrammarState, draw: Draw) -> NDArray[np.uint32]:
    """Return the mask of a draw whose whole history is confirmed, and bring its grammar's state up to it."""
    state.may_compile = True
    state.confirm(draw.history[draw.prompt_len + state.length :])
    began_ns = time.perf_counter_ns()
    mask = state.masks(draw.draft_tokens, draw.parents)
    row_ns = (time.perf_counter_ns() - began_ns) // len(mask)
    # A thread that waited for a core is not taken for a grammar that is slow step after step.
    state.row_ns = min(row_ns, 2 * state.row_ns + _ROW_NS)
    return mask


def without_early_end(draw: Draw, outcome: Sampled | GalleyError) -> Sampled | GalleyError:
    """Return the outcome without an end token where the text is not complete: its session cannot go on.

    The mask of a place where the grammar allows nothing allows end tokens only. What was confirmed before
    stays, so that no draft changes it; then GrammarFailed is the outcome.
    """
    state = draw.grammar
    if state is None or not isinstance(outcome, Sampled) or draw.stop_token_ids.isdisjoint(outcome.tokens):
        return outcome
    end = next(i for i, token in enumerate(outcome.tokens) if token in draw.stop_token_ids)
    count = state.allowed_prefix(outcome.tokens[: end + 1])
    if count > end:
        return outcome
    if count == 0:
        return GrammarFailed(state.length)
    return Sampled(outcome.tokens[:count], outcome.logprobs[:count])


class MaskThread:
    """A thread that computes masks. llguidance drops the interpreter lock meanwhile, so the step goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self.waited_ns = 0
        """The time for which steps waited for masks."""

    def start(self, draws: Sequence[Draw], compute: ComputeMask = confirmed_mask) -> Future[Masks]:
        """Return the masks of `draws`, in order, once they are computed: None for a draw without a grammar.

        Until then nobody else may use the states of their grammars.
        """
        return self._thread.submit(lambda: [_attempt(draw, compute) for draw in draws])

    @contextmanager
    def beside(
        self, draws: Sequence[Draw], compute: ComputeMask = confirmed_mask, watch: StepTrace | None = None
    ) -> Iterator[Masks]:
        """Compute the masks of `draws` beside the body; the list has them after it, if any has a grammar.

        A `watch` gets the time of waiting for them.
        """
        masks: Masks = []
        if all(draw.grammar is None for draw in draws):
            yield masks
            return
        computed = self.start(draws, compute)
        try:
            yield masks
        finally:
            began_ns = time.perf_counter_ns()
            wait((computed,))
            waited_ns = time.perf_counter_ns() - began_ns
            self.waited_ns += waited_ns
            if watch is not None:
                watch.mask_wait_ns = waited_ns
        masks += computed.result()


def _attempt(draw: Draw, compute: ComputeMask) -> Mask | None:
    """Return the mask of a draw; an error is that of its session alone."""
    if draw.grammar is None:
        return None
    try:
        return compute(draw.grammar, draw)
    except GalleyError as error:
        return error
    except BaseException as error:  # noqa: BLE001  # a panic of llguidance, too, must not fail the step
        log_internal(error)
        return Broken("the grammar's mask could not be computed")
