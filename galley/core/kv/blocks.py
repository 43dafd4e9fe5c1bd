"""The block pool: which KV blocks are in use, by how many sessions, and what the unused ones still hold.

A block is a number; the engine knows what lies in it. A block is in one of three states:

- free: it holds nothing;
- held: one or more sessions refer to it;
- cached: nobody refers to it, but it is registered under the hash of its content and can be reused.

Only full blocks of confirmed tokens are registered, under hashes chained from the first block on
(`content.block_hashes`); so a hash stands for the block and all before it. Free blocks are taken first, then
cached ones, the least recently used first. Live sessions pin what they hold; pins are only counted. Every
operation is O(1) for each block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice, zip_longest
from operator import eq

from galley.core.errors import Broken

BLOCK_TOKENS = 32  # default of every engine


class BlockPool:
    def __init__(self, blocks: int) -> None:
        """Create free blocks. Raise ValueError below 1. `evicted` counts dropped cached contents."""
        if blocks < 1:
            raise ValueError(f"blocks: must be >= 1, got {blocks}")
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
        """Return the number of blocks that `take` can give: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def empty(self) -> int:
        return len(self._free)

    @property
    def pinned(self) -> int:
        return self._pinned

    def references(self, block: int) -> int:
        return self._references[block]

    def count_released(self, blocks: Sequence[int], released: Mapping[int, int]) -> int:
        """Return how many of these blocks nobody holds once so many references to each are `released`."""
        references = map(self._references.__getitem__, blocks)
        return sum(map(eq, references, map(released.__getitem__, blocks)))

    def is_registered(self, block: int) -> bool:
        return self._hashes[block] is not None

    def find(self, block_hash: bytes) -> int | None:
        return self._registered.get(block_hash)

    def find_chain(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the registered blocks of these hashes, up to the first that has none."""
        blocks = list(map(self._registered.get, hashes))
        return blocks[: blocks.index(None)] if None in blocks else blocks  # type: ignore[return-value]  # without None

    def recent_hashes(self, limit: int) -> list[bytes]:
        """Return up to `limit` registered hashes, most recently used first."""
        return list(islice(reversed(self._registered), limit))

    def take(self) -> int:
        """Return a block of unknown content with one reference. Raise Broken if none is `available`."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._unregister(block)
            self.evicted += 1
        else:
            raise Broken("kv: take from an empty pool")
        self._references[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of the held or cached blocks. Raise Broken at one that is free."""
        references, cached = self._references, self._cached
        for block in blocks:
            if references[block] == 0:
                if block not in cached:
                    raise Broken(f"block {block} was shared but is free")
                del cached[block]
            references[block] += 1
            self._touch(block)

    def release(self, blocks: Sequence[int], hashes: Sequence[bytes] = ()) -> None:
        """Remove a reference to each block, the last one first, so that chains are lost from their ends.

        The last reference leaves a block cached if it is registered, else free. With the `hashes` of full
        blocks, each content counts as used now, and is registered again if no other block has it.
        """
        references, names = self._references, self._hashes
        for block, block_hash in zip_longest(reversed(blocks), reversed(hashes)):
            if references[block] == 0:
                raise Broken(f"block {block} was released but nobody holds it")
            if block_hash is not None and names[block] != block_hash:
                self.register(block_hash, block)
            references[block] -= 1
            self._touch(block)
            if references[block] > 0:
                continue
            if names[block] is not None:
                self._cached[block] = None
            else:
                self._free.append(block)

    def pin(self, blocks: Sequence[int]) -> None:
        pins, first = self._pins, 0
        for block in blocks:
            first += not pins[block]
            pins[block] += 1
        self._pinned += first

    def unpin(self, blocks: Sequence[int]) -> None:
        pins = self._pins
        for block in blocks:
            if pins[block] == 0:
                raise Broken(f"block {block} was unpinned but has no pin")
            pins[block] -= 1
            self._pinned -= pins[block] == 0

    def register(self, block_hash: bytes, block: int) -> None:
        """Register the held `block`. If another block has this content, count that one as used now instead.

        Raises Broken if the block is not held or has another hash.
        """
        known = self._registered.get(block_hash)
        if known is not None:
            self._touch(known)
            return
        if self._references[block] == 0 or self.is_registered(block):
            raise Broken(f"kv: block {block} cannot be registered: it is not held, or has another content")
        self._registered[block_hash] = block
        self._hashes[block] = block_hash

    def forget(self, block: int) -> None:
        """Unregister a held block, whose content is about to change or in doubt."""
        if self._references[block] == 0:
            raise Broken(f"block {block} was to be forgotten but nobody holds it")
        self._unregister(block)

    def distrust(self, block: int) -> None:
        """Unregister a block whose content is in doubt, whoever holds it."""
        self._unregister(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def _touch(self, block: int) -> None:
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
