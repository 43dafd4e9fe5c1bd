"""Compiled grammars by content, bounded."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from galley.core.grammar.compiled import CompiledGrammar, compile_grammar
from galley.core.grammar.limits import DEFAULT_LIMITS, GrammarLimits
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.vocabulary import Vocabulary

# A compiled grammar was measured to take less after some answers: a constant, and for each byte of text.
_BASE_BYTES, _BYTES_PER_BYTE = 192 * 1024, 400


class GrammarCache:
    """The grammars of one vocabulary that were used last. Safe to use from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        most_bytes: int = 32 * 1024 * 1024,
        limits: GrammarLimits = DEFAULT_LIMITS,
    ) -> None:
        self.vocabulary = vocabulary
        self._most_bytes = most_bytes
        self._limits = limits
        self._lock = Lock()
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, content_hash: bytes) -> CompiledGrammar | None:
        """Return the grammar of this hash if it is here."""
        with self._lock:
            compiled = self._compiled.get(content_hash)
            if compiled is not None:
                self._compiled.move_to_end(content_hash)
            return compiled

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return the grammar, compiled unless it is here. Raise InvalidGrammar as `compile_grammar`."""
        key = spec.content_hash
        compiled = self.get(key)
        if compiled is None:
            # Outside the lock: two threads may compile the same grammar, and nobody waits for another's.
            compiled = compile_grammar(self.vocabulary, spec, self._limits)
            self._add(key, compiled)
        return compiled

    def _add(self, key: bytes, compiled: CompiledGrammar) -> None:
        with self._lock:
            if key in self._compiled:
                return
            self._compiled[key] = compiled
            self._bytes += _cost(compiled)
            while self._bytes > self._most_bytes and len(self._compiled) > 1:
                _, dropped = self._compiled.popitem(last=False)
                self._bytes -= _cost(dropped)


def _cost(compiled: CompiledGrammar) -> int:
    return _BASE_BYTES + _BYTES_PER_BYTE * len(compiled.spec.text.encode())
