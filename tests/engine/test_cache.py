"""Caches of one pool: blocks that forks share are copied where written, and free when nobody holds them."""

from __future__ import annotations

import random

import pytest

from services.core.blocks import BLOCK_TOKENS
from services.core.errors import Overloaded
from services.engine.cache import FreeBlocks, SessionCache


def feed(cache: SessionCache, count: int) -> list[tuple[int, int]]:
    """As a model does, but for the copying."""
    copies = cache.reserve(len(cache.tokens) + count)
    cache.tokens.extend([1] * count)
    return copies


def test_only_the_block_that_is_written_to_is_copied_and_once() -> None:
    free = FreeBlocks(8)
    cache = SessionCache(free)
    assert feed(cache, 2 * BLOCK_TOKENS + 5) == []
    fork = cache.fork(2 * BLOCK_TOKENS + 3)
    assert fork.blocks == cache.blocks == [0, 1, 2]
    assert feed(fork, 1) == [(2, 3)]
    assert feed(fork, BLOCK_TOKENS) == []
    assert fork.blocks == [0, 1, 3, 4]
    # It is the only one there again.
    assert feed(cache, 1) == []
    assert cache.blocks == [0, 1, 2]
    # At a block's end there is nothing to copy.
    assert feed(cache.fork(BLOCK_TOKENS), 1) == []


def test_whoever_writes_first_copies_what_is_shared() -> None:
    cache = SessionCache(FreeBlocks(4))
    feed(cache, 5)
    fork = cache.fork(5)
    assert feed(cache, 1) == [(0, 1)]
    assert feed(fork, 1) == []
    assert (cache.blocks, fork.blocks) == ([1], [0])


def test_what_there_is_no_room_for_changes_nothing() -> None:
    free = FreeBlocks(2)
    cache = SessionCache(free)
    feed(cache, 5)
    fork = cache.fork(4)
    with pytest.raises(Overloaded):
        fork.reserve(BLOCK_TOKENS + 1)
    assert (fork.blocks, fork.tokens, len(free)) == ([0], [1] * 4, 1)
    with pytest.raises(ValueError, match="cannot fork 6 of 5"):
        cache.fork(6)


def test_blocks_are_free_when_no_cache_holds_them() -> None:
    chance, free = random.Random(1), FreeBlocks(64)
    caches = [SessionCache(free)]
    for _ in range(400):
        one = chance.choice(caches)
        match chance.randrange(4):
            case 0 if len(caches) < 6:
                caches.append(one.fork(chance.randint(0, len(one.tokens))))
            case 1 if len(caches) > 1:
                caches.remove(one)
            case 2:
                one.truncate(chance.randint(0, len(one.tokens)))
            case _ if len(one.tokens) < 5 * BLOCK_TOKENS:
                feed(one, chance.randint(0, 40))
        del one
        assert len({block for cache in caches for block in cache.blocks}) == 64 - len(free)
        assert all(len(one.blocks) == -(-len(one.tokens) // BLOCK_TOKENS) for one in caches)
    caches.clear()
    assert len(free) == 64
