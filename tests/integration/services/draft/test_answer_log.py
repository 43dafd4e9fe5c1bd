"""The logs of recent answers in a real Redis: who reads what, and how long it stays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from galley.core.errors import StoreUnavailable
from galley.core.lookup.lookup import AnswerPart, RecentAnswers
from services.draft.answers.log import MOST_LOG_BYTES, AnswerLog
from services.draft.answers.mailbox import MOST_PART_TOKENS, SharedKind
from tests.fakes.redis_clusters import cluster_servers, either
from tests.fakes.redis_servers import BINARIES, Server, running

LIFE_S = 60.0
FIRST, SECOND = AnswerPart(b"session1", 5, [1, 2, 3]), AnswerPart(b"session2", 7, [4, 5])


@pytest.fixture(params=BINARIES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as started:
        yield started


@asynccontextmanager
async def log_at(
    url: str, *, pool: str = "default", tokenizer: str = "hash", ttl_s: float = LIFE_S
) -> AsyncIterator[AnswerLog]:
    log = AnswerLog(url, pool, tokenizer, ttl_s)
    try:
        yield log
    finally:
        await log.close()


def a_kind(salt: bytes = b"salt", workload: str = "chat") -> SharedKind:
    return SharedKind((salt, workload), RecentAnswers())


def filling(session: bytes) -> list[AnswerPart]:
    """Return parts that take more than half of a log."""
    count = MOST_LOG_BYTES // (2 * 4 * MOST_PART_TOKENS)
    tokens = [7] * MOST_PART_TOKENS
    return [AnswerPart(session, i * MOST_PART_TOKENS, tokens) for i in range(count)]


async def keys_of(server: Server) -> list[str]:
    return sorted(key.decode() for key in await server.command("KEYS", "*"))


async def test_each_reads_what_others_have_added_once(server: Server) -> None:
    here, there = a_kind(), a_kind()
    async with log_at(server.url) as log, log_at(server.url) as other:
        assert await log.exchange(here, [FIRST]) == []
        assert await other.exchange(there, [SECOND]) == [FIRST]
        assert await other.exchange(there, []) == []
        assert await log.exchange(here, []) == [SECOND]
        assert await log.exchange(a_kind(), []) == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (a_kind(salt=b"other"), {}),
        (a_kind(salt=b""), {}),
        (a_kind(workload="code"), {}),
        (a_kind(), {"pool": "other"}),
        (a_kind(), {"tokenizer": "other"}),
    ],
)
async def test_nobody_else_reads_it(server: Server, kind: SharedKind, place: dict[str, Any]) -> None:
    async with log_at(server.url) as log, log_at(server.url, **place) as other:
        await log.exchange(a_kind(), [FIRST])
        assert await other.exchange(kind, []) == []
        await other.exchange(kind, [SECOND])
        assert await log.exchange(a_kind(), []) == [FIRST]


async def test_names_of_keys_tell_neither_tenant_nor_workload(server: Server) -> None:
    async with log_at(server.url) as log:
        await log.exchange(a_kind(b"saltsalt", "chat"), [FIRST])
    [name] = await keys_of(server)
    assert name.startswith("galley:answers:default:{")
    assert b"saltsalt".hex() not in name
    assert "chat" not in name


async def test_nothing_stays_beyond_its_time(server: Server) -> None:
    """No answer is added to a log that has less than half of its time left, and none prolongs it."""
    half_ms, reader = int(LIFE_S * 500), a_kind()
    async with log_at(server.url) as log:
        await log.exchange(a_kind(), [FIRST])
        [first] = await keys_of(server)
        assert half_ms < await server.command("PTTL", first) <= 2 * half_ms
        await server.command("PEXPIRE", first, str(half_ms + 20_000))
        await log.exchange(a_kind(), [FIRST])
        assert await keys_of(server) == [first]
        assert await server.command("PTTL", first) <= half_ms + 20_000
        assert await log.exchange(reader, []) == [FIRST, FIRST]
        await server.command("PEXPIRE", first, str(half_ms - 1))
        await log.exchange(a_kind(), [SECOND])
        assert await log.exchange(reader, []) == [SECOND]
        [second] = set(await keys_of(server)) - {first}
        assert half_ms < await server.command("PTTL", second) <= 2 * half_ms
        # The older log begins anew.
        await server.command("PEXPIRE", second, str(half_ms - 1))
        await log.exchange(a_kind(), [FIRST])
        assert half_ms < await server.command("PTTL", first) <= 2 * half_ms
        assert await log.exchange(reader, []) == [FIRST]
        assert await log.exchange(a_kind(), []) == [SECOND, FIRST]


async def test_a_log_that_expired_is_read_anew(server: Server) -> None:
    reader = a_kind()
    async with log_at(server.url) as log:
        await log.exchange(a_kind(), [FIRST])
        assert await log.exchange(reader, []) == [FIRST]
        await server.command("FLUSHALL")
        assert await log.exchange(reader, []) == []
        await log.exchange(a_kind(), [SECOND])
        assert await log.exchange(reader, []) == [SECOND]


async def test_what_a_kind_takes_is_bounded_the_last_stays(server: Server) -> None:
    async with log_at(server.url) as log:
        for i in range(6):
            await log.exchange(a_kind(), filling(b"%08d" % i))
            sizes = [await server.command("STRLEN", key) for key in await keys_of(server)]
            assert len(sizes) <= 2
            assert max(sizes) <= MOST_LOG_BYTES
        read = await log.exchange(a_kind(), [])
        assert {part.session for part in read} == {b"00000004", b"00000005"}


async def test_more_than_a_log_holds_is_cut(server: Server) -> None:
    parts = [part for i in range(4) for part in filling(b"%08d" % i)]
    async with log_at(server.url) as log:
        await log.exchange(a_kind(), parts)
        read = await log.exchange(a_kind(), [])
    assert 0 < len(read) < len(parts)
    assert read == parts[-len(read) :]


async def test_a_foreign_value_is_not_read(server: Server) -> None:
    async with log_at(server.url) as log:
        await log.exchange(a_kind(), [FIRST])
        [key] = await keys_of(server)
        await server.command("SETRANGE", key, "16", "x" * 40)
        assert await log.exchange(a_kind(), []) == []


async def test_a_server_that_is_away_costs_one_attempt(server: Server) -> None:
    async with log_at(server.url) as log:
        server.kill()
        with pytest.raises(StoreUnavailable):
            await log.exchange(a_kind(), [FIRST])
        server.start()
        assert await log.exchange(a_kind(), [SECOND]) == []
        assert await log.exchange(a_kind(), []) == [SECOND]


async def test_a_cluster_keeps_the_logs_of_a_kind_together() -> None:
    with cluster_servers(either()) as cluster:
        await cluster.form()
        async with log_at(cluster.url) as log:
            for i in range(20):
                await log.exchange(a_kind(workload=f"{i}"), [FIRST])
            for i in range(20):
                assert await log.exchange(a_kind(workload=f"{i}"), []) == [FIRST]
