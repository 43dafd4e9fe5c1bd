"""How long the gateway waits for the other parts. Times are nanoseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from galley.core.errors import StoreUnavailable
from galley.core.session.ports import Clock
from services.gateway.clock import SECOND
from services.gateway.store.redis import retrying
from services.gateway.telemetry.observer import request_observer

_T = TypeVar("_T")
_LAST_CALL_S = 0.5
"""What a call that began in time may take beyond it."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Of one stream; `renew_ns` is how often its session is kept from expiring. The store keeps all that it
    holds, an ended session too, for three times as long.

    `client_ns` is how long the client may leave what was sent unread.
    """

    store_ns: int = 10 * SECOND
    verify_ns: int = 120 * SECOND
    draft_ns: int = SECOND // 2
    renew_ns: int = 300 * SECOND
    client_ns: int = 60 * SECOND

    @property
    def trusted_ns(self) -> int:
        """For how long the store is sure to hold what it held; the last third is for calls on their way."""
        return 2 * self.renew_ns

    def store_deadline_ns(self, now_ns: int, deadline_ns: int | None) -> int:
        """When to give up on the store: a second before the client's deadline, so that it hears why."""
        until = now_ns + self.store_ns
        return until if deadline_ns is None else min(until, max(now_ns, deadline_ns - SECOND))


async def patiently(
    operation: str,
    call: Callable[[], Awaitable[_T]],
    until_ns: int,
    clock: Clock,
) -> _T:
    """Repeat a call to the store while it is away; raises StoreUnavailable at `until_ns` or just after.

    `operation` is the call's name in traces.
    """
    observer = request_observer()
    span = observer.store_call(operation)
    retried = partial(observer.store_retried, span)
    if span is None:
        return await _repeat(call, until_ns, clock, retried)
    try:
        result = await _repeat(call, until_ns, clock, retried)
    except BaseException as error:
        span.end(error)
        raise
    span.end()
    return result


async def _repeat(
    call: Callable[[], Awaitable[_T]],
    until_ns: int,
    clock: Clock,
    retried: Callable[[StoreUnavailable], None],
) -> _T:
    left_s = max(0.0, (until_ns - clock.now_ns()) / SECOND)
    try:
        async with asyncio.timeout(left_s + _LAST_CALL_S):
            return await retrying(
                call,
                until_s=until_ns / SECOND,
                clock=lambda: clock.now_ns() / SECOND,
                sleep=asyncio.sleep,
                retried=retried,
            )
    except TimeoutError as error:
        raise StoreUnavailable("the session store does not answer") from error
