"""Compiled grammars by content, bounded."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from weakref import WeakValueDictionary

from galley.core.grammar.compiled import CompiledGrammar, compile_grammar
from galley.core.grammar.limits import DEFAULT_LIMITS, GrammarLimits
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.vocabulary import Vocabulary


class GrammarCache:
    """The grammars of one vocabulary, of which those used last are compiled. Several threads may use it.

    What is compiled counts, with all that it has learnt, for as long as it is held. Grammars that sessions
    still use are no exception: one that is dropped is compiled again when it is needed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        most_bytes: int = 64 * 1024 * 1024,
        limits: GrammarLimits = DEFAULT_LIMITS,
    ) -> None:
        self.vocabulary = vocabulary
        self._most_bytes = most_bytes
        self._limits = limits
        self._lock = Lock()
        self._known: WeakValueDictionary[bytes, CompiledGrammar] = WeakValueDictionary()
        self._held: OrderedDict[CompiledGrammar, int] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def get(self, content_hash: bytes) -> CompiledGrammar | None:
        """Return the grammar of this hash if it is here. It may have to be prepared again."""
        with self._lock:
            compiled = self._known.get(content_hash)
            if compiled is not None and compiled in self._held:
                self._held.move_to_end(compiled)
            return compiled

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return the grammar, compiled unless it is here and ready. Raise InvalidGrammar."""
        compiled = self.get(spec.content_hash)
        if compiled is not None:
            compiled.prepare()
            return compiled
        # Outside the lock: two threads may compile the same grammar, and nobody waits for another's.
        compiled = compile_grammar(self.vocabulary, spec, self._limits)
        with self._lock:
            compiled = self._known.setdefault(spec.content_hash, compiled)
        compiled.grew = self._weigh
        self._weigh(compiled)
        return compiled

    def _weigh(self, compiled: CompiledGrammar) -> None:
        """Count what a grammar holds now, and drop others where that is too much."""
        with self._lock:
            held = compiled.held_bytes
            self._bytes += held - self._held.pop(compiled, 0)
            self._held[compiled] = held
            while self._bytes > self._most_bytes and len(self._held) > 1:
                dropped, weight = self._held.popitem(last=False)
                self._bytes -= weight
                dropped.drop()
