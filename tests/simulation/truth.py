"""The one true answer: the target's token as a pure function of build, seed, position and all before it."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from galley.core.answer.answer import SessionSpec
from galley.core.content import token_bytes

VOCAB = 48
STOP = 47


def true_token(build: str, seed: int, position: int, history: Sequence[int]) -> int:
    """Return the token at `position`, after `history`; about one in 31 is the stop token."""
    word = crc32(token_bytes(history), crc32(f"{build} {seed} {position}".encode()))
    return STOP if word % 31 == 0 else (word >> 8) % STOP


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


def text_of(spec: SessionSpec, index: int, tokens: Sequence[int]) -> str:
    visible = [
        token
        for i, token in enumerate(tokens, index)
        if token not in spec.stop_token_ids or i + 1 <= spec.min_tokens
    ]
    return decode(visible)


def is_over(spec: SessionSpec, tokens: Sequence[int]) -> bool:
    output = len(tokens) - len(spec.prompt)
    return len(tokens) >= spec.max_position or (
        output > spec.min_tokens and tokens[-1] in spec.stop_token_ids
    )
