"""Calls to Redis over connections that end at any moment, on the event loop that services run on."""

from __future__ import annotations

import asyncio
import threading

import pytest
import uvloop

from bench.link import Link
from bench.relay import Relay
from services.common.redis_calls import RedisCalls
from services.core.errors import StoreUnavailable
from tests.gateway.servers import VALKEY, running

pytestmark = pytest.mark.timeout(60)

CALLERS = 8
RESETS = 200


async def test_a_connection_that_ends_at_any_moment_is_a_store_that_is_away() -> None:
    """Also between the moment when it is taken from the pool and the one when it is written to."""
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


def _keep_calling(url: str, over: threading.Event) -> int:
    """How many answers came; raises what is neither an answer nor a store that is away."""

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
