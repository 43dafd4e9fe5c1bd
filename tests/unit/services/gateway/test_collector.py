"""The collector of finished sessions when the spool does not keep up, or is away."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

from structlog.contextvars import bound_contextvars, get_contextvars
from structlog.testing import capture_logs

from galley.common.registry.spool import LearningSpool, SpooledSession
from galley.core.admission.admission import ANONYMOUS, Principal
from galley.core.answer.answer import Answer
from galley.core.errors import StoreUnavailable
from galley.core.session.machine import Session, SessionLimits
from galley.core.store import Ownership, StoredSession
from services.gateway.learning.collector import Collector
from services.gateway.session.streams import PRIVATE_FIELD
from tests.fakes.session_ports import SPEC

_MOST = 1000
_WAITING = 256


class FakeSpool:
    """Add sessions once `may_add` is set; with `is_away`, fail."""

    def __init__(self) -> None:
        self.may_add = asyncio.Event()
        self.is_away = False
        self.fault: Exception | None = None
        self.is_closed = False
        self.added: list[str] = []
        self.ended_s: list[float] = []
        self.fields: dict[str, Any] = {}
        """The fields of log lines when it was last called."""

    async def add(self, principal: str, session: SpooledSession, most_tokens: int, *, ended_s: float) -> bool:
        assert (principal, most_tokens) == (ANONYMOUS.name, _MOST)
        self.fields = get_contextvars()
        await self.may_add.wait()
        if self.is_away:
            raise StoreUnavailable("it is away")
        if self.fault is not None:
            raise self.fault
        self.added.append(session.session_id)
        self.ended_s.append(ended_s)
        return True

    async def close(self) -> None:
        self.is_closed = True


class Collecting:
    def __init__(self) -> None:
        self.spool = FakeSpool()
        self.collector = Collector(cast("LearningSpool", self.spool), _MOST, self._present)
        self.present = ANONYMOUS
        """The principal as it is now."""
        self.kept: list[bool] = []
        self.collector.on_collected = self.kept.append

    def finish(
        self, session_id: str, principal: Principal = ANONYMOUS, *, private: bool = False, **spec: Any
    ) -> None:
        answer = Answer(replace(SPEC, session_id=session_id, **spec), str)
        fields = {PRIVATE_FIELD: b"1"} if private else {}
        stored = StoredSession(Ownership(session_id, 1, b""), principal.name, fields, 3, answer.tokens)
        self.collector.finished(Session(answer, SessionLimits()), stored, principal)

    async def _present(self, principal: Principal) -> Principal:
        assert principal is ANONYMOUS
        return self.present

    async def drained(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.kept) < count:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_sessions_wait_in_a_bounded_queue_and_the_oldest_are_dropped() -> None:
    collecting = Collecting()
    for number in range(_WAITING + 50):
        collecting.finish(str(number))
    assert collecting.kept == [False] * 50
    collecting.spool.may_add.set()
    await collecting.drained(_WAITING + 50)
    assert collecting.spool.added == [str(number) for number in range(50, _WAITING + 50)]
    await collecting.collector.close()


async def test_the_spool_is_told_when_a_session_ended_however_long_it_waited() -> None:
    collecting = Collecting()
    loop = asyncio.get_running_loop()
    collecting.finish("first")
    await asyncio.sleep(0)
    collecting.finish("second")
    ended_s = loop.time()
    loop.time, now = lambda: now() + 3600, loop.time  # type: ignore[method-assign]
    collecting.spool.may_add.set()
    await collecting.drained(2)
    del loop.time
    assert collecting.spool.ended_s == sorted(collecting.spool.ended_s)
    assert collecting.spool.ended_s[-1] <= ended_s
    await collecting.collector.close()


async def test_an_outage_is_logged_once_without_the_session() -> None:
    collecting = Collecting()
    collecting.spool.may_add.set()
    collecting.spool.is_away = True
    with capture_logs() as logs:
        for number in range(3):
            collecting.finish(str(number))
        await collecting.drained(3)
        assert [line["event"] for line in logs] == ["sessions not collected for learning"]
        collecting.spool.is_away = False
        collecting.finish("next")
        await collecting.drained(4)
    assert len(logs) == 1
    assert collecting.spool.added == ["next"]
    await collecting.collector.close()


async def test_its_log_lines_do_not_name_the_session_that_happened_to_begin_it() -> None:
    collecting = Collecting()
    collecting.spool.may_add.set()
    with bound_contextvars(session_id="first", principal="somebody"):
        collecting.finish("first")
    collecting.finish("second")
    await collecting.drained(2)
    assert not collecting.spool.fields
    await collecting.collector.close()


async def test_sessions_that_nobody_may_learn_from_are_left_out() -> None:
    collecting = Collecting()
    collecting.spool.may_add.set()
    collecting.finish("another", Principal("another"))
    collecting.finish("private", private=True)
    collecting.finish("an adapter's", lora="german")
    collecting.finish("too long", prompt=tuple(range(_MOST + 1)))
    collecting.finish("mine")
    await collecting.drained(1)
    assert collecting.spool.added == ["mine"]
    await collecting.collector.close()


async def test_what_waits_of_a_principal_that_no_longer_allows_it_is_left_out() -> None:
    collecting = Collecting()
    collecting.finish("first")
    await asyncio.sleep(0)
    collecting.finish("second")
    collecting.present = replace(ANONYMOUS, learns=False)
    collecting.spool.may_add.set()
    await collecting.drained(1)
    collecting.present = ANONYMOUS
    collecting.finish("third")
    await collecting.drained(2)
    assert collecting.spool.added == ["first", "third"]
    await collecting.collector.close()


async def test_closing_stops_an_add_that_hangs() -> None:
    collecting = Collecting()
    collecting.finish("mine")
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await collecting.collector.close()
    assert collecting.spool.added == []


async def test_an_unexpected_error_drops_the_session_and_is_logged_once() -> None:
    collecting = Collecting()
    collecting.spool.may_add.set()
    collecting.spool.fault = KeyError("no such field")
    with capture_logs() as logs:
        for number in range(3):
            collecting.finish(str(number))
        await collecting.drained(3)
        await collecting.collector.close()
    assert collecting.kept == [False] * 3
    assert [line["event"] for line in logs] == ["sessions not collected for learning"]
    assert collecting.spool.is_closed
