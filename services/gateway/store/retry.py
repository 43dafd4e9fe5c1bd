"""Repeat a call to the session store while the store is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from galley.core.errors import StoreUnavailable
from galley.core.session.ports import Clock
from services.gateway.clock import SECOND
from services.gateway.telemetry.observer import request_observer
from services.gateway.telemetry.spans import StoreCall

_T = TypeVar("_T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.2
LAST_CALL_S = 0.5
"""Time that a call that started in time may take beyond the limit."""


async def retry(operation: str, call: Callable[[], Awaitable[_T]], until_ns: int, clock: Clock) -> _T:
    """Return the result of `call`, repeated until it does not raise StoreUnavailable.

    No attempt starts after `until_ns`. The pause between attempts doubles from FIRST_PAUSE_S to
    LONGEST_PAUSE_S. `operation` names the call in traces. Raise the last StoreUnavailable, or one for the
    time-out.
    """
    span = request_observer().store_call(operation)
    try:
        left_s = max(0.0, (until_ns - clock.now_ns()) / SECOND)
        try:
            async with asyncio.timeout(left_s + LAST_CALL_S):
                result = await _repeat(call, until_ns, clock, span)
        except TimeoutError as error:
            raise StoreUnavailable("the session store does not respond") from error
    except BaseException as error:
        if span is not None:
            span.end(error)
        raise
    if span is not None:
        span.end()
    return result


async def _repeat(
    call: Callable[[], Awaitable[_T]], until_ns: int, clock: Clock, span: StoreCall | None
) -> _T:
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            left_s = (until_ns - clock.now_ns()) / SECOND
            if left_s <= 0:
                raise
            request_observer().store_retried(span, error)
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
