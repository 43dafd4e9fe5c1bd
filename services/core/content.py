"""Content addresses: how a caller and a cache agree on what the cache holds.

A replica keeps the token ids beside its KV. A request names the prefix that it builds on by a hash of the
tokens, so a cache that holds other tokens at the same length is a miss, never a wrong answer.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HASH_BYTES = 16
TOKEN_BYTES = 4
_PERSON = b"galley.v1"


def prefix_hash(tokens: Sequence[int]) -> bytes:
    """The blake2b-128 of `tokens` as little-endian uint32."""
    return hash_token_bytes(token_bytes(tokens))


def hash_token_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """`prefix_hash` of tokens that are encoded already."""
    return blake2b(data, digest_size=HASH_BYTES, person=_PERSON).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """`tokens` as little-endian uint32, as they stand in the log."""
    words = array("I", tokens)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


def tokens_of(data: bytes) -> list[int]:
    """The inverse of `token_bytes`; raises ValueError if `data` is not whole tokens."""
    words = array("I")
    words.frombytes(data)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tolist()


_BIG_ENDIAN = array("I", [1]).tobytes()[0] != 1


@dataclass(frozen=True, slots=True)
class Hit:
    """The cache agrees with the request on [0, agree); the rest of it must be cut."""

    agree: int


@dataclass(frozen=True, slots=True)
class Miss:
    """The cache holds `have` tokens of this hash; whether they are the caller's, the caller can tell."""

    have: int
    prefix_hash: bytes


def look_up(held: Sequence[int], start: int, tokens: Sequence[int], prefix: bytes) -> Hit | Miss:
    """How much of `held` serves a request for `tokens` after a prefix [0, start) of hash `prefix`."""
    if len(held) < start:
        return Miss(len(held), prefix_hash(held))
    if prefix_hash(held[:start]) != prefix:
        return Miss(0, prefix_hash(()))
    agree = start
    for ours, theirs in zip(held[start:], tokens, strict=False):
        if ours != theirs:
            break
        agree += 1
    return Hit(agree)
