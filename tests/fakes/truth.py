"""The tokens of the fake target: a pure function of the seed and of all tokens before.

A token below 256 is that byte of UTF-8; all bytes of a character follow each other. `END` is the model's end
token.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from hashlib import blake2b
from itertools import count

from galley.core.content import token_bytes
from galley.core.records import PositionLogprobs

END = 256
USER = 257
ASSISTANT = 258
# Ids from here on pad the vocabulary and have no token.
VOCAB = 264
CONTEXT = 1 << 16
SEED = 7

_WIDE = tuple(char.encode() for char in ("é", "…", "😀"))
_FIRST_BYTES = (*b"abcdeghilmnorstu   ,.\n", *(char[0] for char in _WIDE))
_END_CHANCE = 2  # of 256


def true_next(tokens: Sequence[int], seed: int = SEED, banned: Set[int] = frozenset()) -> int:
    started = _rest_of_character(tokens)
    if started is not None and started not in banned:
        return started
    data = token_bytes(tokens)
    for attempt in count():
        digest = blake2b(
            data, digest_size=2, salt=seed.to_bytes(8, "little"), person=attempt.to_bytes(2, "little")
        ).digest()
        token = END if digest[0] < _END_CHANCE else _FIRST_BYTES[digest[1] % len(_FIRST_BYTES)]
        if token not in banned:
            return token
    raise AssertionError


def _rest_of_character(tokens: Sequence[int]) -> int | None:
    for char in _WIDE:
        for size in range(1, len(char)):
            if list(tokens[-size:]) == list(char[:size]):
                return char[size]
    return None


def true_output(
    prompt: Sequence[int],
    max_tokens: int,
    seed: int = SEED,
    stops: Set[int] = frozenset(),
    min_tokens: int = 0,
) -> list[int]:
    tokens = list(prompt)
    while (done := len(tokens) - len(prompt)) < max_tokens:
        tokens.append(true_next(tokens, seed, stops if done < min_tokens else frozenset()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < END).decode("utf-8", "replace")


def logprobs_of(token: int, top: int) -> PositionLogprobs:
    return PositionLogprobs(
        -(token % 16) / 8, tuple(((token + i) % VOCAB, -(token % 16 + i) / 8) for i in range(top))
    )
