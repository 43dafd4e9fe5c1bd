"""Make the sources of a session's own draft tokens, in slices, so that other calls do not wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

from galley.common.logs import get_logger
from galley.core.answer.answer import Answer
from galley.core.errors import GalleyError
from galley.core.grammar.compiled import CompiledGrammar, GrammarState
from galley.core.grammar.spec import GrammarSpec
from galley.core.lookup.prediction import PredictionLookup, prediction_calibration
from galley.core.session.sources import LocalSources

CompileGrammar: TypeAlias = "Callable[[str, GrammarSpec], Awaitable[CompiledGrammar]]"

_PREDICTED_SLICE, _GRAMMAR_SLICE = 64, 16
"""Tokens of a slice: about 1 ms, at worst. A grammar may be made to take 6 ms a token."""
_GRANT_NS, _MOST_GRANTED_NS = 100_000, 20_000_000
"""Time of the event loop that a grammar gets for each output token; and the most that it can save up."""
_STOPPED = "grammar drafting stopped"
_T = TypeVar("_T")
_log = get_logger(__name__)


class BoundedGrammar:
    """A grammar that stops drafting once it has failed or used up its time: it ends and delays no session.

    The target alone decides what follows. What this state says, by another version of llguidance perhaps or
    after other work, only drafts. Most states take some µs a token; a few ms once, for a large schema.
    """

    def __init__(self, state: GrammarState, session_id: str) -> None:
        self._state: GrammarState | None = state
        self._session_id = session_id
        self._left_ns = _MOST_GRANTED_NS

    def confirm(self, tokens: Sequence[int]) -> None:
        self._left_ns = min(self._left_ns + _GRANT_NS * len(tokens), _MOST_GRANTED_NS)
        self._call(lambda state: state.confirm(tokens), None)

    def forced(self, most: int, ahead: Sequence[int] = ()) -> tuple[int, ...]:
        return self._call(lambda state: state.forced(most, ahead), ())

    def allowed_prefix(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> int:
        return self._call(lambda state: state.allowed_prefix(tokens, ahead), len(tokens))

    def _call(self, call: Callable[[GrammarState], _T], otherwise: _T) -> _T:
        """Return the state's answer; `otherwise` if there is none any more."""
        if self._state is None:
            return otherwise
        began_ns = time.thread_time_ns()
        try:
            return call(self._state)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # a panic of llguidance is no Exception
            self._stop(str(error))
            return otherwise
        finally:
            self._left_ns -= time.thread_time_ns() - began_ns
            if self._left_ns < 0:
                self._stop("it takes too long")

    def _stop(self, reason: str) -> None:
        if self._state is not None:
            self._state = None
            _log.warning(_STOPPED, session_id=self._session_id, reason=reason)


class OwnSources:
    """The sources of all sessions of a gateway, which share what they learn of predictions."""

    def __init__(self, compile_grammar: CompileGrammar | None = None) -> None:
        """`compile_grammar` compiles a grammar of a principal off the event loop; without it none drafts."""
        self._compile_grammar = compile_grammar
        self._predictions = prediction_calibration()

    async def of(self, answer: Answer, principal: str, *, is_over: bool = False) -> LocalSources | None:
        """Return the sources of a principal's session, at the end of its answer; None if it has none.

        One that `is_over` drafts no more. Its prediction is still compared with its answer.
        """
        spec = answer.spec
        if spec.grammar is None and not spec.prediction:
            return None
        prediction = None
        if spec.prediction:
            prediction = PredictionLookup(spec.prediction, self._predictions)
            for _ in prediction.index():
                await asyncio.sleep(0)
            await _follow(answer.output, prediction.follow, _PREDICTED_SLICE)
        return LocalSources(None if is_over else await self._grammar(answer, principal), prediction)

    async def _grammar(self, answer: Answer, principal: str) -> BoundedGrammar | None:
        """Return the grammar at the end of the answer; None if it cannot draft. The target decides anyway."""
        spec = answer.spec
        if spec.grammar is None or not spec.k or self._compile_grammar is None:
            return None
        try:
            compiled = await self._compile_grammar(principal, spec.grammar)
            state = compiled.start(may_compile=False, spec=spec.grammar)
            grammar = BoundedGrammar(state, spec.session_id)
            await _follow(answer.output, grammar.confirm, _GRAMMAR_SLICE)
        except GalleyError as error:
            _log.warning(_STOPPED, session_id=spec.session_id, reason=str(error))
            return None
        return grammar


async def _follow(tokens: Sequence[int], follow: Callable[[Sequence[int]], None], slice_tokens: int) -> None:
    for at in range(0, len(tokens), slice_tokens):
        follow(tokens[at : at + slice_tokens])
        await asyncio.sleep(0)
