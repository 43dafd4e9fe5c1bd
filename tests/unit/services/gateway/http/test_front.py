"""The outermost ASGI application, called as uvicorn calls it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from galley.common.config.settings import ServerLimits
from services.gateway.auth.authentication import Authentication
from services.gateway.http.transport.connection import DRAIN, TRANSPORT
from services.gateway.http.transport.front import Access, Front, Tracing
from services.gateway.http.transport.turns import AT_ONCE

OPEN = "/open"
Call = Callable[[str], Awaitable[None]]


class _Transport:
    def abort(self) -> None: ...


def front(app: Any) -> Call:
    served = Front(app, Authentication(), ServerLimits(), Access({OPEN}), Tracing(None, {}))

    async def call(path: str) -> None:
        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None: ...

        async def drain() -> None: ...

        scope = {"type": "http", "method": "GET", "path": path, "scheme": "http", "headers": []}
        await served(scope | {TRANSPORT: _Transport(), DRAIN: drain}, receive, send)

    return call


class Clock:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.turns = 0
        self._loop = asyncio.get_running_loop()
        self._tick()

    def _tick(self) -> None:
        self.turns += 1
        self._handle = self._loop.call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("leaves", [(), (0, 3, 7, 8, 9, 14, 19)])
async def test_few_requests_begin_in_one_turn_of_the_event_loop(leaves: tuple[int, ...], after: int) -> None:
    """However many come together, and whoever leaves `after` some turns; probes do not wait."""
    begun: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(clock.turns)

    call, clock = front(app), Clock()
    calls = [asyncio.ensure_future(call("/v1/models")) for _ in range(20)]
    for _ in range(after):
        await asyncio.sleep(0)
    for number in leaves:
        calls[number].cancel()
    await call(OPEN)
    assert clock.turns <= after + 2
    await asyncio.gather(*calls, return_exceptions=True)
    await call("/v1/models")
    clock.stop()
    assert len(begun) >= 22 - len(leaves)
    assert max(Counter(begun[1:]).values()) <= AT_ONCE + 1
