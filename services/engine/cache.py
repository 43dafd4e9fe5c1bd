"""Sequences' caches over a model's own blocks, for those that do no accounting of their own.

Caches that were forked share blocks, and copy the one that they write to.
"""

from __future__ import annotations

import heapq
import weakref
from typing import TYPE_CHECKING

from services.core.blocks import BLOCK_TOKENS
from services.core.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterable

_RETRY_AFTER_S = 1.0


class FreeBlocks:
    """The blocks of a pool that no cache holds; the lowest go first, so that little memory is touched."""

    __slots__ = ("__weakref__", "_free", "_holders")

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks))
        self._holders = [0] * blocks

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many blocks. Raises Overloaded, taking none, where there are fewer."""
        if count > len(self._free):
            raise Overloaded(f"{count} KV blocks are needed, {len(self._free)} are free", _RETRY_AFTER_S)
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more cache holds each of these."""
        for block in blocks:
            self._holders[block] += 1

    def shared(self, block: int) -> bool:
        """Does more than one cache hold it?"""
        return self._holders[block] > 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One cache fewer holds each of these; those that none holds are free."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                heapq.heappush(self._free, block)


class SessionCache:
    """The KV of `tokens`, no more and no less; only CausalModel.forward adds to it."""

    __slots__ = ("__weakref__", "_free", "blocks", "tokens")

    def __init__(self, free: FreeBlocks) -> None:
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self._free = free
        weakref.finalize(self, free.give_back, self.blocks).atexit = False

    def reserve(self, length: int) -> list[tuple[int, int]]:
        """Hold blocks for [0, length), the one that is written to next alone.

        Returns what is to be copied for that, (from, to), at once. Raises Overloaded, holding what it did.
        """
        at = len(self.tokens) // BLOCK_TOKENS
        shared = self.blocks[at:][:1]
        if not shared or not self._free.shared(shared[0]):
            shared = []
        missing = max(0, _blocks_of(length) - len(self.blocks))
        taken = self._free.take(missing + len(shared))
        self.blocks[at : at + len(shared)] = taken[: len(shared)]
        self.blocks += taken[len(shared) :]
        self._free.give_back(shared)
        return list(zip(shared, taken, strict=False))

    def fork(self, length: int) -> SessionCache:
        """Another one of the first `length` tokens. Raises ValueError if less is held."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot fork {length} of {len(self.tokens)} tokens")
        forked = SessionCache(self._free)
        forked.tokens = self.tokens[:length]
        forked.blocks += self.blocks[: _blocks_of(length)]
        self._free.share(forked.blocks)
        return forked

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on. Raises ValueError if less than `length` is held."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot cut {len(self.tokens)} tokens to {length}")
        del self.tokens[length:]
        self.trim()

    def trim(self) -> None:
        """Give back the blocks beyond the tokens."""
        kept = _blocks_of(len(self.tokens))
        self._free.give_back(self.blocks[kept:])
        del self.blocks[kept:]


def _blocks_of(length: int) -> int:
    return -(-length // BLOCK_TOKENS)
