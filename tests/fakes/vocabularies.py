"""Small vocabularies for grammars: all bytes, a few longer tokens, and two end tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from galley.core.grammar.vocabulary import Vocabulary

WORDS = (b'{"', b'": ', b'", "', b"name", b'"name"', b"true", b"false", b"ab", b"abc", b"  ", b"12", b'"}')
END, OTHER_END = 256 + len(WORDS), 257 + len(WORDS)
SIZE = OTHER_END + 1


def byte_vocabulary() -> Vocabulary:
    tokens = [bytes([byte]) for byte in range(256)] + [*WORDS, b"<end>", b"<stop>"]
    return Vocabulary.of_bytes(tokens, [END, OTHER_END])


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer.tokenize_str(text)


def allowed(row: NDArray[np.uint32]) -> set[int]:
    """Return the tokens whose bit is set in a row of a mask."""
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def texts(tokens: Sequence[int]) -> bytes:
    """Return the bytes of tokens, without end tokens."""
    return b"".join(bytes([t]) if t < 256 else WORDS[t - 256] for t in tokens if t < END)
