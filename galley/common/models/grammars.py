"""The grammars of a replica's sessions, compiled on a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from galley.core.content import Miss, prefix_hash
from galley.core.grammar.cache import GrammarCache
from galley.core.grammar.compiled import CompiledGrammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.vocabulary import Vocabulary
from galley.core.scheduler.messages import Slice

# What a cache says that knows nothing of the session: the next slice then brings the grammar.
_MISS = Miss(0, prefix_hash(()))


class ReplicaGrammars:
    def __init__(self, make: Callable[[Slice], Vocabulary]) -> None:
        """`make` returns the model's vocabulary. It is called once, on the thread, with the first slice."""
        self._make = make
        self._cache: GrammarCache | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def compiled(self, part: Slice) -> CompiledGrammar | Miss | None:
        """Return the grammar of a slice, None if it has none, or a miss if only its unknown hash came.

        Raise InvalidGrammar for one that cannot be compiled.
        """
        if not part.grammar_hash:
            return None
        known = None if self._cache is None else self._cache.get(part.grammar_hash)
        if known is not None:
            return known
        if part.grammar is None:
            return _MISS
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._compile, part, part.grammar)

    def _compile(self, part: Slice, spec: GrammarSpec) -> CompiledGrammar:
        if self._cache is None:
            self._cache = GrammarCache(self._make(part))
        return self._cache.compile(spec)
