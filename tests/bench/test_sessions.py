"""`make bench-sessions` without a stack: its times, its memory, its goals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.loop_run import LoopOptions
from bench.session_store import InstantStore, TimedStore, read_ms
from bench.sessions import ARMS, INSTANT, REDIS, Kept, Timed, added_ms, goals_of, parse_options, sessions_kept
from galley.bench.closed_loop import LoopBlock
from galley.core.store import NewSession
from services.gateway.store.redis import RedisStore
from tests.benching.blocks import block
from tests.gateway.servers import VALKEY, running

OPTIONS = LoopOptions(ARMS, streams=(16,), temperatures=(0.7,))


def times(added: float) -> list[Timed]:
    return [
        Timed(pair, arm, 16, 0.7, 10, 0.01 * pair + (added if arm == REDIS else 0.0), 1.0)
        for pair in range(7)
        for arm in ARMS
    ]


def blocks(slower: float) -> list[LoopBlock]:
    made = [
        block(arm, 0.01 * (slower if arm == REDIS else 1.0), workload="mixed", pair=pair)
        for pair in range(7)
        for arm in ARMS
    ]
    return [replace(one, load=replace(one.load, streams=16, temperature=0.7)) for one in made]


def test_what_is_added_is_taken_pair_by_pair() -> None:
    found = added_ms(times(0.25), 16)
    assert found.median == pytest.approx(0.25)
    assert found.count == 7


@pytest.mark.parametrize(
    ("slower", "added", "beside", "met"),
    [(1.0, 0.2, 800, [True, True, True]), (1.1, 0.7, 1200, [False, False, False])],
)
def test_goals(slower: float, added: float, beside: int, met: list[bool]) -> None:
    kept = [Kept(beside + 4 * tokens, tokens) for tokens in (10, 90)]
    goals = goals_of(blocks(slower), times(added), kept, OPTIONS)
    assert [goal.met for goal in goals] == met


def test_both_arms_are_needed() -> None:
    with pytest.raises(SystemExit):
        parse_options(["--arms", INSTANT])


def a_session() -> NewSession:
    return NewSession("s" * 32, "alice", b"h", {"spec": b"x" * 100}, [1, 2, 3])


async def test_commits_are_timed_and_read_once(tmp_path: Path) -> None:
    out = tmp_path / "times"
    store = TimedStore(InstantStore(), out)
    owner = (await store.create(a_session())).ownership
    assert await store.commit(owner, 3, [4, 5], b"..") == 5
    assert await store.commit(owner, 5, [6], b".") == 6
    assert (await store.claim(owner.session_id, "alice")).tokens == [1, 2, 3, 4, 5, 6]
    came, read = read_ms(out, 0)
    assert len(came) == 2
    assert all(0 < ms < 1000 for ms in came)
    assert read_ms(out, read) == ([], read)
    await store.close()


async def test_memory_is_that_of_all_keys_of_a_session() -> None:
    with running(VALKEY) as server:
        store = RedisStore(server.url)
        owner = (await store.create(a_session())).ownership
        await store.commit(owner, 3, [7] * 50, b"m" * 50)
        await store.close()
        [kept] = await sessions_kept(server.url)
    assert kept.tokens == 53
    # The strings of the log and of the session's fields are all there, and not much besides.
    assert 4 * 53 + 50 + 100 < kept.bytes < 2000
