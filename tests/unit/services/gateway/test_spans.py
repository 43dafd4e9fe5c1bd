"""The trace of a request to the nanosecond: a session's shell on a clock that moves when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from galley.core import names
from galley.core.answer.answer import Answer
from galley.core.errors import Broken, Fenced, StoreUnavailable
from galley.core.routing.breaker import FAILURES, FIRST_PAUSE_NS, Breaker
from galley.core.session import events as ev
from galley.core.session.machine import Session, SessionLimits
from galley.core.store import NewSession
from services.gateway.clock import SECOND, Timeouts
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.membership import StaticAddresses
from services.gateway.session.outbox import Outbox
from services.gateway.session.runner import Ports, SessionRunner
from services.gateway.store.session_log import SessionLog
from services.gateway.telemetry.call import Failure
from services.gateway.telemetry.observer import request_observer
from tests.fakes.owners import create
from tests.fakes.session_ports import SPEC, FaultyStore, ManualClock, NoDraft, PortTarget
from tests.fakes.spans import MS, OFFSET_NS, KeptSpans, attributes_of, error_of, lasted_ns, traced_here

ROUNDS = SPEC.max_position - len(SPEC.prompt)


async def read_all(outbox: Outbox) -> None:
    while True:
        await outbox.next()


class Stream:
    def __init__(self, timeouts: Timeouts | None = None) -> None:
        self.kept = KeptSpans()
        self.clock = ManualClock()
        self.store = FaultyStore(self.clock)
        self.store.commit_ns = 1 * MS
        self.target = PortTarget(self.clock)
        self._timeouts = timeouts or Timeouts()
        self.observer = traced_here(self.kept, self.clock)

    async def run(self, reading: Callable[[Outbox], Awaitable[None]] | None = None) -> ev.End:
        stored = await create(self.store, NewSession("s", "me", b"body", {}, SPEC.prompt))
        answer = Answer(SPEC, lambda tokens: "x" * len(tokens))
        session = Session(answer, replace(SessionLimits(), credit=0, window=8))
        log = SessionLog(self.store, stored, self.clock, self._timeouts, self.clock.now)
        self.observer.opened(session, stored, self.clock.now)
        ports = Ports(NoDraft(), self.target, self.clock)
        runner = SessionRunner(session, log, ports, self._timeouts, None)
        reader = asyncio.ensure_future((reading or read_all)(runner.outbox))
        end = await runner.run()
        reader.cancel()
        if end.error is None:
            self.observer.ended(Failure())
        else:
            self.observer.failed(end.error)
        self.observer.release()
        return end

    @property
    def request(self) -> ReadableSpan:
        [request] = [span for span in self.kept.spans if names.PROVIDER in attributes_of(span)]
        return request

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.kept.spans if span.name == name]


async def test_rounds_are_timed_by_the_clock() -> None:
    stream = Stream()
    stream.store.commit_ns = 0
    began_ns = OFFSET_NS + stream.clock.now
    await stream.run()
    for index, span in enumerate(stream.named(names.ROUND)):
        assert span.start_time == began_ns + index * 5 * MS
        assert lasted_ns(span) == 5 * MS
        of = attributes_of(span)
        parts = (names.DRAFT_PART, names.QUEUE_PART, names.COMPUTE_PART, names.WIRE_PART)
        assert [of[part] for part in parts] == [0, 1 * MS, 2 * MS, 2 * MS]
        assert (of[names.LINGER_NS], of[names.COMMIT_NS]) == (1 * MS, 0)
    assert stream.request.start_time == began_ns
    assert lasted_ns(stream.request) == ROUNDS * 5 * MS
    assert attributes_of(stream.request)[names.TTFT_NS] == 5 * MS, "logged before the next verdict"
    assert stream.named("EVALSHA commit") == []


async def test_a_slow_commit_is_a_span() -> None:
    stream = Stream()
    stream.store.commit_ns = 30 * MS
    await stream.run()
    commits = stream.named("EVALSHA commit")
    assert [lasted_ns(span) for span in commits] == [30 * MS] * len(commits)
    assert 0 < len(commits) <= ROUNDS
    assert all(attributes_of(span)[names.COMMIT_NS] == 30 * MS for span in stream.named(names.ROUND))
    assert attributes_of(stream.request)[names.SLOWEST_COMMIT_NS] == 30 * MS


async def test_a_repeated_commit_is_traced() -> None:
    stream = Stream()
    stream.store.failures = 2
    await stream.run()
    [commit] = stream.named("EVALSHA commit")
    assert attributes_of(commit)[names.STORE_ATTEMPTS] == 3
    assert error_of(commit) is None
    why = {names.REASON: "the session store is unavailable"}
    assert [(event.name, dict(event.attributes or {})) for event in commit.events] == [
        (names.STORE_RETRIED, why)
    ] * 2


async def test_rounds_without_commit_are_traced() -> None:
    stream = Stream(timeouts=Timeouts(store_ns=20 * MS))
    stream.store.failures = 1000
    end = await stream.run()
    assert isinstance(end.error, StoreUnavailable)
    [commit] = stream.named("EVALSHA commit")
    assert error_of(commit) == error_of(stream.request) == "unavailable"
    rounds = [span for span in stream.named(names.ROUND) if names.COMPUTE_PART in attributes_of(span)]
    assert rounds
    assert not any(names.COMMIT_NS in attributes_of(span) for span in rounds)
    must_hang_together(stream)


async def test_a_round_without_verdict_is_traced() -> None:
    stream = Stream()
    stream.target.fails_at = 1
    end = await stream.run()
    assert isinstance(end.error, Broken)
    first, second = stream.named(names.ROUND)
    assert error_of(first) is None
    assert attributes_of(second) == {
        names.ROUND_INDEX: 1,
        names.ROUND_POSITION: len(SPEC.prompt) + 1,
        names.ROUND_CONFIRMED: 0,
        names.ERROR_TYPE: "internal",
    }
    [_, failed] = stream.named(names.VERIFY)
    assert failed.parent == second.context
    assert error_of(failed) == error_of(stream.request) == "internal"
    must_hang_together(stream)


async def test_client_stalls_are_traced() -> None:
    stream = Stream()
    stream.target.build = "build-{}".format  # each token is an item of its own
    stalls = [3 * SECOND, 2 * SECOND, SECOND]

    async def slowly(outbox: Outbox) -> None:
        while outbox._end < ROUNDS:  # noqa: ASYNC110  # all three, before the first is read
            await asyncio.sleep(0)
        for stall in stalls:
            stream.clock.now += stall
            await outbox.next()
        await read_all(outbox)

    await stream.run(slowly)
    ended_events = [event for span in stream.kept.spans for event in span.events]
    stalled = [dict(event.attributes or {}) for event in ended_events if event.name == names.CLIENT_STALLED]
    stalled_ns = [cast("int", facts[names.STALLED_NS]) for facts in stalled]
    assert [ns // SECOND for ns in stalled_ns] == [3, 2]
    assert attributes_of(stream.request)[names.CLIENT_STALLED_NS] == sum(stalled_ns)


async def test_a_change_of_build_is_traced() -> None:
    stream = Stream()
    stream.target.build = lambda answered: "build-1" if answered == 1 else "build-2"
    await stream.run()
    changes = stream.kept.events(stream.request, names.NUMERICS_CHANGED)
    assert changes == [{names.INDEX: 1, names.FINGERPRINT: "build-2"}]
    assert attributes_of(stream.request)[names.FINGERPRINT] == "build-2"


async def test_a_renewal_that_is_fenced_is_traced() -> None:
    stream = Stream(timeouts=Timeouts(renew_ns=1 * MS))
    stream.target.may_answer.clear()
    stream.store.is_fenced = True
    end = await stream.run()
    assert isinstance(end.error, Fenced)
    [renewal] = stream.named("EVALSHA renew")
    assert error_of(renewal) == error_of(stream.request) == "failed_precondition"
    assert stream.kept.events(stream.request, names.SESSION_FENCED) == [{}]
    must_hang_together(stream)


async def test_a_request_lasts_until_it_is_released() -> None:
    stream = Stream()
    stream.observer.hold()
    await stream.run()
    assert [span for span in stream.kept.spans if names.PROVIDER in attributes_of(span)] == []
    stream.clock.now += SECOND
    stream.observer.release()
    assert stream.request.end_time == OFFSET_NS + stream.clock.now


async def test_an_unsampled_request_has_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    stream = Stream()
    await stream.run()
    assert stream.kept.spans == []
    assert stream.observer.call(names.VERIFY, "target:0").traceparent.endswith("-00")
    assert stream.observer.stored_fields() == {}


async def test_an_untraced_request_sends_no_traceparent() -> None:
    observer = request_observer()
    assert observer.call(names.VERIFY, "target:0").traceparent == ""
    assert not observer.context.is_valid


async def test_a_breaker_is_traced_in_the_request_that_changed_it() -> None:
    stream, clock = Stream(), ManualClock()
    drafts = DraftPool(StaticAddresses([]), "tokenizer", cast("Any", None), clock, SECOND)
    draft, breaker = cast("Any", SimpleNamespace(address="draft:1")), Breaker()
    for _ in range(FAILURES):
        drafts.failed(draft, breaker, drafts.begin(draft, breaker))
    clock.now += FIRST_PAUSE_NS
    drafts.succeeded(draft, breaker, drafts.begin(draft, breaker))
    stream.observer.release()
    changes = stream.kept.events(stream.request, names.BREAKER_CHANGED)
    assert [(it[names.FROM], it[names.TO]) for it in changes] == [
        ("closed", "open"),
        ("open", "half_open"),
        ("half_open", "closed"),
    ]
    assert {(it[names.POOL], it[names.REPLICA]) for it in changes} == {("draft", "draft:1")}


def must_hang_together(stream: Stream) -> None:
    stream.kept.must_hang_together(stream.request)
