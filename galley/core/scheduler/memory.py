"""KV memory as the scheduler uses it: a table of blocks, or an engine that keeps its blocks to itself."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Protocol

from galley.core.content import Hit, Miss, SessionKey
from galley.core.kv.table import Reservation


class KvMemory(Protocol):
    """The KV of sessions, as the scheduler uses it; `KvTable` documents each call.

    A memory whose engine divides its own blocks reserves nothing and has no block table.
    """

    @property
    def total(self) -> int:
        """Return the number of blocks."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def live_blocks(self) -> int:
        """Return the number of blocks that live sessions hold; shared ones count once."""

    @property
    def free(self) -> int:
        """Return the number of blocks that no live session holds: empty, cached, or held by idle sessions."""

    @property
    def empty(self) -> int: ...

    @property
    def evicted_blocks(self) -> int:
        """Return how many cached blocks were dropped for others so far."""

    def cached_prefixes(self, limit: int) -> list[bytes]:
        """Return the chained hashes of cached blocks (`content.block_hashes`), at most `limit`."""

    @property
    def max_sessions(self) -> int:
        """Return the number of sessions that have KV at most."""

    @property
    def moved(self) -> int:
        """Return the number of blocks of sessions that were opened or evicted so far."""

    def has_blocks(self, key: SessionKey) -> bool: ...

    def tokens_of(self, key: SessionKey) -> Sequence[int]: ...

    def hashes_of(self, key: SessionKey) -> Sequence[bytes]: ...

    def blocks_of(self, key: SessionKey) -> Sequence[int]: ...

    def look_up(
        self, key: SessionKey, start: int, tokens: Sequence[int], prefix_hash: bytes
    ) -> Hit | Miss: ...

    def cached_prefix(self, key: SessionKey) -> Miss: ...

    def open(
        self,
        key: SessionKey,
        arrival: int,
        tokens: list[int],
        priority: int = 0,
        hashes: Sequence[bytes] = (),
    ) -> int: ...

    def make_room(self, lengths: Mapping[SessionKey, int], until: int) -> bool: ...

    def reserve(self, key: SessionKey, length: int, busy: Container[SessionKey] = ()) -> Reservation: ...

    def append_computed(self, key: SessionKey, tokens: Sequence[int]) -> None: ...

    def truncate(self, key: SessionKey, length: int) -> None: ...

    def distrust(self, blocks: Collection[int]) -> None: ...

    def make_idle(self, key: SessionKey) -> None: ...

    def take_evicted(self) -> tuple[SessionKey, ...]: ...

    def clear(self) -> None: ...
