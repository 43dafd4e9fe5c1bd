"""Each rule of the KV table, over blocks of four tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galley.core import content
from galley.core.content import (
    BlockChain,
    Hit,
    Miss,
    PrefixHasher,
    SessionKey,
    block_hashes,
    common_prefix_len,
    prefix_hash,
)
from galley.core.errors import Broken, Overloaded
from galley.core.kv import session
from galley.core.kv.table import KvTable
from tests.fakes.kv_check import check_table, drop

T = 4  # tokens a block
A, B, C, D = ((b"salt", name) for name in "abcd")
ELSEWHERE = (b"other", "a")


def table_of(blocks: int, max_sessions: int = 8) -> KvTable:
    return KvTable(blocks, T, max_sessions)


def filled(table: KvTable, key: SessionKey, tokens: list[int], arrival: int = 0, room: int = 0) -> None:
    have = table.open(key, arrival, tokens)
    table.reserve(key, len(tokens) + room)
    table.append_computed(key, tokens[have:-1])


def tokens(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


def compute_twins(table: KvTable, prompt: list[int]) -> None:
    for key in (A, B):
        table.open(key, 0, prompt)
        table.reserve(key, T)
    for key in (A, B):
        table.append_computed(key, prompt[:T])


def test_hashes_are_chained_and_salted() -> None:
    plain = block_hashes(b"", tokens(11), T)
    assert len(plain) == 2
    assert block_hashes(b"", tokens(8), T) == plain
    assert block_hashes(b"x", tokens(8), T)[0] != plain[0]
    assert block_hashes(b"", [9, *tokens(7, 2)], T)[1] != plain[1]
    assert block_hashes(b"", tokens(3), T) == []


@given(st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=6), st.integers(0, 9))
def test_block_hashes_of_parts_and_of_known_beginnings_are_those_of_the_whole(
    parts: list[list[int]], known: int
) -> None:
    whole = [token for part in parts for token in part]
    hashes = block_hashes(b"salt", whole, T)
    chain = BlockChain(b"salt", T)
    for part in parts:
        chain.add(part)
    assert chain.hashes == hashes
    assert block_hashes(b"salt", whole, T, hashes[:known]) == hashes
    assert block_hashes(b"salt", whole[: known * T], T, hashes) == hashes[:known]


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_the_common_prefix_ends_at_the_first_difference(ours: list[int], theirs: list[int]) -> None:
    expected = 0
    while ours[expected : expected + 1] == theirs[expected : expected + 1] != []:
        expected += 1
    assert common_prefix_len(ours, theirs) == expected
    assert common_prefix_len(ours, tuple(theirs)) == expected, "whatever holds the tokens"


def test_a_growing_sequence_is_hashed_as_from_its_beginning() -> None:
    hasher = PrefixHasher()
    sequence = tokens(2000)
    for length in (0, 3, 1700, 512, 1024, 511, 2000):
        assert hasher.digest(sequence, length) == prefix_hash(sequence[:length])
    hasher.truncate(513)
    sequence[513:] = tokens(1400, 5)
    for length in (1913, 513, 514, 1025):
        assert hasher.digest(sequence, length) == prefix_hash(sequence[:length])


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9), st.booleans()), max_size=12))
def test_prefix_hashes_while_a_sequence_grows_and_is_cut(steps: list[tuple[int, int, bool]]) -> None:
    hasher, sequence = PrefixHasher(), [0]
    for grown, back, cut in steps:
        sequence += [token * token % 251 for token in range(grown)]
        length = max(0, len(sequence) - back)
        for size in (len(sequence), length, length // 2, length, len(sequence)):
            assert hasher.digest(sequence, size) == prefix_hash(sequence[:size])
        if cut:
            hasher.truncate(length)
            sequence[length:] = [251] * (back // 2)


def test_computed_tokens_take_whole_blocks() -> None:
    table = table_of(8)
    assert table.open(A, 0, tokens(6)) == 0
    assert table.reserve(A, 6).copies == ()
    assert len(table.blocks_of(A)) == 2
    table.append_computed(A, tokens(6))
    assert table.tokens_of(A) == tokens(6)
    assert (table.live_blocks, table.free, table.total) == (2, 6, 8)
    assert table.empty == 6
    table.make_idle(A)
    assert (table.live_blocks, table.free, table.empty) == (0, 8, 6), "its blocks are free but not empty"


def test_only_full_blocks_of_computed_tokens_are_found() -> None:
    table = table_of(8)
    filled(table, A, tokens(8), room=8)
    assert table.cached_prefixes(9) == block_hashes(A[0], tokens(4), T)
    table.append_computed(A, [8])
    assert sorted(table.cached_prefixes(9)) == sorted(block_hashes(A[0], tokens(8), T))
    assert len(table.cached_prefixes(1)) == 1


def test_a_new_session_attaches_cached_blocks() -> None:
    table = table_of(8)
    filled(table, A, tokens(10))
    assert table.open(B, 1, [*tokens(8), 99]) == 8
    assert table.blocks_of(B) == table.blocks_of(A)[:2]
    assert table.live_blocks == 3


def test_known_hashes_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(8)
    filled(table, A, tokens(20))
    table.make_idle(A)
    hashes = list(table.hashes_of(A))
    assert hashes == block_hashes(A[0], tokens(19), T)
    monkeypatch.delattr(session, "next_block_hash")
    assert table.open(B, 0, tokens(19), hashes=hashes) == 16
    assert table.blocks_of(B) == table.blocks_of(A)[:4]
    check_table(table)


def test_hashes_of_an_evicted_session_end_where_its_cached_blocks_do() -> None:
    table = table_of(4)
    filled(table, A, tokens(14))
    table.make_idle(A)
    filled(table, B, tokens(7, 50))
    assert table.hashes_of(A) == block_hashes(A[0], tokens(8), T)
    assert table.hashes_of(C) == ()


def test_tenants_share_nothing() -> None:
    table = table_of(8)
    filled(table, A, tokens(10))
    assert table.open(ELSEWHERE, 1, tokens(10)) == 0


def test_the_last_token_is_fed_again_into_a_copy_of_its_shared_block() -> None:
    table = table_of(8)
    filled(table, A, tokens(9))
    theirs = table.blocks_of(A)
    assert table.open(B, 1, tokens(8)) == 7
    assert table.blocks_of(B) == theirs[:2]
    copies = table.reserve(B, 8).copies
    ours = table.blocks_of(B)
    assert copies == ((theirs[1], ours[1]),)
    assert ours[0] == theirs[0]
    assert ours[1] not in theirs
    assert table.blocks_of(A) == theirs
    assert table.reserve(B, 10).copies == ()


def test_writing_an_own_registered_block_unregisters_it() -> None:
    table = table_of(8)
    filled(table, A, tokens(9))
    table.truncate(A, 6)
    assert len(table.cached_prefixes(9)) == 2
    assert table.reserve(A, 8).copies == ()
    assert table.cached_prefixes(9) == block_hashes(A[0], tokens(4), T)
    table.append_computed(A, [70, 80])
    assert set(table.cached_prefixes(9)) == set(block_hashes(A[0], [*tokens(6), 70, 80], T))


def test_equal_blocks_computed_at_once_stay_private() -> None:
    table = table_of(8)
    compute_twins(table, tokens(5))
    assert not set(table.blocks_of(A)) & set(table.blocks_of(B))
    drop(table, A)
    assert table.open(C, 0, tokens(5)) == 4
    check_table(table)


def test_an_equal_block_replaces_the_registered_one() -> None:
    table = table_of(4)
    compute_twins(table, tokens(5))
    drop(table, A)
    filled(table, C, tokens(12, 50))
    assert table.cached_prefixes(9) == block_hashes(C[0], tokens(8, 50), T)[::-1]
    drop(table, C)
    drop(table, B)
    assert table.open(D, 0, tokens(5)) == 4
    check_table(table)


def test_a_chain_is_lost_from_its_end_even_with_an_equal_block() -> None:
    table = table_of(4)
    compute_twins(table, tokens(9))
    drop(table, A)
    table.reserve(B, 8)
    table.append_computed(B, tokens(4, 5))
    drop(table, B)
    filled(table, C, tokens(11, 50))
    assert table.open(D, 0, tokens(9)) == 4


def test_reopening_keeps_the_agreeing_prefix() -> None:
    table = table_of(8)
    filled(table, A, tokens(16))
    assert table.open(A, 0, [*tokens(6), 99, 98]) == 6
    assert table.tokens_of(A) == tokens(6)
    assert len(table.blocks_of(A)) == 2
    assert table.live_blocks == 2


def test_reopening_attaches_where_the_cache_goes_further() -> None:
    table = table_of(8)
    filled(table, A, tokens(13))
    filled(table, B, tokens(3))
    assert table.open(B, 0, tokens(14)) == 12
    assert table.blocks_of(B) == table.blocks_of(A)[:3]
    check_table(table)


def test_truncation_returns_whole_blocks_beyond() -> None:
    table = table_of(8)
    filled(table, A, tokens(6), room=14)
    assert table.live_blocks == 5
    table.truncate(A, 9)
    assert (table.live_blocks, len(table.tokens_of(A))) == (3, 5)
    table.truncate(A, 4)
    assert (table.live_blocks, table.tokens_of(A)) == (1, tokens(4))


def test_an_idle_session_keeps_its_blocks_until_they_are_needed() -> None:
    table = table_of(4)
    filled(table, A, tokens(10), room=4)
    before = table.blocks_of(A)
    table.make_idle(A)
    assert table.blocks_of(A) == before[:3]
    assert (table.live_blocks, table.free) == (0, 4)
    assert table.open(A, 0, tokens(11)) == 9
    table.make_idle(A)
    table.open(B, 1, tokens(8, 50))
    assert table.reserve(B, 8).preempted == ()
    assert table.blocks_of(A) == ()


def test_cached_blocks_go_before_idle_sessions_and_the_longest_idle_first() -> None:
    table = table_of(4)
    for key, first in ((A, 10), (B, 20), (C, 30)):
        filled(table, key, tokens(5, first))
        table.truncate(key, 4)
        table.make_idle(key)
    drop(table, C)
    table.open(D, 9, tokens(16, 40))
    table.reserve(D, 8)
    assert (len(table.blocks_of(A)), len(table.blocks_of(B))) == (1, 1)
    table.reserve(D, 12)
    assert (len(table.blocks_of(A)), len(table.blocks_of(B))) == (0, 1)


def test_a_session_that_was_evicted_is_not_hashed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    table, prompt = table_of(2000), tokens(4001)
    filled(table, A, prompt)
    table.make_idle(A)
    table.cached_prefix(A)
    filled(table, B, tokens(4001, 5000))
    assert not table.has_blocks(A)
    hashed: list[int] = []
    whole = content.token_bytes

    def counted(part: Sequence[int]) -> bytes:
        hashed.append(len(part))
        return whole(part)

    monkeypatch.setattr(content, "token_bytes", counted)
    missed = table.cached_prefix(A)
    assert sum(hashed) < 600 < missed.have
    assert missed == Miss(missed.have, prefix_hash(prompt[: missed.have]))


def test_an_evicted_session_reuses_cached_blocks() -> None:
    table = table_of(4)
    filled(table, A, tokens(13))
    table.make_idle(A)
    table.open(B, 1, tokens(6, 50))
    table.reserve(B, 6)
    assert table.cached_prefix(A) == Miss(8, prefix_hash(tokens(8)))
    assert table.look_up(A, 12, [13], prefix_hash(tokens(12))) == table.cached_prefix(A)
    assert table.look_up(A, 8, [9, 10], prefix_hash(tokens(8))) == Hit(8)
    assert table.tokens_of(A) == tokens(8)
    drop(table, B)
    assert table.open(A, 0, tokens(14)) == 8


def test_the_youngest_that_is_younger_and_not_busy_is_preempted() -> None:
    table = table_of(4)
    for arrival, key in enumerate((A, B, C, D)):
        filled(table, key, tokens(4, 10 * arrival + 1), arrival)
    assert table.reserve(B, 8, frozenset({D})).preempted == (C,)
    assert C not in table._live
    assert table.cached_prefix(C).have == 0
    with pytest.raises(Overloaded) as refused:
        table.reserve(D, 8)
    assert refused.value.retry_after_s > 0
    assert table.reserve(A, 12).preempted == (D, B)
    with pytest.raises(Overloaded):
        table.reserve(A, 17)


def test_idle_sessions_are_evicted_before_a_live_one_but_not_busy_ones() -> None:
    table = table_of(3)
    filled(table, B, tokens(4, 20), 1)
    filled(table, C, tokens(4, 30), 2)
    table.make_idle(B)
    table.open(A, 0, tokens(8))
    assert table.reserve(A, 8, frozenset({B})).preempted == (C,)
    assert len(table.blocks_of(B)) == 1
    check_table(table)


def test_equal_arrivals_have_an_order_too() -> None:
    table = table_of(2)
    filled(table, A, tokens(4))
    filled(table, B, tokens(4, 20))
    with pytest.raises(Overloaded):
        table.reserve(B, 8)
    assert table.reserve(A, 8).preempted == (B,)


def test_a_preempted_session_retries_with_its_age_and_finds_a_prefix() -> None:
    table = table_of(4)
    filled(table, B, tokens(11), 1)
    filled(table, A, tokens(2, 50), 0)
    assert table.reserve(A, 6).preempted == (B,)
    assert table.cached_prefix(B) == Miss(8, prefix_hash(tokens(8)))
    assert table.open(B, 1, tokens(12)) == 8


def test_a_refused_reservation_changes_nothing() -> None:
    table = table_of(4)
    filled(table, A, tokens(6), 0)
    filled(table, B, tokens(4, 50), 1)
    table.make_idle(B)
    filled(table, C, tokens(4, 60), 2)
    before = [table.blocks_of(key) for key in (A, B, C)]
    with pytest.raises(Overloaded):
        table.reserve(C, 16)
    assert [table.blocks_of(key) for key in (A, B, C)] == before
    check_table(table)


def test_no_copy_of_a_block_whose_other_holders_are_evicted() -> None:
    table = table_of(1)
    filled(table, A, tokens(4), 1)
    table.append_computed(A, [4])
    assert table.open(B, 0, tokens(4)) == 3
    reservation = table.reserve(B, 4)
    assert (reservation.copies, reservation.preempted) == ((), (A,))
    check_table(table)


def test_a_session_keeps_its_own_blocks_where_others_reach_no_further() -> None:
    table = table_of(8)
    filled(table, A, tokens(8))
    table.make_idle(A)
    filled(table, B, tokens(10))
    assert table.open(A, 0, tokens(8)) == 7
    assert table.reserve(A, 9).copies == (), "a block of B would have to be copied"


def test_a_failed_step_is_rolled_back() -> None:
    table = table_of(8)
    filled(table, A, tokens(9))
    table.open(B, 1, tokens(8))
    assert table.reserve(B, 16).copies
    table.make_idle(B)
    assert table.tokens_of(B) == tokens(4)
    assert len(table.blocks_of(B)) == 1
    assert table.open(B, 1, tokens(8)) == 7
    table.make_idle(B)
    assert table.tokens_of(B) == tokens(7)
    table.reserve(A, 20)
    table.make_idle(A)
    assert table.tokens_of(A) == tokens(8)
    assert len(table.blocks_of(A)) == 2
    check_table(table)


def test_the_copy_of_a_plan_that_never_ran_is_dropped() -> None:
    table = table_of(8)
    filled(table, A, tokens(9))
    table.open(B, 1, tokens(8))
    table.reserve(B, 8)
    assert table.open(B, 1, [*tokens(7), 99]) == 4
    assert table.open(B, 1, tokens(8)) == 7
    table.reserve(B, 8)
    table.truncate(B, 4)
    table.reserve(B, 12)
    table.make_idle(B)
    assert table.tokens_of(B) == tokens(4)
    assert len(table.blocks_of(B)) == 1


def test_after_a_step_the_copy_is_kept() -> None:
    table = table_of(8)
    filled(table, A, tokens(9))
    table.open(B, 1, tokens(8))
    table.reserve(B, 8)
    table.append_computed(B, [])
    table.make_idle(B)
    assert table.tokens_of(B) == tokens(7)


def test_a_new_session_replaces_an_idle_one_only() -> None:
    table = table_of(8, max_sessions=2)
    filled(table, A, tokens(6))
    filled(table, B, tokens(6, 50))
    with pytest.raises(Overloaded):
        table.open(C, 2, tokens(6))
    table.make_idle(A)
    assert table.open(C, 2, tokens(6)) == 4
    assert table.blocks_of(A) == ()
    assert table.cached_prefix(A).have == 0
    check_table(table)


def test_look_up() -> None:
    table = table_of(8)
    filled(table, A, tokens(9))
    assert table.look_up(A, 5, [6, 7, 99], prefix_hash(tokens(5))) == Hit(7)
    assert table.look_up(A, 8, [9, 10], prefix_hash(tokens(8))) == Hit(8)
    assert table.look_up(A, 9, [10], prefix_hash(tokens(9))) == Miss(8, prefix_hash(tokens(8)))
    assert table.look_up(A, 5, [6], prefix_hash(tokens(5, 2))) == Miss(0, prefix_hash(()))
    assert table.look_up(B, 0, [6], prefix_hash(())) == Hit(0)
    assert table.look_up(B, 3, [6], prefix_hash(tokens(3))) == Miss(0, prefix_hash(()))


def test_look_up_in_a_long_session_that_was_cut() -> None:
    table = table_of(400)
    filled(table, A, tokens(1500))
    assert table.look_up(A, 1200, [], prefix_hash(tokens(1200))) == Hit(1200)
    changed = [*tokens(600), *tokens(900, 7)]
    filled(table, A, changed)
    assert table.look_up(A, 1200, [], prefix_hash(tokens(1200))) == Miss(0, prefix_hash(()))
    assert table.look_up(A, 1200, [], prefix_hash(changed[:1200])) == Hit(1200)
    check_table(table)


def test_computing_without_a_reservation_raises() -> None:
    table = table_of(8)
    table.open(A, 0, tokens(6))
    with pytest.raises(Broken):
        table.append_computed(A, tokens(6))
    with pytest.raises(Broken):
        table.append_computed(B, tokens(6))
    with pytest.raises(Broken):
        table.reserve(B, 6)
    filled(table, A, tokens(9))
    table.open(B, 1, tokens(8))
    with pytest.raises(Broken):
        table.append_computed(B, [8])


def test_sizes_must_be_positive() -> None:
    for sizes in ((1, 0, 1), (1, 1, 0), (0, 1, 1)):
        with pytest.raises(ValueError, match="block"):
            KvTable(*sizes)
    assert KvTable(1, 1, 1).total == 1
