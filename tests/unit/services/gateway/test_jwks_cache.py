"""How often an issuer is asked for its keys, who waits for that, and what serves meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from galley.core.errors import AuthenticationUnavailable
from services.gateway.auth.jwks import MIN_FETCH_INTERVAL_S, CachedJwks, KeySet
from tests.fakes.waiting import Gate

REFRESH_S, STALE_S = 300.0, 3600.0
OLD, NEW = KeySet([]), KeySet([])


class Issuer:
    def __init__(self) -> None:
        self.published: KeySet | None = OLD
        self.fetches = 0
        self.gate = Gate()
        self.now_s = 1000.0
        self.keys = CachedJwks(self._fetch, REFRESH_S, STALE_S, lambda: self.now_s)

    async def _fetch(self) -> KeySet:
        self.fetches += 1
        await self.gate.enter()
        if self.published is None:
            raise OSError("the issuer is away")
        return self.published

    async def settled(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def issuer() -> Issuer:
    made = Issuer()
    assert await made.keys.current() is OLD
    return made


async def test_the_first_call_waits_for_the_keys_and_the_others_with_it() -> None:
    issuer = Issuer()
    issuer.gate.close()
    issuer.keys.start()
    calls = [asyncio.ensure_future(issuer.keys.current()) for _ in range(5)]
    await issuer.gate.has_waiter()
    assert not any(call.done() for call in calls)
    calls[0].cancel()
    issuer.gate.open()
    assert set(await asyncio.gather(*calls[1:])) == {OLD}
    assert issuer.fetches == 1


async def test_old_keys_are_refreshed_while_in_use(issuer: Issuer) -> None:
    issuer.now_s += REFRESH_S
    assert await issuer.keys.current() is OLD
    assert issuer.fetches == 1
    issuer.now_s += 1
    issuer.published = NEW
    issuer.gate.close()
    assert await issuer.keys.current() is OLD
    await issuer.gate.has_waiter()
    assert await issuer.keys.current() is OLD
    issuer.gate.open()
    await issuer.settled()
    assert await issuer.keys.current() is NEW
    assert issuer.fetches == 2


async def test_keys_that_are_too_old_are_fetched_first(issuer: Issuer) -> None:
    issuer.now_s += 2 * REFRESH_S + 1
    issuer.published = NEW
    assert await issuer.keys.current() is NEW


async def test_an_unknown_id_fetches_the_keys_rarely(issuer: Issuer) -> None:
    issuer.published = NEW
    for _ in range(1000):
        assert await issuer.keys.refreshed() is OLD
    assert issuer.fetches == 1
    issuer.now_s += MIN_FETCH_INTERVAL_S
    assert await issuer.keys.refreshed() is NEW
    for _ in range(1000):
        assert await issuer.keys.refreshed() is NEW
    assert issuer.fetches == 2


async def test_a_failing_issuer_is_not_asked_more_often(issuer: Issuer) -> None:
    issuer.published = None
    issuer.now_s += REFRESH_S + 1
    with capture_logs() as logs:
        for _ in range(100):
            assert await issuer.keys.current() is OLD
            await issuer.settled()
            assert await issuer.keys.refreshed() is OLD
    assert issuer.fetches == 2
    [failure] = logs
    assert (failure["log_level"], failure["error"]) == ("error", "the issuer is away")


async def test_old_keys_serve_while_the_issuer_is_away(issuer: Issuer) -> None:
    issuer.published = None
    issuer.now_s += REFRESH_S + 1
    await issuer.keys.current()
    await issuer.settled()
    issuer.now_s += STALE_S - REFRESH_S - 2
    issuer.gate.close()
    assert await issuer.keys.current() is OLD
    await issuer.gate.has_waiter()
    assert await issuer.keys.current() is OLD
    issuer.gate.open()
    await issuer.settled()
    issuer.now_s += MIN_FETCH_INTERVAL_S + 2
    for ask in (issuer.keys.current, issuer.keys.refreshed):
        with pytest.raises(AuthenticationUnavailable):
            await ask()
    issuer.now_s += MIN_FETCH_INTERVAL_S
    issuer.published = NEW
    assert await issuer.keys.current() is NEW


async def test_without_keys_no_call_is_authenticated() -> None:
    issuer = Issuer()
    issuer.published = None
    issuer.keys.start()
    for _ in range(3):
        with pytest.raises(AuthenticationUnavailable, match="try again"):
            await issuer.keys.current()
    assert issuer.fetches == 1
    issuer.now_s += MIN_FETCH_INTERVAL_S
    issuer.published = OLD
    assert await issuer.keys.current() is OLD
