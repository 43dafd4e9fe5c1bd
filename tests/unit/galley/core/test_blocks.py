"""The block pool: three states, references, and a cache by content that is lost from the ends of chains."""

from __future__ import annotations

import pytest

from galley.core.content import block_hashes
from galley.core.errors import Broken
from galley.core.kv.blocks import BlockPool

A, B, C = block_hashes(b"salt", [1, 2, 3], 1)


def taken(pool: BlockPool, count: int) -> list[int]:
    return [pool.take() for _ in range(count)]


def cached_chain(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    blocks = taken(pool, len(hashes))
    for block_hash, block in zip(hashes, blocks, strict=True):
        pool.register(block_hash, block)
    pool.release(blocks)
    return blocks


def test_gives_every_block_once_and_no_more() -> None:
    pool = BlockPool(3)
    assert sorted(taken(pool, 3)) == [0, 1, 2]
    assert pool.available == 0
    with pytest.raises(Broken):
        pool.take()


def test_an_unregistered_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share((block,))
    pool.release((block,))
    assert pool.available == 0
    pool.release((block,))
    assert pool.available == 1
    assert pool.take() == block


def test_a_registered_block_is_reusable_until_it_is_taken() -> None:
    pool = BlockPool(1)
    (block,) = cached_chain(pool, [A])
    assert pool.find(A) == block
    pool.share((block,))
    assert pool.available == 0
    pool.release((block,))
    assert pool.take() == block
    assert pool.find(A) is None


def test_free_blocks_go_first_and_chains_are_lost_from_their_ends() -> None:
    pool = BlockPool(4)
    first, second, third = cached_chain(pool, [A, B, C])
    assert pool.take() not in {first, second, third}
    assert taken(pool, 3) == [third, second, first]


def test_the_longest_unused_goes_first() -> None:
    pool = BlockPool(2)
    (old,) = cached_chain(pool, [A])
    (new,) = cached_chain(pool, [B])
    pool.share((old,))
    pool.release((old,))
    assert pool.take() == new
    assert pool.find(A) == old


@pytest.mark.parametrize("misuse", ["share", "release", "unpin"])
def test_a_free_block_cannot_be_used(misuse: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(Broken):
        getattr(pool, misuse)((0,))


def test_a_free_block_cannot_be_forgotten() -> None:
    with pytest.raises(Broken):
        BlockPool(1).forget(0)


def test_a_block_has_one_content() -> None:
    pool = BlockPool(1)
    with pytest.raises(Broken):
        pool.register(A, 0)
    block = pool.take()
    pool.register(A, block)
    with pytest.raises(Broken):
        pool.register(B, block)
