"""The owner of a session at its store: when it recreates a lost session, and how it repeats calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from galley.core.answer.answer import Ending, Reason, decode_ending
from galley.core.content import prefix_hash
from galley.core.errors import Fenced, StoreUnavailable, UnknownSession
from galley.core.records import TokenRecord, encode_records
from galley.core.session import events as ev
from galley.core.store import UNCHANGED, LogBehind, NewSession, SessionEnded
from services.gateway.clock import SECOND, MonotonicClock, Timeouts
from services.gateway.store import session_log
from services.gateway.store.session_log import LONGEST_PAUSE_S, SessionLog, StoreTime, retry
from tests.fakes.owners import abort, claim, create, hashes_of
from tests.fakes.session_ports import FaultyStore, ManualClock
from tests.fakes.tasks import count_tasks

TTL_S, TRUSTED_S = 90.0, 60
TIMEOUTS = Timeouts(renew_ns=TRUSTED_S * SECOND // 2)
END = Ending(Reason.LENGTH)
LOG = (1, 2, 3, 3, 4, 5)


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store: FaultyStore = FaultyStore(
            ttl_s=TTL_S,
            finished_ttl_s=TTL_S,
            clock=lambda: self.clock.now / SECOND + self.store.step_s,
        )

    async def own(self, timeouts: Timeouts = TIMEOUTS) -> SessionLog:
        stored = await create(self.store, NewSession("s", "me", b"body", {"f": b"v"}, (1, 2, 3)))
        return SessionLog(self.store, stored, self.clock, timeouts, self.clock.now_ns())


def commit(length: int, *tokens: int) -> ev.Commit:
    records = tuple(TokenRecord() for _ in tokens)
    return ev.Commit(length, tokens, records, hashes_of(LOG[:length], tokens))


async def committed(log: SessionLog, effect: ev.Commit) -> ev.Committed | ev.StoreFailed:
    reported: asyncio.Future[ev.Committed | ev.StoreFailed] = asyncio.get_running_loop().create_future()
    log.commit(effect, UNCHANGED, reported.set_result)
    assert not reported.done(), "the session machine is still busy with the event before"
    return await reported


async def test_a_recently_held_session_is_recreated() -> None:
    world = World()
    log = await world.own()
    for length in range(3, 6):
        world.clock.now += TRUSTED_S * SECOND
        assert await committed(log, commit(length, length)) == ev.Committed(length + 1)
    world.clock.now += TRUSTED_S * SECOND
    world.store.forget()
    behind = await log.finish(ev.StoreFinish(END, 6, prefix_hash(LOG)))
    assert isinstance(behind, ev.StoreFailed)
    assert isinstance(behind.error, LogBehind)
    assert behind.error.have == 3
    assert await committed(log, commit(3, 3, 4, 5)) == ev.Committed(6)
    assert await log.finish(ev.StoreFinish(END, 6, prefix_hash(LOG))) == ev.FinishStored()
    result = await claim(world.store, "s", "me")
    assert (result.tokens, result.fields) == ([1, 2, 3, 3, 4, 5], {"f": b"v"})
    assert decode_ending(result.finish) == END
    assert result.ownership.epoch == log.owner.epoch + 1


@pytest.mark.parametrize("timeouts", [Timeouts(), Timeouts(renew_ns=7 * SECOND)])
async def test_a_lost_session_is_trusted_for_two_renewals_and_no_longer(timeouts: Timeouts) -> None:
    """It could have expired, live or finished, after three."""
    for late_ns, is_recreated in ((0, True), (1, False)):
        world = World()
        log = await world.own(timeouts)
        world.store.forget()
        world.clock.now += 2 * timeouts.renew_ns + late_ns
        failed = await log.renew()
        assert (failed is None) is is_recreated
        assert failed is None or isinstance(failed.error, UnknownSession)


async def test_an_idle_session_is_recreated_by_a_renewal() -> None:
    world = World()
    log = await world.own()
    world.store.forget()
    assert await log.renew() is None
    assert world.store.log("s") == [1, 2, 3]


@pytest.mark.parametrize("ends", [False, True])
async def test_a_log_that_lost_its_tail_is_behind_and_held(ends: bool) -> None:
    world = World()
    log = await world.own()
    await committed(log, commit(3, 3, 4))
    world.store.roll_back("s", 4, encode_records([TokenRecord()]))
    world.clock.now += TRUSTED_S * SECOND
    end = ev.StoreFinish(END, 5, prefix_hash(LOG[:5]))
    behind = await (log.finish(end) if ends else committed(log, commit(5, 5)))
    assert isinstance(behind, ev.StoreFailed)
    assert isinstance(behind.error, LogBehind)
    assert (behind.error.have, behind.error.log_hash) == (4, prefix_hash(LOG[:4]))
    world.store.forget()
    world.clock.now += TRUSTED_S * SECOND
    assert await log.renew() is None, "the store had the session when it refused the call"


async def test_a_session_that_may_have_ended_is_not_recreated() -> None:
    world = World()
    log = await world.own()
    await abort(world.store, "s", "me", b"aborted")
    world.clock.now += (int(TTL_S) + 1) * SECOND
    for _ in range(2):
        failed = await committed(log, commit(3, 7))
        assert isinstance(failed, ev.StoreFailed)
        assert isinstance(failed.error, UnknownSession)
    with pytest.raises(UnknownSession):
        await claim(world.store, "s", "me")


async def test_a_session_aborted_before_a_step_of_the_stores_clock_is_not_recreated() -> None:
    world = World()
    log = await world.own()
    await abort(world.store, "s", "me", b"aborted")
    world.store.step_s += TTL_S + 1
    failed = await committed(log, commit(3, 7))
    assert isinstance(failed, ev.StoreFailed)
    assert isinstance(failed.error, SessionEnded)
    with pytest.raises(UnknownSession):
        await claim(world.store, "s", "me")


async def test_a_live_session_is_recreated_after_a_step_of_the_stores_clock() -> None:
    world = World()
    log = await world.own()
    world.store.step_s += TTL_S + 1
    assert await committed(log, commit(3, 7)) == ev.Committed(4)


class Away:
    def __init__(self, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.now_s = 0.0
        self.pauses: list[float] = []
        self._after = after
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    def now_ns(self) -> int:
        return round(self.now_s * SECOND)

    async def call(self) -> int:
        self.calls += 1
        if self.calls < self._after:
            raise StoreUnavailable("away")
        return self.calls

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


async def test_pauses_grow_up_to_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Away(10, monkeypatch)
    assert await retry("commit", away.call, 100 * SECOND, away) == 10
    assert away.pauses[:3] == [0.02, 0.04, 0.08]
    assert max(away.pauses) == LONGEST_PAUSE_S


async def test_it_gives_up_at_its_time_and_not_later(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Away(10**9, monkeypatch)
    with pytest.raises(StoreUnavailable, match="away"):
        await retry("commit", away.call, 10 * SECOND, away)
    assert away.now_s == pytest.approx(10)


async def test_a_call_that_began_in_time_may_last_a_little_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StoreTime(1000, 0, 0).latest_ms(2 * SECOND) == 1000 + 2000 + 500
    monkeypatch.setattr(session_log, "LAST_CALL_S", 0.01)
    clock = ManualClock()
    async with asyncio.timeout(5):
        with pytest.raises(StoreUnavailable, match="does not respond"):
            await retry("commit", asyncio.Event().wait, clock.now, clock)


async def test_a_refusal_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    async def fenced() -> None:
        nonlocal calls
        calls += 1
        raise Fenced("x")

    with pytest.raises(Fenced):
        await retry("commit", fenced, SECOND, Away(0, monkeypatch))
    assert calls == 1


async def test_a_commit_that_succeeds_takes_no_task() -> None:
    world = World()
    log = await world.own()
    started = count_tasks()
    for length in range(3, 6):
        assert await committed(log, commit(length, LOG[length])) == ev.Committed(length + 1)
    assert started() == 0


async def test_a_commit_is_repeated_until_the_store_responds() -> None:
    world = World()
    log = await world.own()
    world.store.failures = 2
    assert await committed(log, commit(3, 3)) == ev.Committed(4)
    assert world.store.log("s") == [1, 2, 3, 3]


async def test_a_refused_commit_is_not_repeated() -> None:
    world = World()
    log = await world.own()
    await claim(world.store, "s", "me")
    started = count_tasks()
    failed = await committed(log, commit(3, 3))
    assert isinstance(failed, ev.StoreFailed)
    assert isinstance(failed.error, Fenced)
    assert started() == 0
    assert world.store.log("s") == [1, 2, 3]


class Silent(FaultyStore):
    """A store that responds to no commit until `silent` is False."""

    silent = True

    def commit(self, *args: Any, **named: Any) -> asyncio.Future[int]:
        if self.silent:
            return asyncio.get_running_loop().create_future()
        return super().commit(*args, **named)


async def own_silent(store: Silent, store_ns: int) -> SessionLog:
    stored = await create(store, NewSession("s", "me", b"body", {}, (1, 2, 3)))
    clock = MonotonicClock()
    return SessionLog(store, stored, clock, Timeouts(store_ns=store_ns), clock.now_ns())


async def test_a_store_that_does_not_respond_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_log, "LAST_CALL_S", 0.05)
    store = Silent()
    log = await own_silent(store, SECOND // 20)
    store.silent = False
    assert await committed(log, commit(3, 3)) == ev.Committed(4)
    store.silent = True
    for _ in range(2):
        began_ns = MonotonicClock.now_ns()
        failed = await asyncio.wait_for(committed(log, commit(4, 4)), 5)
        assert isinstance(failed, ev.StoreFailed)
        assert isinstance(failed.error, StoreUnavailable)
        assert MonotonicClock.now_ns() - began_ns >= SECOND // 10
    store.silent = False
    assert await committed(log, commit(4, 4)) == ev.Committed(5)
    await log.close()


@pytest.mark.parametrize("failures", [0, 1])
async def test_a_closed_log_reports_nothing(failures: int) -> None:
    """Neither what a first attempt returns nor what its repeats do."""
    world, reported = World(), list[object]()
    log = await world.own()
    world.store.failures = failures
    log.commit(commit(3, 3), UNCHANGED, reported.append)
    for _ in range(failures * 2):
        await asyncio.sleep(0)
    await log.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not reported
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_commit_that_was_cancelled_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the end of a task that it waited for."""
    world, attempts = World(), list[asyncio.Future[int]]()
    log = await world.own()
    store_commit = world.store.commit

    def cancel_first(*given: Any) -> asyncio.Future[int]:
        attempts.append(store_commit(*given) if attempts else asyncio.get_running_loop().create_future())
        if len(attempts) == 1:
            attempts[0].cancel()
        return attempts[-1]

    monkeypatch.setattr(world.store, "commit", cancel_first)
    async with asyncio.timeout(20):
        assert await committed(log, commit(3, 3)) == ev.Committed(4)
    await log.close()
