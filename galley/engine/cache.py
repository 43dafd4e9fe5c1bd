"""Sequences' caches over a model's own blocks, for those that do no accounting of their own."""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterable

from galley.core.errors import Overloaded
from galley.core.kv.blocks import BLOCK_TOKENS

_RETRY_AFTER_S = 1.0


class FreeBlocks:
    """The blocks of a pool that no cache holds; the lowest go first, so that little memory is touched."""

    __slots__ = ("__weakref__", "_free")

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many blocks. Raises Overloaded, taking none, where there are fewer."""
        if count > len(self._free):
            raise Overloaded(f"{count} KV blocks are needed, {len(self._free)} are free", _RETRY_AFTER_S)
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks that were taken."""
        for block in blocks:
            heapq.heappush(self._free, block)


class SessionCache:
    """The KV of `tokens`, no more and no less; only CausalModel.forward adds to it."""

    __slots__ = ("__weakref__", "_free", "blocks", "tokens")

    def __init__(self, free: FreeBlocks) -> None:
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self._free = free
        weakref.finalize(self, free.give_back, self.blocks).atexit = False

    def reserve(self, length: int) -> None:
        """Hold blocks for [0, length). Raises Overloaded, holding no more than before."""
        missing = _blocks_of(length) - len(self.blocks)
        if missing > 0:
            self.blocks += self._free.take(missing)

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
