"""One session's tokens and blocks over a shared `BlockPool`; `table.py` has the rules.

Until `grow`, the block of the next position may be shared or registered: it was attached or truncated.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from galley.core.content import (
    PrefixHasher,
    SessionKey,
    chain_start,
    common_prefix_len,
    next_block_hash,
)
from galley.core.errors import Broken
from galley.core.kv.blocks import BlockPool


class KvSession:
    """A session's blocks: [0, len(hashes)) are full of computed tokens, the others partly filled or empty."""

    __slots__ = (
        "_block_table",
        "_block_tokens",
        "_copied",
        "_pool",
        "arrival",
        "blocks",
        "hashes",
        "key",
        "live",
        "prefix",
        "priority",
        "tokens",
    )

    def __init__(self, key: SessionKey, pool: BlockPool, block_tokens: int) -> None:
        self.key = key
        self.arrival = 0
        self.priority = 0
        self.live = False
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.prefix = PrefixHasher()
        self._pool = pool
        self._block_tokens = block_tokens
        self._copied: int | None = None  # index of a block whose copy is ordered but not confirmed
        self._block_table: tuple[int, ...] | None = None

    @property
    def age(self) -> tuple[int, int, SessionKey]:
        """Return the sort key of sessions, unique: the higher priority first, then the older session."""
        return -self.priority, self.arrival, self.key

    @property
    def block_table(self) -> tuple[int, ...]:
        if self._block_table is None:
            self._block_table = tuple(self.blocks)
        return self._block_table

    def missing(self, length: int) -> int:
        """Return how many more blocks are needed to cover [0, length)."""
        return max(0, self._blocks_for(length) - len(self.blocks))

    def shared_if_written(self, length: int) -> int | None:
        """Return the block that must be copied before positions below `length` are written, if any."""
        index = len(self.tokens) // self._block_tokens
        if length > len(self.tokens) and index < len(self.blocks) and self._is_shared(self.blocks[index]):
            return self.blocks[index]
        return None

    def set_live(self, live: bool) -> None:
        if live == self.live:
            return
        self.live = live
        if live:
            self._pool.pin(self.blocks)
        else:
            self._pool.unpin(self.blocks)

    def roll_back(self) -> None:
        """Drop what is uncertain: blocks beyond the computed tokens, and a block that was to be copied."""
        sure = len(self.tokens)
        if self._copied is not None:
            sure = min(sure, self._copied * self._block_tokens)
            self._copied = None
        self.truncate(sure)

    def truncate(self, length: int) -> None:
        """Cut to `length` tokens at most, and release the blocks beyond."""
        self._release(self._blocks_for(length))
        if length < len(self.tokens):
            self.prefix.truncate(length)
            del self.tokens[length:]
            del self.hashes[length // self._block_tokens :]

    def surrender(self) -> tuple[list[int], list[bytes], PrefixHasher]:
        """Release all blocks; return the tokens of the full ones and their hashes, which it gives up."""
        self._release(0)
        tokens, hashes, prefix = self.tokens, self.hashes, self.prefix
        prefix.truncate(len(hashes) * self._block_tokens)
        del tokens[len(hashes) * self._block_tokens :]
        self.tokens, self.hashes, self.prefix = [], [], PrefixHasher()
        return tokens, hashes, prefix

    def distrust(self, blocks: Container[int]) -> None:
        """Cut before the first of these blocks, whose content is in doubt and which are not registered."""
        for index, block in enumerate(self.blocks[: len(self.tokens) // self._block_tokens + 1]):
            if block in blocks:
                # Otherwise `truncate` would register what it releases.
                del self.hashes[index:]
                self.truncate(index * self._block_tokens)
                return

    def restore(self, tokens: list[int], hashes: Sequence[bytes] = ()) -> None:
        """Keep or attach the blocks of the longest cached prefix of `tokens`, never including the last.

        `hashes` are those of the first full blocks of `tokens`, as far as they are known.
        """
        most = max(0, len(tokens) - 1)
        self.truncate(min(common_prefix_len(self.tokens, tokens), most))
        own = len(self.hashes)
        found, found_hashes = self._find_after_own(tokens, hashes)
        reach = min((own + len(found)) * self._block_tokens, most)
        if reach <= len(self.tokens):
            return
        self.truncate(own * self._block_tokens)
        attached = found[: self._blocks_for(reach) - own]
        self._pool.share(attached)
        self._extend(attached)
        attached_tokens = tokens[own * self._block_tokens : reach]
        self.tokens = self.tokens + attached_tokens if self.tokens else attached_tokens
        self.hashes.extend(found_hashes[: reach // self._block_tokens - own])

    def grow(self, length: int) -> tuple[tuple[int, int], ...]:
        """Get blocks for [0, length), writable from the next position on. Return block copies (from, to)."""
        copies = self._make_own() if length > len(self.tokens) else ()
        while len(self.blocks) < self._blocks_for(length):
            self._extend((self._pool.take(),))
        return copies

    def append_computed(self, tokens: Sequence[int]) -> None:
        """Append computed tokens; register the blocks that got full. Raise Broken unless `grow` made room."""
        if tokens:
            self._check_room(len(self.tokens) + len(tokens))
        self._copied = None
        self.tokens.extend(tokens)
        for index in range(len(self.hashes), len(self.tokens) // self._block_tokens):
            block_hash = next_block_hash(self._last_hash(), self._block(self.tokens, index))
            self.hashes.append(block_hash)
            # Where another session has computed the same, this block stays private.
            self._pool.register(block_hash, self.blocks[index])

    def _blocks_for(self, length: int) -> int:
        return -(-length // self._block_tokens)

    def _block(self, tokens: Sequence[int], index: int) -> Sequence[int]:
        return tokens[index * self._block_tokens : (index + 1) * self._block_tokens]

    def _last_hash(self) -> bytes:
        return self.hashes[-1] if self.hashes else chain_start(self.key[0])

    def _is_shared(self, block: int) -> bool:
        return self._pool.references(block) > 1

    def _extend(self, blocks: Sequence[int]) -> None:
        self.blocks.extend(blocks)
        self._block_table = None
        if self.live:
            self._pool.pin(blocks)

    def _release(self, keep: int) -> None:
        """Release blocks from the last one down to `keep`, so that chains are lost from their ends."""
        if keep >= len(self.blocks):
            return
        blocks, hashes = self.blocks[keep:], self.hashes[keep:]
        del self.blocks[keep:]
        self._block_table = None
        if self.live:
            self._pool.unpin(blocks)
        self._pool.release(blocks[len(hashes) :])
        self._pool.release(blocks[: len(hashes)], hashes)

    def _make_own(self) -> tuple[tuple[int, int], ...]:
        """Make the block of the next position writable; return the copy that this takes, if any."""
        index = len(self.tokens) // self._block_tokens
        if index >= len(self.blocks):
            return ()
        block = self.blocks[index]
        if not self._is_shared(block):
            self._pool.forget(block)
            return ()
        fresh = self._pool.take()
        self.blocks[index] = fresh
        self._block_table = None
        self._copied = index
        if self.live:
            self._pool.pin((fresh,))
            self._pool.unpin((block,))
        self._pool.release((block,))
        return ((block, fresh),)

    def _check_room(self, length: int) -> None:
        if self.missing(length):
            raise Broken(f"session {self.key[1]!r} was computed beyond its blocks")
        block = self.blocks[len(self.tokens) // self._block_tokens]
        if self._is_shared(block) or self._pool.is_registered(block):
            raise Broken(f"session {self.key[1]!r} was computed in a block that is not its own")

    def _find_after_own(
        self, tokens: Sequence[int], hashes: Sequence[bytes]
    ) -> tuple[list[int], list[bytes]]:
        """Return the registered blocks of `tokens` after its own full blocks, up to the first gap.

        Also return their hashes, after which those of further blocks may follow.
        """
        own = len(self.hashes)
        known = list(hashes[own:])
        found = self._pool.find_chain(known)
        if len(found) < len(known):
            return found, known
        previous = known[-1] if known else self._last_hash()
        for index in range(own + len(known), len(tokens) // self._block_tokens):
            previous = next_block_hash(previous, self._block(tokens, index))
            block = self._pool.find(previous)
            if block is None:
                break
            found.append(block)
            known.append(previous)
        return found, known
