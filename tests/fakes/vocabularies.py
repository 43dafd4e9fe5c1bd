"""Small vocabularies for grammars: all bytes, a few longer tokens, and two end tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from galley.core.grammar.vocabulary import ClockNs, Vocabulary

STOP, VOCAB = 1, 128
"""Those of tests/fakes/tiny_model.py, which imports torch."""

WORDS = (b'{"', b'": ', b'", "', b"name", b'"name"', b"true", b"false", b"ab", b"abc", b"  ", b"12", b'"}')
END, OTHER_END = 256 + len(WORDS), 257 + len(WORDS)
SIZE = OTHER_END + 1


class _Greedy:
    """The tokenizer that `TokenizerWrapper` wraps."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end_tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = end_tokens[0]
        self.special_token_ids = list(end_tokens)
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text must be a str")  # so that TokenizerWrapper passes no bytes
        return [] if self.tokenizer is None else self.tokenizer.greedy_tokenize(text)


def of_bytes(
    tokens: Sequence[bytes], end_tokens: Sequence[int], clock_ns: ClockNs | None = None
) -> Vocabulary:
    """Return a vocabulary of these tokens. Text is tokenized by the longest token first."""
    greedy = _Greedy(tokens, end_tokens)
    tokenizer = LLTokenizer(TokenizerWrapper(greedy), eos_token=list(end_tokens))
    greedy.tokenizer = tokenizer
    return Vocabulary(tokenizer, end_tokens, clock_ns)


def byte_vocabulary() -> Vocabulary:
    tokens = [bytes([byte]) for byte in range(256)] + [*WORDS, b"<end>", b"<stop>"]
    return of_bytes(tokens, [END, OTHER_END], time.monotonic_ns)


def bpe_vocabulary() -> Vocabulary:
    """Return a vocabulary that merges bytes as the tokenizers of real models do."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=END,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<other end>", "<end>"],
        show_progress=False,
    )
    fast.train_from_iterator(['{"name": "abc", "ok": true, "ab12": [false, "x"]}'] * 4, trainer)
    return Vocabulary.of_tokenizer(fast.to_str(), SIZE, [1, 0], time.monotonic_ns)


def ascii_vocabulary() -> Vocabulary:
    """Return that of the tiny model: each token is a byte of ASCII, but for the one that ends an answer."""
    return of_bytes([bytes([byte]) for byte in range(VOCAB)], [STOP], time.monotonic_ns)


def save_ascii_tokenizer(directory: Path) -> None:
    """Save a tokenizer.json that grammars can read: as `ascii_vocabulary`, but without control characters."""
    ids = {chr(token) if ord(" ") < token < 127 else f"<{token}>": token for token in range(VOCAB)}
    fast = Tokenizer(models.BPE(ids, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.save(str(directory / "tokenizer.json"))


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer.tokenize_str(text)


def allowed(row: NDArray[np.uint32]) -> set[int]:
    """Return the tokens whose bit is set in a row of a mask."""
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def texts(tokens: Sequence[int]) -> bytes:
    """Return the bytes of tokens, without end tokens."""
    return b"".join(bytes([t]) if t < 256 else WORDS[t - 256] for t in tokens if t < END)
