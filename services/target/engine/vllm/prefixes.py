"""The prefix cache of vLLM by Galley's own block hashes, which a lease publishes.

vLLM names blocks by hashes that only it can compute. Its events say which tokens they stand for, so that the
chained hash of `galley.core.content`, which gateways compute too, can stand beside each. vLLM may keep
several blocks of one content, and reports each of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from itertools import islice

from galley.core.content import chain_start, next_block_hash
from services.target.engine.vllm.protocol import DroppedBlocks, StoredBlocks


class PrefixIndex:
    """The blocks in the prefix cache, `blocks` of them; `dropped` counts those that it has dropped since."""

    def __init__(self, block_tokens: int) -> None:
        self.blocks = 0
        self.dropped = 0
        self._block_tokens = block_tokens
        self._names: dict[Hashable, bytes] = {}
        self._copies: Counter[Hashable] = Counter()
        self._recent: OrderedDict[bytes, None] = OrderedDict()  # most recently used last

    def recent(self, limit: int) -> list[bytes]:
        """Return up to `limit` hashes of cached blocks, most recently used first."""
        return list(islice(reversed(self._recent), limit))

    def record(self, events: Sequence[StoredBlocks | DroppedBlocks | None]) -> None:
        for event in events:
            if event is None:
                self.clear()
            elif isinstance(event, StoredBlocks):
                self._store(event)
            else:
                self._drop(event)

    def clear(self) -> None:
        self.blocks = 0
        self._names.clear()
        self._copies.clear()
        self._recent.clear()

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Count the blocks of these chained hashes, as far as they are cached, as used now."""
        for name in hashes:
            if name in self._recent:
                self._recent.move_to_end(name)

    def _store(self, event: StoredBlocks) -> None:
        if event.parent is None:
            name = chain_start(bytes.fromhex(event.salt))
        elif event.parent in self._names:
            name = self._names[event.parent]
        else:
            return  # of a chain whose beginning is no longer cached, so that no request can find it
        if len(event.tokens) != len(event.hashes) * self._block_tokens:
            return  # not blocks of the size that gateways hash
        for index, block_hash in enumerate(event.hashes):
            first = index * self._block_tokens
            name = next_block_hash(name, event.tokens[first : first + self._block_tokens])
            self._names[block_hash] = name
            self._copies[block_hash] += 1
            self.blocks += 1
            self._recent[name] = None
            self._recent.move_to_end(name)

    def _drop(self, event: DroppedBlocks) -> None:
        for block_hash in event.hashes:
            if block_hash not in self._names:
                continue
            self.dropped += 1
            self.blocks -= 1
            self._copies[block_hash] -= 1
            if not self._copies[block_hash]:
                del self._copies[block_hash]
                self._recent.pop(self._names.pop(block_hash), None)
