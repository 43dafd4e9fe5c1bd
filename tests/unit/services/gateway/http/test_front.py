"""The outermost ASGI application, called as uvicorn calls it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from galley.common.config.settings import ServerLimits
from services.gateway.auth.authentication import Authentication
from services.gateway.http.transport import front as module
from services.gateway.http.transport.connection import DRAIN, TRANSPORT
from services.gateway.http.transport.front import CALL, Access, Front, Tracing
from services.gateway.http.transport.turns import AT_ONCE

OPEN = "/open"
DATA = "/v1/models"
BEGIN = {"type": "http.response.start", "status": 200}
END = {"type": "http.response.body", "body": b""}
Call = Callable[..., Awaitable[list[Any]]]


class _Transport:
    def __init__(self, sent: list[Any]) -> None:
        self._sent = sent

    def abort(self) -> None:
        self._sent.append(None)


def front(app: Any) -> Call:
    served = Front(app, Authentication(), ServerLimits(), Access({OPEN}), Tracing(None, {}))

    async def call(path: str, **headers: str) -> list[Any]:
        """Return the status and the body that were sent; None for a connection that was aborted."""
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None:
            sent.append(message.get("status", message.get("body")))

        async def drain() -> None: ...

        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "GET", "path": path, "scheme": "http", "headers": given}
        await served(scope | {TRANSPORT: _Transport(sent), DRAIN: drain}, receive, send)
        return sent

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


async def test_a_handler_that_does_not_respond_is_cancelled_after_the_deadline() -> None:
    cancelled: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await receive()  # the body
            await receive()  # nothing more comes
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    status, body = await front(app)(DATA, x_galley_timeout_s="0.01")
    assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
    assert cancelled


async def test_a_response_that_has_begun_goes_on_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPORT_S", 0.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(dict(BEGIN))
        while scope[CALL].time_remaining():  # noqa: ASYNC110  # time is what is waited for
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        await send(END)

    assert await front(app)(DATA, x_galley_timeout_s="0.01") == [200, b""]


async def test_a_client_that_leaves_at_the_deadline_is_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPORT_S", 0.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        task: Any = asyncio.current_task()
        while scope[CALL].time_remaining():  # noqa: ASYNC110  # time is what is waited for
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.Event().wait()

    assert await front(app)(DATA, x_galley_timeout_s="0.01") == [None]
