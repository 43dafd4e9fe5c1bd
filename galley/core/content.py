"""Content addresses: hashes by which a caller and a cache agree on the tokens that the cache holds.

A replica keeps token ids beside its KV. A request names the prefix that it builds on by a hash of the tokens.
A cache of other tokens of the same length is then a miss, never a wrong answer. KV blocks that sessions may
share are named by a chain of hashes that starts from the salt of their tenant and LoRA adapter.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress, count
from operator import ne
from typing import TypeAlias

# (cache salt, session_id): caches never cross salts.
SessionKey: TypeAlias = tuple[bytes, str]

HASH_BYTES = 16
_PERSON = b"galley.v1"
_BLOCK_PERSON = b"galley.kv.v1"
_LORA_PERSON = b"galley.lora.v1"
_MARK_TOKENS = 512


def prefix_hash(tokens: Sequence[int]) -> bytes:
    """Return the blake2b-128 of `tokens` as little-endian uint32."""
    return prefix_hash_of_bytes(token_bytes(tokens))


def prefix_hash_of_bytes(data: bytes) -> bytes:
    """Return the `prefix_hash` of tokens that are given as `token_bytes`."""
    return blake2b(data, digest_size=HASH_BYTES, person=_PERSON).digest()


def cache_salt(tenant_salt: bytes, lora: str) -> bytes:
    """Return the salt that separates KV by tenant and LoRA adapter; without an adapter, the tenant's own."""
    if not lora:
        return tenant_salt
    return blake2b(lora.encode(), key=tenant_salt, digest_size=HASH_BYTES, person=_LORA_PERSON).digest()


def chain_start(salt: bytes) -> bytes:
    """Return the hash that the first block of a cache salt is chained to: salts never share block hashes."""
    return blake2b(salt, digest_size=HASH_BYTES, person=_BLOCK_PERSON).digest()


def next_block_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    return _next_hash(previous, token_bytes(tokens))


def _next_hash(previous: bytes, block: bytes) -> bytes:
    return blake2b(previous + block, digest_size=HASH_BYTES, person=_BLOCK_PERSON).digest()


class BlockChain:
    """The chained hashes of the full blocks of tokens that are added part by part.

    `hashes[i]` covers [0, (i + 1) * block_tokens).
    """

    __slots__ = ("_block_bytes", "_rest", "_start", "hashes")

    def __init__(self, salt: bytes, block_tokens: int, hashes: Iterable[bytes] = ()) -> None:
        """Begin after the blocks of these `hashes`, if any are known."""
        self.hashes = list(hashes)
        self._start = chain_start(salt)
        self._block_bytes = block_tokens * array("I").itemsize
        self._rest = b""

    def add(self, tokens: Sequence[int]) -> None:
        data, size = self._rest + token_bytes(tokens), self._block_bytes
        previous = self.hashes[-1] if self.hashes else self._start
        for end in range(size, len(data) + 1, size):
            previous = _next_hash(previous, data[end - size : end])
            self.hashes.append(previous)
        self._rest = data[len(data) - len(data) % size :]


def block_hashes(
    salt: bytes, tokens: Sequence[int], block_tokens: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the hashes of the `BlockChain` of `tokens`, of which the first `known` ones are not computed."""
    chain = BlockChain(salt, block_tokens, known[: len(tokens) // block_tokens])
    chain.add(tokens[len(chain.hashes) * block_tokens :])
    return chain.hashes


class RunningHash:
    """The `prefix_hash` of tokens that are added one after another."""

    __slots__ = ("_state",)

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._state = blake2b(token_bytes(tokens), digest_size=HASH_BYTES, person=_PERSON)

    def add(self, tokens: Sequence[int]) -> None:
        self._state.update(token_bytes(tokens))

    def digest(self) -> bytes:
        return self._state.digest()


class PrefixHasher:
    """An incremental `prefix_hash`, which does not hash a growing sequence from its start each time.

    The owner of the sequence calls `truncate` before it changes tokens that were hashed. The first `skipped`
    tokens of each sequence are left out: lengths count from there.
    """

    __slots__ = ("_last", "_marks", "_skipped")

    def __init__(self, skipped: int = 0) -> None:
        self._skipped = skipped
        # Checkpoint i covers the first i * _MARK_TOKENS tokens.
        self._marks = [blake2b(digest_size=HASH_BYTES, person=_PERSON)]
        self._last = (0, self._marks[0])

    def digest(self, tokens: Sequence[int], length: int) -> bytes:
        """Return the hash of tokens[skipped : skipped + length]; 0 <= length <= len(tokens) - skipped."""
        skipped = self._skipped
        while len(self._marks) <= length // _MARK_TOKENS:
            done = (len(self._marks) - 1) * _MARK_TOKENS
            mark = self._marks[-1].copy()
            mark.update(token_bytes(tokens[skipped + done : skipped + done + _MARK_TOKENS]))
            self._marks.append(mark)
        done, state = self._last
        marked = length // _MARK_TOKENS * _MARK_TOKENS
        if not marked <= done <= length:
            done, state = marked, self._marks[length // _MARK_TOKENS]
        state = state.copy()
        state.update(token_bytes(tokens[skipped + done : skipped + length]))
        self._last = (length, state)
        return state.digest()

    def extended_digest(self, tokens: Sequence[int], further: Sequence[int]) -> bytes:
        """Return the hash of `tokens` followed by `further`, which is not remembered."""
        self.digest(tokens, len(tokens) - self._skipped)
        state = self._last[1].copy()
        state.update(token_bytes(further))
        return state.digest()

    def truncate(self, length: int) -> None:
        """Forget hashes beyond `length`, before the tokens there change."""
        del self._marks[length // _MARK_TOKENS + 1 :]
        if self._last[0] > length:
            self._last = (0, self._marks[0])


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return `tokens` as little-endian uint32, as the token log stores them."""
    words = array("I", tokens)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


def tokens_from_bytes(data: bytes) -> list[int]:
    """Return the inverse of `token_bytes`. Raise ValueError unless `data` is a whole number of tokens."""
    words = array("I")
    words.frombytes(data)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tolist()


_BIG_ENDIAN = array("I", [1]).tobytes()[0] != 1


@dataclass(frozen=True, slots=True)
class Hit:
    """The cache agrees with the request on [0, agree); the rest of the cache must be cut."""

    agree: int


@dataclass(frozen=True, slots=True)
class Miss:
    """The cache lacks the prefix. It has `have` tokens with this hash, or 0 if the prefix differs."""

    have: int
    prefix_hash: bytes


def look_up(
    held: Sequence[int],
    start: int,
    tokens: Sequence[int],
    prefix: bytes,
    hasher: PrefixHasher | None = None,
) -> Hit | Miss:
    """Return how much of `held` serves a request for `tokens` after a prefix [0, start) of hash `prefix`.

    `hasher` is that of `held`; without one, the prefix is hashed from its start.
    """
    hasher = hasher or PrefixHasher()
    if len(held) < start:
        return Miss(len(held), hasher.digest(held, len(held)))
    if hasher.digest(held, start) != prefix:
        return Miss(0, hasher.digest(held, 0))
    return Hit(start + common_prefix_len(held[start : start + len(tokens)], tokens))


def common_prefix_len(ours: Sequence[int], theirs: Sequence[int]) -> int:
    shared = min(len(ours), len(theirs))
    if ours[:shared] == theirs[:shared]:  # the usual case, and fast
        return shared
    return next(compress(count(), map(ne, ours, theirs)), shared)
