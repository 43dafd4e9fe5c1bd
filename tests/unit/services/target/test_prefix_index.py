"""vLLM's prefix cache by Galley's own hashes."""

from __future__ import annotations

import pytest

from galley.core.content import block_hashes
from services.target.engine.vllm.prefixes import PrefixIndex
from services.target.engine.vllm.protocol import DroppedBlocks, StoredBlocks

TOKENS = list(range(12))
SALT = b"tenant"
NAMES = block_hashes(SALT, TOKENS, 4)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(4)
    index.record(
        [StoredBlocks(("a", "b"), None, TOKENS[:8], SALT.hex()), StoredBlocks(("c",), "b", TOKENS[8:], "")]
    )
    return index


def test_stored_blocks_have_the_hashes_that_gateways_compute(index: PrefixIndex) -> None:
    assert index.recent(9) == NAMES[::-1]
    assert index.recent(2) == NAMES[:0:-1]


def test_dropped_blocks_are_named_no_more_and_count_once(index: PrefixIndex) -> None:
    index.record([DroppedBlocks(("c", "unknown")), DroppedBlocks(("c",))])
    assert index.recent(9) == [NAMES[1], NAMES[0]]
    assert (index.blocks, index.dropped) == (2, 1)


def test_a_block_is_named_until_its_last_copy_is_dropped(index: PrefixIndex) -> None:
    index.record([StoredBlocks(("b",), "a", TOKENS[4:8], ""), DroppedBlocks(("b",))])
    assert set(index.recent(9)) == set(NAMES)
    assert (index.blocks, index.dropped) == (3, 1)
    index.record([DroppedBlocks(("b",))])
    assert set(index.recent(9)) == {NAMES[0], NAMES[2]}


def test_blocks_of_another_size_are_not_named(index: PrefixIndex) -> None:
    index.record([StoredBlocks(("part",), "c", TOKENS[:2], "")])
    assert index.recent(9) == NAMES[::-1]


def test_a_chain_goes_on_only_from_a_block_that_is_cached(index: PrefixIndex) -> None:
    index.record([DroppedBlocks(("b",)), StoredBlocks(("d",), "b", TOKENS[:4], "")])
    assert index.recent(9) == [NAMES[2], NAMES[0]]


def test_blocks_that_are_used_again_come_first(index: PrefixIndex) -> None:
    index.touch(NAMES[:1])
    assert index.recent(1) == [NAMES[0]]
    index.touch(block_hashes(b"other", TOKENS, 4))
    assert index.recent(1) == [NAMES[0]]
    index.record([StoredBlocks(("b",), "a", TOKENS[4:8], "")])
    assert index.recent(1) == [NAMES[1]]


def test_a_cleared_cache_names_nothing(index: PrefixIndex) -> None:
    index.record([None])
    assert (index.recent(9), index.blocks) == ([], 0)
