"""What is counted of sessions where a test of the whole gateway would have to wait for a fault."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT

from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.core.answer.answer import SessionSpec
from galley.core.content import prefix_hash
from galley.core.errors import (
    Broken,
    Cancelled,
    ClientStalled,
    DeadlinePassed,
    Fenced,
    InvalidField,
    KeyReused,
    LogLost,
    Overloaded,
    StoreUnavailable,
    TargetUnavailable,
    TokenizerMismatch,
)
from galley.core.session import events as ev
from galley.core.session.round import SpeculationStats
from galley.core.store import StoredSession
from services.gateway.telemetry.call import end_of
from services.gateway.telemetry.observer import RequestObserver, observe_with
from services.gateway.telemetry.session_metrics import ByPosition, SessionCounts, SessionMetrics
from services.gateway.telemetry.spans import describe_counts, describe_sources
from tests.fakes.readings import count, number
from tests.fakes.session_ports import SPEC, FaultyStore, PortTarget
from tests.unit.services.gateway.test_runner import run, runner_of

SECOND = 1_000_000_000


@pytest.fixture
def registry() -> Registry:
    return Registry(GATEWAY)


@pytest.fixture
def sessions(registry: Registry) -> SessionMetrics:
    return SessionMetrics(registry, "tiny")


@pytest.fixture
def counts(sessions: SessionMetrics) -> SessionCounts:
    return SessionCounts(sessions, "", "anonymous", INVALID_SPAN_CONTEXT)


async def test_an_absent_store_is_counted(registry: Registry, sessions: SessionMetrics) -> None:
    observer = RequestObserver(sessions=sessions)
    observe_with(observer)
    store = FaultyStore()
    store.failures = 2
    runner = await runner_of(PortTarget(), store)
    observer.opened(runner.session, StoredSession(runner.log.owner, "me", {}, 3, [1, 2, 3]), 0)
    assert (await run(runner)).error is None
    assert number(registry, catalogue.STORE_RETRIES) == 2
    assert count(registry, catalogue.COMMIT_DURATION, "ok") >= 1


class ForgetfulDraft:
    replica = None

    def __init__(self) -> None:
        self.calls = 0

    async def propose(
        self, _spec: SessionSpec, request: ev.Propose, _remaining_ns: int | None
    ) -> ev.CacheMissed | ev.Failed:
        self.calls += 1
        if self.calls == 1:
            return ev.CacheMissed(request.request_id, 0, prefix_hash([]))
        return ev.Failed(request.request_id, "away")


async def test_a_draft_that_lost_its_cache_is_counted(registry: Registry, sessions: SessionMetrics) -> None:
    observe_with(RequestObserver(sessions=sessions))
    spec = replace(SPEC, k=1)
    assert (
        await run(await runner_of(PortTarget(), FaultyStore(), spec=spec, draft=ForgetfulDraft()))
    ).error is None
    assert number(registry, catalogue.CACHE_MISSES, "draft") == 1
    assert number(registry, catalogue.CACHE_MISSES, "target") == 0


class Failures(RequestObserver):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []
        self.has_failed = asyncio.Event()

    def target_failed(self, reason: str) -> None:
        self.reasons.append(reason)
        self.has_failed.set()


async def test_a_late_target_is_reported_as_such() -> None:
    observer, target = Failures(), PortTarget()
    observe_with(observer)
    target.may_answer.clear()
    running = asyncio.create_task(run(await runner_of(target, FaultyStore(), verify_ns=SECOND // 100)))
    async with asyncio.timeout(20):
        await observer.has_failed.wait()
        target.may_answer.set()
        assert (await running).error is None
    assert observer.reasons[0] == "no response in time"


def test_a_failed_commit_is_counted_with_its_status(registry: Registry, counts: SessionCounts) -> None:
    counts.committed(SECOND, Fenced("s"))
    counts.committed(SECOND, StoreUnavailable("away"))
    for outcome in ("failed_precondition", "unavailable"):
        assert count(registry, catalogue.COMMIT_DURATION, outcome) == 1


def test_draft_tokens_are_counted_by_what_proposed_them(registry: Registry, counts: SessionCounts) -> None:
    sources = (ev.SourceTokens("grammar", 4, 4, 4), ev.SourceTokens("model", 3, 2, 1))
    verdict = ev.Verified(1, 3, (7,) * 6, 5, 6, 8, "build")
    counts.round_ended(
        ev.RoundEnded(verdict, 0, 9, 7, 5, 6, 0, 0, 9, 0, ev.Timing(), strategy="model", sources=sources)
    )
    for source, *expected in (("grammar", 4, 4, 4), ("model", 3, 2, 1)):
        of = (catalogue.DRAFTED_TOKENS, catalogue.VERIFIED_TOKENS, catalogue.ACCEPTED_TOKENS)
        assert [number(registry, metric, "none", source, "tiny") for metric in of] == expected
    assert number(registry, catalogue.ROUNDS, "none", "model") == 1
    assert describe_sources(sources) == ("grammar 4/4", "model 1/2")


def test_trees_are_counted_by_position_and_rank(registry: Registry, counts: SessionCounts) -> None:
    chain = ev.RoundEnded(ev.Verified(1, 3, (7, 8), 1, 3, 8, "build"), 0, 9, 3, 1, 2, 0, 0, 9, 0, ev.Timing())
    verdict = ev.Verified(1, 3, (7, 8, 9), 2, 5, 8, "build")
    tree = ev.VerifiedTree(depth=2, verified_by_rank=(3, 2), accepted_by_rank=(1, 1))
    counts.round_ended(chain)
    counts.round_ended(replace(chain, verdict=verdict, accepted=2, confirmed=3, tree=tree))
    at, by_rank = (
        [[number(registry, metric, str(index)) for index in range(3)] for metric in metrics]
        for metrics in (
            (catalogue.VERIFIED_AT, catalogue.ACCEPTED_AT),
            (catalogue.VERIFIED_BY_RANK, catalogue.ACCEPTED_BY_RANK),
        )
    )
    assert at == [[2, 2, 1], [2, 1, 0]]
    assert by_rank == [[6, 2, 0], [2, 1, 0]]
    assert describe_counts((2,), (6, 2)) == ("0 2/6", "1 0/2")


def test_tokens_that_nothing_drafted_waste_no_rows(registry: Registry, counts: SessionCounts) -> None:
    """A target may verify what the grammar forces, although the grammar of the gateway has stopped."""
    verdict = ev.Verified(1, 3, (7,) * 5, 0, 0, 7, "build")
    counts.round_ended(ev.RoundEnded(verdict, 0, 9, 0, 0, 5, 0, 0, 9, 0, ev.Timing(), undrafted=4))
    assert number(registry, catalogue.WASTED_VERIFY_TOKENS) == 0


def test_unverified_proposals_count_as_wasted(registry: Registry, sessions: SessionMetrics) -> None:
    observer = RequestObserver(sessions=sessions)
    own = {"grammar": ev.SourceTokens("grammar", 3, 3, 3)}
    for stats in (SpeculationStats(proposed=9, verified=7, sources=own), SpeculationStats()):
        observer.stopped(cast("Any", SimpleNamespace(stats=stats)), None)
    assert number(registry, catalogue.WASTED_DRAFT_TOKENS, "unverified") == 5


def test_short_waits_are_no_stalls(registry: Registry, sessions: SessionMetrics) -> None:
    observer = RequestObserver(sessions=sessions)
    observer.sent(SECOND - 1)
    observer.sent(2 * SECOND)
    assert number(registry, catalogue.CLIENT_STALLS) == 1


def test_late_positions_are_counted_together() -> None:
    at = ByPosition()
    for length in (0, 1, 3, 16, 20):
        at.add(length)
    counted = {position: count for (position,), count in at.read()}
    assert (counted["0"], counted["1"], counted["2"], counted["3"], counted["15"]) == (4, 3, 3, 2, 2)
    assert counted["16+"] == 4
    assert sum(counted.values()) == 0 + 1 + 3 + 16 + 20


@pytest.mark.parametrize(
    ("error", "outcome", "fault"),
    [
        (None, "ok", "none"),
        (asyncio.CancelledError(), "cancelled", "caller"),
        (GeneratorExit(), "cancelled", "caller"),
        (Cancelled("gone"), "cancelled", "caller"),
        (InvalidField("k", "is 0"), "invalid_argument", "caller"),
        (KeyReused(), "already_exists", "caller"),
        (Fenced("s"), "failed_precondition", "caller"),
        (DeadlinePassed("late"), "deadline_exceeded", "caller"),
        (ClientStalled("not read"), "unavailable", "caller"),
        (Overloaded("all", 1, "own_streams"), "resource_exhausted", "caller"),
        (Overloaded("all", 1, "own_tokens"), "resource_exhausted", "caller"),
        (Overloaded("all", 1, "streams"), "resource_exhausted", "server"),
        (Overloaded("all", 1, "share"), "resource_exhausted", "server"),
        (TargetUnavailable("none"), "unavailable", "server"),
        (StoreUnavailable("away"), "unavailable", "server"),
        (LogLost("shorter"), "data_loss", "server"),
        (Broken("a bug"), "internal", "server"),
        (ValueError("a bug"), "internal", "server"),
        (TokenizerMismatch("a", "b"), "internal", "server"),
    ],
)
def test_each_error_is_attributed(error: BaseException | None, outcome: str, fault: str) -> None:
    assert end_of(error) == (outcome, fault)
