"""When an owner makes a session anew that the store does not hold, and when it must not."""

from __future__ import annotations

import pytest

from galley.core.errors import UnknownSession
from galley.core.store import UNCHANGED, LogBehind, NewSession
from services.gateway.store.owned import OwnedSession
from tests.fakes.store import MemoryStore

SECOND = 1_000_000_000
TTL_S, TRUSTED_S = 90.0, 60


class Clock:
    """A store's and its owner's."""

    def __init__(self) -> None:
        self.now_s = 0

    def now_ns(self) -> int:
        return self.now_s * SECOND


class Forgetful(MemoryStore):
    """A store that may lose all."""

    def forget(self) -> None:
        self._records.clear()


class World:
    """A session of three tokens, and its owner."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = Forgetful(TTL_S, TTL_S, clock=lambda: float(self.clock.now_s))

    async def own(self) -> OwnedSession:
        stored = await self.store.create(NewSession("s", "me", b"body", {"f": b"v"}, (1, 2, 3)))
        return OwnedSession(
            self.store, stored, self.clock, self.clock.now_ns(), trusted_ns=TRUSTED_S * SECOND
        )


async def test_what_was_held_of_late_was_lost_and_is_made_anew() -> None:
    world = World()
    owned = await world.own()
    for length in range(3, 6):  # trust begins anew with each change
        world.clock.now_s += TRUSTED_S
        assert await owned.commit(length, [length], b".", UNCHANGED) == length + 1
    world.clock.now_s += TRUSTED_S
    world.store.forget()
    with pytest.raises(LogBehind) as behind:
        await owned.finish(6, b"end")
    assert behind.value.have == 3
    assert await owned.commit(3, [3, 4, 5], b"...", UNCHANGED) == 6
    await owned.finish(6, b"end")
    found = await world.store.claim("s", "me")
    assert (found.tokens, found.fields, found.finish) == ([1, 2, 3, 3, 4, 5], {"f": b"v"}, b"end")
    assert found.ownership.epoch == owned.owner.epoch + 1


async def test_an_idle_session_is_made_anew_when_it_is_renewed() -> None:
    world = World()
    owned = await world.own()
    world.store.forget()
    await owned.renew()
    assert world.store.log("s") == [1, 2, 3]


async def test_what_may_have_ended_and_expired_is_not_made_anew() -> None:
    """As by an owner that was stopped meanwhile: another ended the session, and the store forgot that."""
    world = World()
    owned = await world.own()
    await world.store.abort("s", "me", b"aborted")
    world.clock.now_s += int(TTL_S) + 1
    for _ in range(2):
        with pytest.raises(UnknownSession):
            await owned.commit(3, [7], b".", UNCHANGED)
    with pytest.raises(UnknownSession):
        await world.store.claim("s", "me")
