"""When an owner recreates a session that the store does not hold, and when it must not."""

from __future__ import annotations

import pytest

from galley.core.answer.answer import Ending, Reason
from galley.core.answer.codec import decode_ending
from galley.core.errors import UnknownSession
from galley.core.records import TokenRecord
from galley.core.session import events as ev
from galley.core.store import UNCHANGED, LogBehind, NewSession
from services.gateway.clock import SECOND, Timeouts
from services.gateway.store.session_log import SessionLog
from tests.fakes.session_ports import FaultyStore, ManualClock

TTL_S, TRUSTED_S = 90.0, 60
END = Ending(Reason.LENGTH)


class World:
    """A session of three tokens, and its owner."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = FaultyStore(ttl_s=TTL_S, finished_ttl_s=TTL_S, clock=lambda: self.clock.now / SECOND)

    async def own(self) -> SessionLog:
        stored = await self.store.create(NewSession("s", "me", b"body", {"f": b"v"}, (1, 2, 3)))
        timeouts = Timeouts(renew_ns=TRUSTED_S * SECOND // 2)
        return SessionLog(self.store, stored, self.clock, timeouts, self.clock.now_ns())


def commit(length: int, *tokens: int) -> ev.Commit:
    records = tuple(TokenRecord() for _ in tokens)
    return ev.Commit(length, tokens, records, 0, 0)


async def test_a_recently_held_session_is_recreated() -> None:
    world = World()
    log = await world.own()
    for length in range(3, 6):  # trust begins anew with each change
        world.clock.now += TRUSTED_S * SECOND
        assert await log.commit(commit(length, length), UNCHANGED) == ev.Committed(length + 1)
    world.clock.now += TRUSTED_S * SECOND
    world.store.forget()
    behind = await log.finish(ev.StoreFinish(END, 6))
    assert isinstance(behind, ev.StoreFailed)
    assert isinstance(behind.error, LogBehind)
    assert behind.error.have == 3
    assert await log.commit(commit(3, 3, 4, 5), UNCHANGED) == ev.Committed(6)
    assert await log.finish(ev.StoreFinish(END, 6)) == ev.FinishStored()
    found = await world.store.claim("s", "me")
    assert (found.tokens, found.fields) == ([1, 2, 3, 3, 4, 5], {"f": b"v"})
    assert decode_ending(found.finish) == END
    assert found.ownership.epoch == log.owner.epoch + 1


async def test_an_idle_session_is_recreated_by_a_renewal() -> None:
    world = World()
    log = await world.own()
    world.store.forget()
    assert await log.renew() is None
    assert world.store.log("s") == [1, 2, 3]


async def test_a_session_that_may_have_ended_is_not_recreated() -> None:
    """As by an owner that was stopped meanwhile: another ended the session, and the store forgot that."""
    world = World()
    log = await world.own()
    await world.store.abort("s", "me", b"aborted")
    world.clock.now += (int(TTL_S) + 1) * SECOND
    for _ in range(2):
        failed = await log.commit(commit(3, 7), UNCHANGED)
        assert isinstance(failed, ev.StoreFailed)
        assert isinstance(failed.error, UnknownSession)
    with pytest.raises(UnknownSession):
        await world.store.claim("s", "me")
