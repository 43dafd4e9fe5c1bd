"""The grammars of a replica's sessions, compiled on a thread of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from galley.common.fair_threads import FairThreads
from galley.common.logs import get_logger
from galley.common.models.fast_tokenizer import CONFIG, load_fast_tokenizer, read_json
from galley.core.content import Miss, prefix_hash
from galley.core.errors import DeadlinePassed, UnsupportedModel
from galley.core.grammar.cache import GrammarCache
from galley.core.grammar.compiled import CompiledGrammar
from galley.core.grammar.vocabulary import Vocabulary
from galley.core.scheduler.messages import Slice

_LOG = get_logger(__name__)
# What a cache says that knows nothing of the session: the next slice then brings the grammar.
_MISS = Miss(0, prefix_hash(()))


class ReplicaGrammars:
    """The grammars that were used last. Tenants compile in turn, one grammar at a time."""

    def __init__(self, vocabulary: Vocabulary, thread: Executor | None = None) -> None:
        """Compile on `thread`, or on one of its own."""
        self.vocab_size = vocabulary.size
        self._cache = GrammarCache(vocabulary)
        self._threads = FairThreads(thread or ThreadPoolExecutor(1, thread_name_prefix="grammars"))

    async def compiled(self, part: Slice, remaining_ns: int) -> CompiledGrammar | Miss | None:
        """Return the grammar of a slice, None if it has none, or a miss if only its unknown hash came.

        A `remaining_ns` of 0 is no deadline. Raise DeadlinePassed; raise InvalidGrammar for one that cannot
        be compiled.
        """
        if not part.grammar_hash:
            return None
        known = self._cache.get(part.grammar_hash)
        if known is not None and known.is_ready:
            return known
        spec = part.grammar if known is None else known.spec
        if spec is None:
            return _MISS
        compile_it = partial(self._cache.compile, spec)
        try:
            async with asyncio.timeout(remaining_ns / 1e9 or None):
                return await self._threads.run(part.key[0], compile_it)
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the grammar was compiled") from None


def load_grammars(directory: Path, vocab_size: int, end_tokens: Sequence[int]) -> ReplicaGrammars | None:
    """Return what compiles grammars for the tokenizer in `directory`; None, with a warning, if it cannot.

    A `vocab_size` of 0 is that of the tokenizer. Takes a second or more, in which no other thread runs:
    call it before the replica serves.
    """
    try:
        fast = load_fast_tokenizer(directory, read_json(directory / CONFIG))
        size = vocab_size or max(fast.get_vocab().values(), default=-1) + 1
        return ReplicaGrammars(Vocabulary.of_tokenizer(fast.to_str(), size, end_tokens, time.monotonic_ns))
    except (UnsupportedModel, OSError, ValueError) as error:
        _LOG.warning("structured output unavailable", reason=str(error))
        return None
