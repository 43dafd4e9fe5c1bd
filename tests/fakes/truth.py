"""The true answers of fake targets: each token is a pure function of a seed and of all tokens before.

Where a test reads text, a token below 256 is that byte of UTF-8 (`true_next`): all bytes of a character
follow each other, and `END` is the model's end token. Elsewhere a token is a letter of its own
(`token_after`, and `true_id` of a vocabulary so small that wrong drafts are sometimes right).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from hashlib import blake2b
from itertools import count
from zlib import crc32

from galley.core.content import token_bytes
from galley.core.records import PositionLogprobs

END = 256
USER = 257
ASSISTANT = 258
# Ids from here on pad the vocabulary and have no token.
VOCAB = 264
CONTEXT = 1 << 16
SEED = 7
IDS = 8
STOP_ID = IDS - 1

_WIDE = tuple(char.encode() for char in ("é", "…", "😀"))
_FIRST_BYTES = (*b"abcdeghilmnorstu   ,.\n", *(char[0] for char in _WIDE))
_END_CHANCE = 2  # of 256
_LETTERS = [chr(ord("A") + token) for token in range(64)]
_IDS_SALT = "88"  # for which the answers to (0, 2, 3), (1, 2, 3), ... have at least 17 tokens

NextToken = Callable[[Sequence[int], int, Set[int]], int]
"""A truth: the token after these, for a seed, that is none of the banned ones."""


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


def token_after(tokens: Sequence[int], vocab: int, salt: str) -> int:
    """Return a token below `vocab`; about one in 31 is the last, which ends an answer."""
    word, stop = crc32(token_bytes(tokens), crc32(salt.encode())), vocab - 1
    return stop if word % 31 == 0 else (word >> 8) % stop


def true_id(tokens: Sequence[int], _seed: int = SEED, _banned: Set[int] = frozenset()) -> int:
    return token_after(tokens, IDS, _IDS_SALT)


def true_output(
    prompt: Sequence[int],
    max_tokens: int,
    seed: int = SEED,
    stops: Set[int] = frozenset(),
    min_tokens: int = 0,
    next_token: NextToken = true_next,
) -> list[int]:
    tokens = list(prompt)
    while (done := len(tokens) - len(prompt)) < max_tokens:
        tokens.append(next_token(tokens, seed, stops if done < min_tokens else frozenset()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def letters(tokens: Sequence[int]) -> str:
    return "".join([_LETTERS[token] for token in tokens])


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < END).decode("utf-8", "replace")


def logprobs_of(token: int, top: int) -> PositionLogprobs:
    return PositionLogprobs(
        -(token % 16) / 8, tuple(((token + i) % VOCAB, -(token % 16 + i) / 8) for i in range(top))
    )
