"""Compile the grammars of requests, so that a bad one is refused before any work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeAlias

from galley.common.fair_threads import FairThreads
from galley.common.logs import get_logger
from galley.core.errors import InvalidField, UnsupportedModel
from galley.core.grammar.cache import GrammarCache
from galley.core.grammar.compiled import CompiledGrammar
from galley.core.grammar.limits import FIELD
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.vocabulary import Vocabulary

_log = get_logger(__name__)
OnCompiled: TypeAlias = Callable[[int, bool], None]


class Grammars:
    """The grammars that were used last."""

    def __init__(self, vocabulary: Vocabulary | None, problem: str = "") -> None:
        """`problem` says why there is no vocabulary."""
        self._cache = None if vocabulary is None else GrammarCache(vocabulary)
        self._problem = problem
        self.on_compiled: OnCompiled = lambda _took_ns, _refused: None
        """Called in the thread that compiled a grammar, with the time that it took."""

    @classmethod
    def of_tokenizer(cls, tokenizer_json: str, vocab_size: int, end_tokens: Sequence[int]) -> Self:
        """Read a tokenizer.json: a quarter of a second or more, in which no other thread runs."""
        try:
            return cls(Vocabulary.of_tokenizer(tokenizer_json, vocab_size, end_tokens, time.monotonic_ns))
        except UnsupportedModel as error:
            _log.warning("structured output unavailable", reason=str(error))
            return cls(None, str(error))

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return the grammar, compiled as its language; call it off the event loop. Raise InvalidField."""
        if self._cache is None:
            raise InvalidField(FIELD, f"must be absent: {self._problem}")
        language, known = spec.language, self._cache.get(spec.language.content_hash)
        if known is not None and known.is_ready:
            return known
        began_ns = time.monotonic_ns()
        try:
            compiled = self._cache.compile(language)
        except InvalidField:
            self.on_compiled(time.monotonic_ns() - began_ns, True)
            raise
        self.on_compiled(time.monotonic_ns() - began_ns, False)
        return compiled

    async def compiled(self, threads: FairThreads, principal: str, spec: GrammarSpec) -> CompiledGrammar:
        """Return what `compile` does, at once if it was used lately, else in the principal's thread.

        Raise InvalidField.
        """
        known = None if self._cache is None else self._cache.get(spec.language.content_hash)
        if known is not None and known.is_ready:
            return known
        return await threads.run(principal, partial(self.compile, spec))
