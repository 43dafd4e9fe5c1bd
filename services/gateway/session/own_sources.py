"""Make the sources of a session's own draft tokens, in slices between which other calls have a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from galley.common.logs import get_logger
from galley.core.answer.answer import Answer
from galley.core.errors import GalleyError
from galley.core.grammar.compiled import CompiledGrammar, GrammarState
from galley.core.grammar.spec import GrammarSpec
from galley.core.lookup.prediction import PredictionLookup, prediction_calibration
from galley.core.session.sources import LocalSources

CompileGrammar: TypeAlias = "Callable[[GrammarSpec], Awaitable[CompiledGrammar]]"

_SLICE_TOKENS = 256
"""Tokens followed before other calls get a turn: about 1 ms."""
_log = get_logger(__name__)


class OwnSources:
    """The sources of all sessions of a gateway, which share what they learn of predictions."""

    def __init__(self, compile_grammar: CompileGrammar | None = None) -> None:
        """`compile_grammar` returns a grammar, compiled off the event loop; without it none drafts."""
        self._compile_grammar = compile_grammar
        self._predictions = prediction_calibration()

    async def of(self, answer: Answer) -> LocalSources | None:
        """Return the sources of a session, at the end of its answer; None if it has none."""
        spec = answer.spec
        if spec.grammar is None and not spec.prediction:
            return None
        prediction = None
        if spec.prediction:
            prediction = PredictionLookup(spec.prediction, self._predictions)
            await _follow(answer.output, prediction.follow)
        return LocalSources(await self._grammar(answer), prediction)

    async def _grammar(self, answer: Answer) -> GrammarState | None:
        """Return the grammar at the end of the answer; None if it cannot draft. The target decides anyway."""
        spec = answer.spec
        if spec.grammar is None or not spec.k or self._compile_grammar is None:
            return None
        try:
            state = (await self._compile_grammar(spec.grammar)).start()
            await _follow(answer.output, state.confirm)
        except GalleyError as error:
            _log.warning("grammar does not draft", session_id=spec.session_id, error=str(error))
            return None
        return state


async def _follow(output: Sequence[int], follow: Callable[[Sequence[int]], None]) -> None:
    for at in range(0, len(output), _SLICE_TOKENS):
        follow(output[at : at + _SLICE_TOKENS])
        await asyncio.sleep(0)
