"""Calls to Redis over connections that end at any moment, on the event loop that services run on."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from galley.common.redis.calls import Copies, RedisCalls, Script, script_of
from galley.core.errors import Broken, StoreUnavailable
from galley.stack.ports import free_ports
from tests.fakes.link import Link
from tests.fakes.redis_clusters import TcpServer, follows, serving, until
from tests.fakes.redis_servers import VALKEY, running
from tests.fakes.relay import Relay

pytestmark = pytest.mark.timeout(60)

CALLERS = 8
MANY = 100
RESETS = 200


async def test_connection_that_ends_at_any_moment_is_store_unavailable() -> None:
    link, over = Link(), threading.Event()
    with running(VALKEY) as server:
        async with Relay(server.url.removeprefix("unix://"), link) as relay:
            callers = asyncio.create_task(asyncio.to_thread(_keep_calling, f"redis://{relay.address}", over))
            try:
                for number in range(RESETS):
                    await link.used()
                    await asyncio.sleep(0.001 * (number % 7))
                    link.reset()
                    if callers.done():
                        break
            finally:
                over.set()
                answers = await callers
    assert answers > RESETS


@pytest.fixture
async def calls() -> AsyncIterator[RedisCalls]:
    with running(VALKEY) as server:
        here = RedisCalls(server.url, call_timeout_s=5.0, max_connections=MANY)
        yield here
        await here.close()


async def connections_made(calls: RedisCalls) -> int:
    info = await calls.command("INFO", "stats")
    assert isinstance(info, bytes)
    [line] = [line for line in info.splitlines() if line.startswith(b"total_connections_received")]
    return int(line.partition(b":")[2])


async def test_concurrent_calls_share_a_connection(
    calls: RedisCalls,
) -> None:
    before = await connections_made(calls)
    answers = await asyncio.gather(*(calls.command("ECHO", str(number)) for number in range(MANY)))
    assert answers == [str(number).encode() for number in range(MANY)]
    assert await connections_made(calls) - before <= 1 + MANY // 64


@asynccontextmanager
async def waiting_for_a_replica(timeout_s: float) -> AsyncIterator[RedisCalls]:
    """Yield calls that wait for a replica, which the server does not have."""
    with running(VALKEY) as server:
        copies = Copies(replicas=1, timeout_s=timeout_s)
        calls = RedisCalls(server.url, call_timeout_s=5.0, max_connections=CALLERS, copies=copies)
        yield calls
        await calls.close()


async def blocked(calls: RedisCalls) -> list[bytes]:
    """Return the ids of the connections that wait for replicas."""
    clients = await calls.command("CLIENT", "LIST")
    assert isinstance(clients, bytes)
    fields = [dict(field.split(b"=", 1) for field in line.split()) for line in clients.splitlines()]
    return [of[b"id"] for of in fields if b"b" in of[b"flags"]]


async def test_changes_of_one_turn_wait_for_replicas_together() -> None:
    """Those of a later turn do not wait for them, and what changes nothing waits for no replica."""
    script = script_of("return redis.call('INCR', KEYS[1])")
    async with waiting_for_a_replica(60.0) as calls:
        await calls.run(script, ["before"])
        changes = [calls.change(script, [f"k{n}"], (), int_of) for n in range(CALLERS)]
        await asyncio.sleep(0)
        changes += [calls.change(script, [f"k{n}"], (), int_of) for n in range(CALLERS)]

        async def both_wait() -> bool:
            return len(await blocked(calls)) == 2

        await until(both_wait)
        waiting = await blocked(calls)
        assert await calls.run(script, ["also"]) == 1
        assert not any(change.done() for change in changes)
        assert await blocked(calls) == waiting, "one connection for each turn"
        for client in waiting:
            await calls.command("CLIENT", "UNBLOCK", client)
        failures = await asyncio.gather(*changes, return_exceptions=True)
        assert [type(failure) for failure in failures] == [StoreUnavailable] * 2 * CALLERS
        assert [await calls.command("GET", f"k{n}") for n in range(CALLERS)] == [b"2"] * CALLERS


async def test_a_change_that_is_refused_is_not_late() -> None:
    def refuse(reply: object) -> int:
        raise Broken(f"refused: {reply!r}")

    async with waiting_for_a_replica(0.05) as calls:
        failed = await asyncio.gather(
            calls.change(script_of("return 'no'"), ["k"], (), refuse),
            calls.change(script_of("return redis.error_reply('OOM no memory')"), ["k"], (), refuse),
            calls.change(script_of("return 1"), ["k"], (), int_of),
            return_exceptions=True,
        )
    assert [str(error).split(":")[0] for error in failed] == [
        "refused",
        "the session store is unavailable",
        "the session store's replicas do not have the change yet",
    ]


async def test_one_replica_does_not_count_for_two() -> None:
    with ExitStack() as held:
        server, near, far = (held.enter_context(serving(_tcp_server)) for _ in range(3))
        for replica in (near, far):
            await replica.command("REPLICAOF", "127.0.0.1", str(server.port))
            await until(partial(follows, replica))
        script = script_of("return redis.call('INCR', KEYS[1])")
        impatient, patient = (
            RedisCalls(server.url, call_timeout_s=5.0, max_connections=1, copies=Copies(2, timeout_s))
            for timeout_s in (0.05, 60.0)
        )
        await until(lambda: _is_copied(impatient, script))
        far.pause()
        assert not await _is_changed(impatient, script)
        call = patient.change(script, ["key"], (), int_of)

        async def waits_or_is_over() -> bool:
            return call.done() or (await server.command("INFO", "clients"))["blocked_clients"] == 1

        await until(waits_or_is_over)
        assert not call.done(), "it waits for the second replica"
        far.go_on()
        assert await call == 3
        for calls in (impatient, patient):
            await calls.close()


def _tcp_server(directory: Path) -> TcpServer:
    return TcpServer(VALKEY, directory, free_ports(1)[0])


async def _is_copied(calls: RedisCalls, script: Script) -> bool:
    """Return True once both replicas have a change; the first seconds of a replication may take longer."""
    await calls.command("DEL", "key")
    return await _is_changed(calls, script)


async def _is_changed(calls: RedisCalls, script: Script) -> bool:
    try:
        await calls.change(script, ["key"], (), int_of)
    except StoreUnavailable:
        return False
    return True


def int_of(reply: object) -> int:
    assert isinstance(reply, int)
    return reply


async def test_an_error_is_the_callers_own(calls: RedisCalls) -> None:
    await calls.command("SET", "text", "x")
    there, refused, also = await asyncio.gather(
        calls.command("ECHO", "a"),
        calls.command("INCR", "text"),
        calls.command("ECHO", "b"),
        return_exceptions=True,
    )
    assert (there, also) == (b"a", b"b")
    assert isinstance(refused, Broken)


async def test_a_script_that_the_server_has_forgotten_is_sent_again_by_each(calls: RedisCalls) -> None:
    script = script_of("return redis.call('INCRBY', KEYS[1], ARGV[1])")
    await calls.command("SCRIPT", "FLUSH")
    answers = await asyncio.gather(*(calls.run(script, [f"k{number}"], number) for number in range(8)))
    assert answers == list(range(8))


async def test_a_refusal_of_a_script_sent_again_for_a_caller_that_has_gone_away_is_dropped(
    calls: RedisCalls,
) -> None:
    unhandled = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))

    def refuse(reply: object) -> int:
        change.cancel()
        raise Broken(f"refused: {reply!r}")

    await calls.command("SCRIPT", "FLUSH")
    change = calls.change(script_of("return 'no'"), ["k"], (), refuse)
    await asyncio.wait([change])
    assert change.cancelled()
    await calls.command("ECHO", "after")
    gc.collect()
    assert not unhandled


async def test_cancelling_one_caller_keeps_the_others(calls: RedisCalls) -> None:
    tasks = [asyncio.create_task(calls.command("ECHO", str(number))) for number in range(8)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[5].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    left = [number for number in range(8) if number not in {0, 5}]
    assert [answers[number] for number in left] == [str(number).encode() for number in left]
    assert await calls.command("ECHO", "after") == b"after"


def _keep_calling(url: str, over: threading.Event) -> int:
    async def keep_calling() -> int:
        calls, answers = RedisCalls(url, call_timeout_s=5.0, max_connections=CALLERS), 0

        async def call() -> None:
            nonlocal answers
            while not over.is_set():
                try:
                    assert await calls.command("ECHO", "here") == b"here"
                    answers += 1
                except StoreUnavailable:
                    continue

        try:
            await asyncio.gather(*(call() for _ in range(CALLERS)))
        finally:
            over.set()
            await calls.close()
        return answers

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(keep_calling())
