"""Truths with a meaning: answers that a test wrote, and answers that a grammar allows."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer

from galley.common.wire.codec import grammar_from
from galley.core.content import token_bytes
from galley.core.grammar.compiled import CompiledGrammar, compile_grammar
from galley.core.grammar.vocabulary import Vocabulary
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.truth import END, VOCAB, NextToken, true_next
from tests.fakes.vocabularies import allowed

_QUOTE = ord('"')
_PLAIN = frozenset(range(32, 127)) - {ord("\\")}


class Answers:
    """The truth of a target: written answers, or one that the grammar allows, or else `true_next`."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = str(tokenizer / "tokenizer.json")
        self._vocabulary: Vocabulary | None = None
        self._grammars: dict[bytes, CompiledGrammar] = {}
        self._written: list[list[int]] = []
        self._beginning: list[int] = []

    def write(self, *texts: str | bytes) -> None:
        """Answer session number i, by its seed, with text i. Bytes are spelled, without added tokens."""
        self._written = [[*self._encode(text), END] for text in texts]

    def begin(self, *texts: str | bytes) -> None:
        """Begin answers that have a grammar with these texts: reasoning, or what the grammar allows."""
        self._beginning = [token for text in texts for token in self._encode(text)]

    def _encode(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            return list(text)
        return list(Tokenizer.from_file(self._tokenizer).encode(text, add_special_tokens=False).ids)

    def of(self, part: pb.SessionSlice) -> NextToken:
        if part.HasField("structured_output"):
            self._grammars[part.grammar_hash] = self._compiled(part.structured_output)
        grammar = self._grammars[part.grammar_hash] if part.grammar_hash else None

        def next_token(tokens: Sequence[int], seed: int, banned: Set[int]) -> int:
            output = tokens[part.prompt_len :]
            if grammar is not None:
                if len(output) < len(self._beginning):
                    return self._beginning[len(output)]
                return _allowed(grammar, output, tokens, seed)
            if not self._written:
                return true_next(tokens, seed, banned)
            answer = self._written[seed % len(self._written)]
            return answer[min(len(output), len(answer) - 1)]

        return next_token

    def _compiled(self, message: pb.StructuredOutput) -> CompiledGrammar:
        if self._vocabulary is None:
            text = Path(self._tokenizer).read_text()
            self._vocabulary = Vocabulary.of_tokenizer(text, VOCAB, [END], time.monotonic_ns)
        return compile_grammar(self._vocabulary, grammar_from(message))


def _allowed(grammar: CompiledGrammar, output: Sequence[int], tokens: Sequence[int], seed: int) -> int:
    """Return a token that the grammar allows, such that texts and numbers soon end."""
    state = grammar.start()
    if state.allowed_prefix(output) < len(output):
        return END  # never used: a draft token before it was wrong
    state.confirm(output)
    choices = allowed(state.masks(())[0])
    if len(choices) > 1:
        choices -= {grammar.spec.opening_token}  # reasoning would not end soon
    digest = blake2b(token_bytes(tokens), digest_size=4, salt=seed.to_bytes(8, "little")).digest()
    chances = {**{token: 128 for token in choices if token > END}, _QUOTE: 64, END: 128}
    for token, chance in chances.items():
        if token in choices and digest[0] < chance:
            return token
    pool = sorted(choices & _PLAIN) or sorted(choices)
    return pool[int.from_bytes(digest[1:]) % len(pool)]
