"""Which blocks of the KV pool are in use, by how many, and what the unused ones still hold.

A block is a number; the engine knows what lies in it. A block is in one of three states:

- free: it holds nothing of worth;
- held: one or more sessions refer to it;
- cached: nobody refers to it, but it is registered under the hash of its content, so that it can be had back.

Only full blocks of confirmed tokens are registered, under hashes that are chained from the first block on
(`content.block_hashes`), so a hash stands for the block and all before it. Blocks are taken from the free
ones, then from the cached ones, the longest unused first. Whoever releases a sequence releases its last block
first, so that a chain is lost from its end. Every operation is O(1). One thread only.

A holder that is at work pins what it holds, which only counts: `pinned` blocks are not to be had soon.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice

from galley.core.errors import Broken

BLOCK_TOKENS = 32  # of every engine that is not told otherwise


class BlockPool:
    """A fixed number of blocks with reference counts and a cache by content."""

    def __init__(self, blocks: int) -> None:
        """Raises ValueError if there is no block at all. `evicted` blocks have lost their cached content."""
        if blocks < 1:
            raise ValueError(f"blocks: {blocks} is no pool")
        self.total = blocks
        self.evicted = 0
        self._references = [0] * blocks
        self._pins = [0] * blocks
        self._pinned = 0
        self._hashes: list[bytes | None] = [None] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._registered: OrderedDict[bytes, int] = OrderedDict()  # most recently used last

    @property
    def available(self) -> int:
        """Blocks that `take` can still give: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def empty(self) -> int:
        """Blocks that hold nothing of worth."""
        return len(self._free)

    @property
    def pinned(self) -> int:
        """Blocks with at least one pin."""
        return self._pinned

    def references(self, block: int) -> int:
        """How many hold it."""
        return self._references[block]

    def is_registered(self, block: int) -> bool:
        """Whether its content can be found by hash."""
        return self._hashes[block] is not None

    def find(self, block_hash: bytes) -> int | None:
        """The block of this content, held or cached."""
        return self._registered.get(block_hash)

    def recent_hashes(self, limit: int) -> list[bytes]:
        """Up to `limit` registered hashes, the most recently used first."""
        return list(islice(reversed(self._registered), limit))

    def take(self) -> int:
        """A block of unknown content with one reference; raises Broken if none is `available`."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._unregister(block)
            self.evicted += 1
        else:
            raise Broken("a block was taken from a pool without any")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a held or cached block; raises Broken if it is free."""
        if self._references[block] == 0:
            if block not in self._cached:
                raise Broken(f"block {block} was shared but is free")
            del self._cached[block]
        self._references[block] += 1
        self._touch(block)

    def release(self, block: int) -> None:
        """One reference less; the last leaves it cached if it is registered, else free.

        Raises Broken if nobody holds it.
        """
        if self._references[block] == 0:
            raise Broken(f"block {block} was released but nobody holds it")
        self._references[block] -= 1
        self._touch(block)
        if self._references[block] > 0:
            return
        if self.is_registered(block):
            self._cached[block] = None
        else:
            self._free.append(block)

    def pin(self, block: int) -> None:
        """Somebody at work holds it."""
        self._pinned += self._pins[block] == 0
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        """Takes one `pin` back; raises Broken if there is none."""
        if self._pins[block] == 0:
            raise Broken(f"block {block} was unpinned but has no pin")
        self._pins[block] -= 1
        self._pinned -= self._pins[block] == 0

    def register(self, block_hash: bytes, block: int) -> bool:
        """From now on the held `block` is found by this hash; False if another block of this content is.

        Either way the content counts as used now. Raises Broken if the block is not held or has another hash.
        """
        known = self._registered.get(block_hash)
        if known is not None:
            self._touch(known)
            return known == block
        if self._references[block] == 0 or self.is_registered(block):
            raise Broken(f"block {block} cannot be registered: nobody holds it, or it has another content")
        self._registered[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def forget(self, block: int) -> None:
        """The content of this held block is about to change, or in doubt: it is found no more."""
        if self._references[block] == 0:
            raise Broken(f"block {block} was to be forgotten but nobody holds it")
        self._unregister(block)

    def check(self, references: Mapping[int, int], pins: Mapping[int, int]) -> None:
        """Raises Broken unless these (block to how many hold, or pin it) are what the pool believes."""
        if {block: count for block, count in enumerate(self._pins) if count} != dict(pins):
            raise Broken(f"the pool believes in pins {self._pins}, the tables have {dict(pins)}")
        if self._pinned != len(pins):
            raise Broken(f"{self._pinned} blocks are counted as pinned, {len(pins)} are")
        believed = {block: count for block, count in enumerate(self._references) if count}
        if believed != dict(references):
            raise Broken(f"the pool believes in references {believed}, the tables hold {dict(references)}")
        if sorted([*self._free, *self._cached, *believed]) != list(range(self.total)):
            raise Broken("free, cached and held blocks are not the pool")
        if {block: name for name, block in self._registered.items()} != {
            block: name for block, name in enumerate(self._hashes) if name is not None
        }:
            raise Broken("the hashes and their blocks differ")
        if any(self.is_registered(block) for block in self._free):
            raise Broken("a free block is registered")
        if not all(self.is_registered(block) for block in self._cached):
            raise Broken("a cached block is not registered")

    def _touch(self, block: int) -> None:
        """Its content, if registered, was used just now."""
        block_hash = self._hashes[block]
        if block_hash is None:
            return
        self._registered.move_to_end(block_hash)
        if block in self._cached:
            self._cached.move_to_end(block)

    def _unregister(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._registered[block_hash]
            self._hashes[block] = None
