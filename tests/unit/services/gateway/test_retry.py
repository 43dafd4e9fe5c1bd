"""Repeating calls to the store: the pauses, the limit, and what is not repeated."""

from __future__ import annotations

import asyncio

import pytest

from galley.core.errors import Fenced, StoreUnavailable
from services.gateway.clock import SECOND
from services.gateway.store.session_log import LONGEST_PAUSE_S, retry


class Away:
    """A store that responds to call number `after`; sleeping moves its clock."""

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


async def test_a_refusal_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    async def fenced() -> None:
        nonlocal calls
        calls += 1
        raise Fenced("x")

    with pytest.raises(Fenced):
        await retry("commit", fenced, SECOND, Away(0, monkeypatch))
    assert calls == 1
