"""The places of a gateway beyond its streams: those of the calls to Abort."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from galley.core.errors import Overloaded, UnknownSession
from galley.core.session.machine import SessionLimits
from services.gateway.clock import MonotonicClock, Timeouts
from services.gateway.session.streams import Streams
from tests.fakes.store import MemoryStore

NO_SESSION = "00" * 16


class SlowStore(MemoryStore):
    """Answers a call to abort for each permit."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)

    async def abort(self, session_id: str, principal: str, finish: bytes) -> None:
        await self.permits.acquire()
        await super().abort(session_id, principal, finish)


async def test_calls_to_abort_are_shared_among_callers() -> None:
    """Alice's calls take all places as they come, until somebody else wants one."""
    store = SlowStore()
    streams = Streams(store, MonotonicClock(), cast("Any", None), str, SessionLimits(), Timeouts(), 2)

    def aborting(name: str) -> asyncio.Task[None]:
        return asyncio.create_task(streams.abort(NO_SESSION, name, None))

    alices = {aborting("alice") for _ in range(2)}
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="all 2 calls to Abort"):
        await aborting("bob")
    store.permits.release()
    await asyncio.wait(alices, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(Overloaded, match="alice has its share of 1 calls to Abort"):
        await aborting("alice")
    bobs = aborting("bob")
    for _ in range(2):
        store.permits.release()
    for call in (*alices, bobs):
        with pytest.raises(UnknownSession):
            await call
