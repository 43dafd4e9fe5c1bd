"""The vocabulary of a model, as grammars see it: the bytes of each token, and how text is tokenized."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeAlias

from llguidance import LLExecutor, LLTokenizer

from galley.core.errors import UnsupportedModel

ClockNs: TypeAlias = "Callable[[], int]"
_LONG_NS = 10**9
_BRACKETED = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class Vocabulary:
    """Made once for each tokenizer, because that takes a quarter of a second. Several threads may use it.

    `end_tokens` end the model's turn: a grammar allows them where its text may end.
    """

    def __init__(
        self, tokenizer: LLTokenizer, end_tokens: Sequence[int], clock_ns: ClockNs | None = None
    ) -> None:
        """With a clock, work is measured when some time has passed, else after each answer of a grammar."""
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)
        self.clock_ns = clock_ns or count(step=_LONG_NS).__next__
        self.executor = LLExecutor(1)

    @classmethod
    def of_tokenizer(
        cls,
        tokenizer_json: str,
        vocab_size: int,
        end_tokens: Sequence[int],
        clock_ns: ClockNs | None = None,
    ) -> Vocabulary:
        """Read the text of a tokenizer.json. `vocab_size` is the number of logits, which may be padded.

        Raise UnsupportedModel for a tokenizer that grammars cannot use.
        """
        if not end_tokens:
            raise UnsupportedModel("structured output: the model must have an end token, got none")
        try:
            tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(end_tokens))
        except ValueError as error:
            reason = f"structured output: the tokenizer is not supported, got: {error}"
            raise UnsupportedModel(reason) from error
        return cls(tokenizer, end_tokens, clock_ns)

    @property
    def size(self) -> int:
        """Return the number of logits."""
        return self.tokenizer.vocab_size

    @property
    def mask_words(self) -> int:
        """Return the number of 32-bit words of a mask."""
        return (self.size + 31) // 32

    def special_token(self, text: str) -> int | None:
        """Return the control token that is written like `text`, None if there is none."""
        tokens = self.tokenizer.tokenize_str(text, parse_special=True)
        return tokens[0] if len(tokens) == 1 and self.tokenizer.is_special_token(tokens[0]) else None

    def split_control_tokens(self, text: str) -> list[str | int]:
        """Return a text in pieces: control tokens in angle or square brackets, and the texts between them."""
        pieces: list[str | int] = []
        begin = 0
        for spelling in _BRACKETED.finditer(text):
            if (token := self.special_token(spelling[0])) is not None:
                pieces += [text[begin : spelling.start()], token]
                begin = spelling.end()
        return [piece for piece in (*pieces, text[begin:]) if piece != ""]
