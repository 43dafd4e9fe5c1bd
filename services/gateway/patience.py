"""How long the gateway waits for the other parts. Times are nanoseconds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from services.gateway.store import retrying

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from services.core.ports import Clock

SECOND = 1_000_000_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Of one stream; `renew_ns` is how often its session is kept from expiring."""

    store_ns: int = 10 * SECOND
    target_ns: int = 10 * SECOND
    draft_ns: int = SECOND // 2
    renew_ns: int = 600 * SECOND

    def store_deadline_ns(self, now_ns: int, deadline_ns: int | None) -> int:
        """When to give up on the store: a second before the client's deadline, so that it hears why."""
        until = now_ns + self.store_ns
        return until if deadline_ns is None else min(until, max(now_ns, deadline_ns - SECOND))


async def patiently(call: Callable[[], Awaitable[_T]], until_ns: int, clock: Clock) -> _T:
    """Repeat a call to the store while it is away; raises StoreUnavailable at `until_ns`."""
    return await retrying(
        call,
        until_s=until_ns / SECOND,
        clock=lambda: clock.now_ns() / SECOND,
        sleep=asyncio.sleep,
    )
