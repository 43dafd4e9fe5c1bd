"""Which replica a session asks next, as leases, streams and answers come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from galley.common.registry.leases import target_lease
from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.content import block_hashes, prefix_hash
from galley.core.routing.choice import TargetLease
from galley.core.routing.lateness import VerdictTimes
from galley.core.session import events as ev
from galley.core.session.events import Replica
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import SECOND, MonotonicClock
from services.gateway.replicas.clients import TargetClient, _Connection
from services.gateway.replicas.delivery import DeliveryQueue, Recipient
from services.gateway.replicas.target_session import TargetSession
from services.gateway.replicas.targets import TargetPool, TargetRequirements
from tests.fakes.fleet import BLOCK, Fleet
from tests.fakes.replicas import MODEL, FakeTarget
from tests.fakes.spans import KeptSpans, attributes_of, error_of, traced_here
from tests.fakes.truth import SEED, VOCAB, true_output
from tests.fakes.waiting import PATIENCE_S, Watch
from tests.fakes.world import PROMPT_TOKENS, SPEC, World


class Leases:
    def __init__(self, *empty_reads: int, can_change: bool = False) -> None:
        self.can_change = can_change
        self.leases: dict[str, TargetLease | None] = {}
        self.reads = 0
        self._empty_reads = empty_reads

        self.error: Exception | None = None
        self.watch = Watch()

    async def read(self) -> Mapping[str, TargetLease | None]:
        self.reads += 1
        self.watch.changed()
        if self.error is not None:
            raise self.error
        return {} if self.reads in self._empty_reads else dict(self.leases)

    async def close(self) -> None:
        pass


class Results:
    """The results of one verification, in order."""

    def __init__(
        self,
        target: TargetSession,
        request: ev.Verify,
        remaining_ns: int | None = None,
        *,
        spec: SessionSpec = SPEC,
    ) -> None:
        self._results: asyncio.Queue[ev.VerifyEvent] = asyncio.Queue()
        self._has_ended = False
        self.verification = target.verify(spec, request, remaining_ns, self._take)

    def _take(self, results: Sequence[ev.VerifyEvent]) -> None:
        for result in results:
            self._results.put_nowait(result)

    def __aiter__(self) -> Results:
        return self

    async def __anext__(self) -> ev.VerifyEvent:
        if self._has_ended:
            raise StopAsyncIteration
        result = await self._results.get()
        self._has_ended = not (isinstance(result, ev.Verified) and result.more)
        return result


class Here:
    def __init__(self, leases: Leases, targets: TargetPool, fakes: list[FakeTarget]) -> None:
        self.leases = leases
        self.targets = targets
        self.fakes = fakes
        self._requests = 0

    async def publish(self, fake: FakeTarget) -> None:
        info = await fake.GetTargetInfo(pb.GetTargetInfoRequest(), None)
        self.leases.leases[fake.address] = target_lease(fake.address, info)

    def request(self, tokens: list[int], credit: int = 0) -> ev.Verify:
        self._requests += 1
        return ev.Verify(self._requests, ev.Slice(0, tuple(tokens), prefix_hash(())), (), credit=credit)

    async def ask(
        self,
        target: TargetSession,
        tokens: list[int],
        *,
        credit: int = 0,
        until: int | None = None,
        spec: SessionSpec = SPEC,
    ) -> list[ev.Verified | ev.CacheMissed | ev.Failed]:
        answers: list[ev.Verified | ev.CacheMissed | ev.Failed] = []
        results = Results(target, self.request(tokens, credit), spec=spec)
        async with asyncio.timeout(PATIENCE_S):
            async for answer in results:
                answers.append(answer)
                if len(answers) == until:
                    break
        results.verification.close()
        return answers

    async def verified(self, target: TargetSession, tokens: list[int]) -> ev.Verified:
        [answer] = await self.ask(target, tokens)
        assert isinstance(answer, ev.Verified)
        return answer

    def request_counts(self) -> list[int]:
        return [len(fake.calls) for fake in self.fakes]

    def home(self) -> tuple[FakeTarget, FakeTarget]:
        first, second = self.fakes
        return (first, second) if first.calls else (second, first)


def pool_of(leases: Leases, world: World) -> TargetPool:
    requirements = TargetRequirements(world.tokenizer_hash, [MODEL], 16)
    return TargetPool(leases, requirements, grpc.aio.insecure_channel, MonotonicClock())


@pytest.fixture
async def here(world: World, request: pytest.FixtureRequest) -> AsyncIterator[Here]:
    async with Fleet(world, getattr(request, "param", "ab")) as fleet:
        fakes = [member.fake for member in fleet.members]
        leases = Leases()
        targets = pool_of(leases, world)
        here = Here(leases, targets, fakes)
        for fake in fakes:
            await here.publish(fake)
        await targets.start(PATIENCE_S)
        while len(targets.leases()) < len(fakes):  # one may have been too slow to be met
            await targets.refresh()
        yield here
        for fake in fakes:
            fake.gate.open()
        await targets.close()


def confirmed(count: int) -> list[int]:
    return [*PROMPT_TOKENS, *true_output(PROMPT_TOKENS, count, SEED)]


async def test_a_session_outlives_the_lease_of_its_replica(here: Here) -> None:
    target = TargetSession(here.targets)
    await here.ask(target, confirmed(0))
    home, other = here.home()
    del here.leases.leases[home.address]
    await here.targets.refresh()
    for count in range(1, 4):
        await here.verified(target, confirmed(count))
    assert len(home.calls) == 4
    assert not other.calls
    await here.ask(TargetSession(here.targets), confirmed(0))
    assert len(other.calls) == 1, "a new session goes where a lease lives"


async def test_a_session_leaves_a_replica_that_restarts_without_its_adapter(here: Here) -> None:
    for fake in here.fakes:
        fake.lora_adapters = ("sql",)
        await here.publish(fake)
    await here.targets.refresh()
    target, spec = TargetSession(here.targets), replace(SPEC, lora="sql")
    await here.ask(target, confirmed(0), spec=spec)
    home, other = here.home()
    await home.stop()
    home.lora_adapters = ()
    await home.start()
    await here.publish(home)
    await here.targets.refresh()
    [answer] = await here.ask(target, confirmed(1), spec=spec)
    assert isinstance(answer, ev.Verified)
    assert (len(home.calls), len(other.calls)) == (1, 1)


async def test_a_session_whose_adapter_no_target_offers_says_so(here: Here) -> None:
    target = TargetSession(here.targets)
    [failed] = await here.ask(target, confirmed(0), spec=replace(SPEC, lora="sql"))
    assert isinstance(failed, ev.Failed)
    assert failed.message == "no target offers the LoRA adapter 'sql'"
    assert here.request_counts() == [0, 0]


async def test_a_session_stays_after_a_finished_request(here: Here) -> None:
    target = TargetSession(here.targets)
    answers = await here.ask(target, confirmed(0), credit=2)
    assert len(answers) == 3
    await here.ask(target, confirmed(3))
    assert sorted(here.request_counts()) == [0, 2]


@pytest.mark.parametrize("reported", [True, False], ids=["told", "registered"])
async def test_a_dead_replica_gets_no_new_sessions(here: Here, reported: bool) -> None:
    await here.ask(TargetSession(here.targets), confirmed(0))
    home, other = here.home()
    await home.stop()
    if reported:
        here.leases.leases = dict.fromkeys(here.leases.leases)
    else:
        home.incarnations += 1
        await here.publish(home)
    await here.targets.refresh()
    await here.verified(TargetSession(here.targets), confirmed(0))
    assert len(other.calls) == 1


async def test_a_session_returns_to_its_build(here: Here) -> None:
    target = TargetSession(here.targets)
    await here.ask(target, confirmed(0))
    home, other = here.home()
    other.fingerprint = "build-2"
    await here.publish(other)
    other.incarnations += 1
    await here.publish(other)
    await here.targets.refresh()
    home.fail(grpc.StatusCode.INVALID_ARGUMENT, times=1)
    [failed] = await here.ask(target, confirmed(1))
    assert isinstance(failed, ev.Failed)
    answer = await here.verified(target, confirmed(1))
    assert answer.fingerprint == "build-1"
    assert not other.calls


async def test_only_the_first_request_of_a_session_overtakes_others(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    add = DeliveryQueue.add

    def note(queue: DeliveryQueue, recipient: Recipient) -> None:
        begun.append(recipient.has_begun)
        add(queue, recipient)

    monkeypatch.setattr(DeliveryQueue, "add", note)
    target = TargetSession(here.targets)
    for length in range(3):
        await here.verified(target, confirmed(length))
    assert begun == [False, True, True]


async def test_a_closed_request_is_not_counted(here: Here) -> None:
    target = TargetSession(here.targets)
    before = [it.open_requests for it in here.targets._replicas.values()]
    Results(target, here.request(confirmed(0))).verification.close()
    assert [it.open_requests for it in here.targets._replicas.values()] == before


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("galley.core.routing.lateness.LEAST_NS", SECOND // 10)


def moves_of(here: Here) -> dict[str, int]:
    return dict(here.targets.move_counts)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("credit", [0, 8])
async def test_a_session_leaves_a_late_replica(here: Here, credit: int) -> None:
    target = TargetSession(here.targets)
    await here.ask(target, confirmed(0))
    home, other = here.home()
    home.gate.close()
    answers = await here.ask(target, confirmed(1), credit=credit)
    [failed] = answers
    assert isinstance(failed, ev.Failed)
    assert failed.elsewhere
    await home.was_cancelled()
    answer = await here.verified(target, confirmed(1))
    assert list(answer.tokens) == true_output(PROMPT_TOKENS, 2, SEED)[1:]
    assert (len(home.calls), len(other.calls)) == (2, 1)
    assert moves_of(here) == {"late": 1}
    home.gate.open()
    for count in range(2, 6):
        await here.ask(target, confirmed(count))
    assert len(home.calls) == 2, "it stays where it is"
    assert moves_of(here) == {"late": 1}


@pytest.mark.usefixtures("hasty")
async def test_a_session_leaves_a_replica_that_is_late_mid_request(here: Here) -> None:
    target = TargetSession(here.targets)
    for fake in here.fakes:
        fake.gate.close_after(3)
    answers = await here.ask(target, confirmed(0), credit=8)
    assert [type(answer) for answer in answers] == [ev.Verified] * 3 + [ev.Failed]
    home, other = here.home()
    other.gate.open()
    await here.ask(target, confirmed(3))
    assert (len(home.calls), len(other.calls)) == (1, 1)


@pytest.mark.usefixtures("hasty")
async def test_the_only_replica_of_a_build_is_awaited(here: Here) -> None:
    target = TargetSession(here.targets)
    await here.ask(target, confirmed(0))
    home, other = here.home()
    other.fingerprint = "build-2"
    other.incarnations += 1
    await here.publish(other)
    await here.targets.refresh()
    home.gate.close()
    asking = asyncio.ensure_future(here.ask(target, confirmed(1)))
    await asyncio.sleep(0.5)
    home.gate.open()
    [answer] = await asking
    assert isinstance(answer, ev.Verified)
    assert not other.calls


@pytest.mark.usefixtures("hasty")
async def test_a_session_does_not_move_to_a_stalled_replica(here: Here) -> None:
    for fake in here.fakes:
        fake.gate.close()
    asking = [asyncio.ensure_future(here.ask(TargetSession(here.targets), confirmed(0))) for _ in range(2)]
    for fake in here.fakes:
        await fake.called(1)
    await asyncio.sleep(0.5)
    for fake in here.fakes:
        fake.gate.open()
    for [answer] in await asyncio.gather(*asking):
        assert isinstance(answer, ev.Verified)
    assert here.request_counts() == [1, 1]


@pytest.mark.usefixtures("hasty")
async def test_a_verdict_is_late_relative_to_the_step_time(here: Here) -> None:
    for fake in here.fakes:
        fake.row_costs = ((1, SECOND),)
        fake.incarnations += 1
        await here.publish(fake)
    await here.targets.refresh()
    target = TargetSession(here.targets)
    await here.ask(target, confirmed(0))
    home, other = here.home()
    home.gate.close()
    asking = asyncio.ensure_future(here.ask(target, confirmed(1)))
    await asyncio.sleep(0.5)
    home.gate.open()
    [answer] = await asking
    assert isinstance(answer, ev.Verified)
    assert not other.calls


async def test_a_request_that_expires_can_move_to_a_replica_that_has_not_failed(here: Here) -> None:
    target = TargetSession(here.targets)
    for fake in here.fakes:
        fake.gate.close()
    can_move = []
    for _ in range(2):
        results = Results(target, here.request(confirmed(0)))
        can_move.append(results.verification.expire())
    assert can_move == [True, False]


@pytest.mark.usefixtures("hasty")
async def test_all_sessions_leave_a_silent_replica(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here.targets, "probe_timeout_s", 0.2)
    sessions = [TargetSession(here.targets) for _ in range(4)]
    for session in sessions:
        await here.ask(session, confirmed(0))
    frozen = here.fakes[0]
    frozen.gate.close()
    frozen.info_gate.close()
    patient = [session for session in sessions if session.place(SPEC, here.request(confirmed(1))) is not None]
    assert len(patient) == 4
    for session in patient[1:]:
        for _ in range(6):
            session.timeout.record_late()
    async with asyncio.timeout(PATIENCE_S):
        for answers in await asyncio.gather(*(here.ask(session, confirmed(1)) for session in sessions)):
            assert isinstance(answers[-1], ev.Verified | ev.Failed)
    frozen.info_gate.open()


async def test_sessions_meet_a_lost_replica_together(here: Here) -> None:
    sessions = [TargetSession(here.targets) for _ in range(4)]
    for session in sessions:
        target = session.place(SPEC, here.request(confirmed(0)))
        assert target is not None
        target.client.lost()
    described = [fake.described for fake in here.fakes]
    for [answer] in await asyncio.gather(*(here.ask(session, confirmed(0)) for session in sessions)):
        assert isinstance(answer, ev.Verified)
    met = [fake.described - before for fake, before in zip(here.fakes, described, strict=True)]
    assert 1 <= sum(met) <= len(here.fakes)


async def test_the_pool_is_read_again_after_an_unexpected_error(
    world: World, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noted.append(context["message"]))
    monkeypatch.setattr("services.gateway.replicas.membership.POLL_S", 0.01)
    leases = Leases(can_change=True)
    leases.leases = here.leases.leases
    targets = pool_of(leases, world)
    await targets.start(PATIENCE_S)
    leases.error = ValueError("a lease that nobody expected")
    reads = leases.reads
    await leases.watch.until(lambda: leases.reads > reads + 2)
    assert noted == ["refresh of the targets failed"], "once"
    assert len(targets.leases()) == len(here.fakes), "the known ones stay"
    await targets.close()


@pytest.mark.parametrize("call", ["verify", "find"])
async def test_an_unexpected_error_ends_the_request(
    here: Here, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async def fail(*_: object) -> None:
        raise KeyError(call)

    target = TargetSession(here.targets)
    if call == "verify":
        monkeypatch.setattr(TargetClient, "verify", fail)
    else:
        monkeypatch.setattr(target, "place", lambda *_: None)
        monkeypatch.setattr(target, "find", fail)
    with capture_logs() as logged:
        [failed] = await here.ask(target, confirmed(0))
    assert isinstance(failed, ev.Failed)
    assert (failed.message, failed.retryable) == ("its request raised KeyError", False)
    assert not failed.elsewhere, "it would fail at every replica"
    assert [line["event"] for line in logged] == ["target request failed"]


async def test_a_session_leaves_a_failing_replica(here: Here) -> None:
    target = TargetSession(here.targets)
    await here.ask(target, confirmed(0))
    for fake in here.fakes:
        fake.item_failure = grpc.StatusCode.RESOURCE_EXHAUSTED
    failures = [answer for _ in range(3) for answer in await here.ask(target, confirmed(1))]
    assert [isinstance(it, ev.Failed) and it.elsewhere for it in failures] == [True, False, False]
    for fake in here.fakes:
        fake.item_failure = None
    await here.verified(target, confirmed(1))


@pytest.mark.parametrize("here", ["abc"], indirect=True)
@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT])
async def test_what_a_target_refuses_one_other_gets(here: Here, code: grpc.StatusCode) -> None:
    target = TargetSession(here.targets)
    for fake in here.fakes:
        fake.item_failure = code
    failures = [answer for _ in range(2) for answer in await here.ask(target, confirmed(0))]
    assert [isinstance(it, ev.Failed) and it.elsewhere for it in failures] == [True, False]
    assert sorted(here.request_counts()) == [0, 1, 1]


@pytest.mark.parametrize("here", ["abc"], indirect=True)
async def test_a_replica_that_failed_is_none_that_refused(here: Here) -> None:
    target = TargetSession(here.targets)
    codes = iter([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
    for code in codes:
        for fake in here.fakes:
            fake.item_failure = code
        [failed] = await here.ask(target, confirmed(0))
        assert isinstance(failed, ev.Failed)
        assert failed.elsewhere
    for fake in here.fakes:
        fake.item_failure = None
    await here.verified(target, confirmed(0))
    assert sorted(here.request_counts()) == [1, 1, 1]


async def test_a_restarted_replica_is_a_new_incarnation(here: Here) -> None:
    target = TargetSession(here.targets)
    home, other = here.fakes
    del here.leases.leases[other.address]
    await here.targets.refresh()
    await here.ask(target, confirmed(0))
    await other.stop()
    home.gate.close()
    results = Results(target, here.request(confirmed(1)))
    await home.called(2)
    former = results.verification.replica
    await home.stop()
    await home.start()
    home.gate.open()
    assert isinstance(await anext(results), ev.Failed)
    results.verification.close()
    now_at: Replica | None = None
    for _ in range(3):
        await here.targets.refresh()
        later = Results(target, here.request(confirmed(1)))
        answer = await anext(later)
        later.verification.close()
        if isinstance(answer, ev.Verified):
            now_at = later.verification.replica
            break
    assert former is not None
    assert now_at is not None
    assert former.address == now_at.address
    assert former.incarnation != now_at.incarnation
    assert results.verification.replica == former, "what it held is not said to be held by the new one"
    assert moves_of(here) == {"restarted": 1}


async def test_a_replica_without_info_is_left_before_the_deadline(here: Here) -> None:
    target = TargetSession(here.targets)
    await here.ask(target, confirmed(0))
    home, other = here.home()
    at = target.place(SPEC, here.request(confirmed(1)))
    assert at is not None
    await home.stop()
    await asyncio.wait(cast("Any", at.client)._current._tasks)
    home.info_gate.close()
    await home.start()
    results = Results(target, here.request(confirmed(1)), 60 * SECOND)
    async with asyncio.timeout(PATIENCE_S):
        [failed] = [answer async for answer in results]
    assert isinstance(failed, ev.Failed)
    assert failed.elsewhere
    await here.verified(target, confirmed(1))
    assert len(other.calls) == 1
    home.info_gate.open()


async def test_a_replica_dropped_while_met_is_sent_nothing(here: Here) -> None:
    target = TargetSession(here.targets)
    await here.ask(target, confirmed(0))
    home, _ = here.home()
    at = target.place(SPEC, here.request(confirmed(1)))
    assert at is not None
    client = cast("Any", at.client)
    home.info_gate.close()
    client.lost()
    results = Results(target, here.request(confirmed(1)), 60 * SECOND)
    await home.info_gate.has_waiter()
    await client.close()
    home.info_gate.open()
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance(await anext(results), ev.Failed)
    assert client._current is None, "no stream was opened"
    assert len(home.calls) == 1
    results.verification.close()


async def hedging(here: Here, *, warm: bool) -> tuple[TargetSession, FakeTarget, FakeTarget]:
    hashes = frozenset(block_hashes(b"", PROMPT_TOKENS, BLOCK)) if warm else frozenset()
    for fake in here.fakes:
        lease = here.leases.leases[fake.address]
        assert lease is not None
        here.leases.leases[fake.address] = replace(lease, kv_block_tokens=BLOCK, cached_prefixes=hashes)
    await here.targets.refresh()
    for _ in range(20):
        await here.ask(TargetSession(here.targets), confirmed(0))
    home, other = here.home()
    assert not other.calls
    here.targets.hedge_quantile = 0.9
    return TargetSession(here.targets), home, other


@pytest.mark.parametrize("credit", [0, 4])
async def test_a_slow_first_verdict_is_hedged(here: Here, credit: int) -> None:
    target, home, other = await hedging(here, warm=True)
    home.gate.close()
    call_count = len(other.calls)
    results = Results(target, here.request(confirmed(0), credit))
    answers = []
    async with asyncio.timeout(PATIENCE_S):
        async for answer in results:
            assert isinstance(answer, ev.Verified)
            answers.append(answer)
    tokens = [token for answer in answers for token in answer.tokens]
    assert tokens == true_output(PROMPT_TOKENS, credit + 1, SEED)
    assert results.verification.replica is not None
    assert results.verification.replica.address == other.address
    assert len(other.calls) == call_count + 1
    await home.was_cancelled()
    results.verification.close()
    await here.ask(target, confirmed(credit + 1))
    assert len(other.calls) == call_count + 2, "it stays where it was answered"
    assert [it.open_requests for it in here.targets._replicas.values()] == [0, 0]
    assert [member.rows_ahead for member in here.targets._replicas.values()] == [0, 0]


async def test_the_times_of_both_replicas_of_a_hedge_are_kept(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, home, other = await hedging(here, warm=True)
    recorded: dict[VerdictTimes, int] = {}
    monkeypatch.setattr(VerdictTimes, "record_first", lambda times, ns: recorded.update({times: ns}))
    for fake in here.fakes:
        fake.gate.close()
    asking = asyncio.ensure_future(here.ask(target, confirmed(0)))
    await other.called(len(other.calls) + 1)
    began_ns = time.monotonic_ns()
    await asyncio.sleep(0.05)
    took_ns = time.monotonic_ns() - began_ns
    other.gate.permit(1)
    await asking
    other.gate.open()
    times = [here.targets._replicas[fake.address].times for fake in (home, other)]
    assert min(recorded[of] for of in times) >= took_ns


async def test_a_hedge_is_traced(here: Here) -> None:
    target, home, other = await hedging(here, warm=True)
    kept = KeptSpans()
    request = traced_here(kept, MonotonicClock())
    home.gate.close()
    await here.ask(target, confirmed(0))
    await home.was_cancelled()
    request.release()
    [traced] = await kept.requests()
    assert kept.events(traced, names.HEDGED) == [{names.POOL: "target", names.TO: other.address}]
    [moved] = kept.events(traced, names.SESSION_MOVED)
    assert (moved[names.SOURCE], moved[names.TO]) == (home.address, other.address)
    assert moved[names.REASON] == names.MOVE_HEDGED
    assert here.targets.move_counts[names.MOVE_HEDGED] == 1
    given_up, answered = [span for span in kept.spans if span.name == names.VERIFY]
    assert (attributes_of(given_up)[names.REPLICA], error_of(given_up)) == (home.address, "cancelled")
    assert (attributes_of(answered)[names.REPLICA], error_of(answered)) == (other.address, None)


async def test_a_hedge_that_loses_is_cancelled(here: Here) -> None:
    target, home, other = await hedging(here, warm=True)
    for fake in here.fakes:
        fake.gate.close()
    asking = asyncio.ensure_future(here.ask(target, confirmed(0)))
    await other.called(len(other.calls) + 1)
    home.gate.open()
    [answer] = await asking
    assert isinstance(answer, ev.Verified)
    await other.was_cancelled()
    assert moves_of(here) == {}


async def test_a_tie_keeps_the_session_at_home(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    target, home, other = await hedging(here, warm=True)
    for fake in here.fakes:
        fake.gate.close()
    arrived: list[tuple[Any, pb.VerifyAnswer]] = []
    first_came, arrive = asyncio.Event(), _Connection._arrive

    def hold(connection: Any, answer: pb.VerifyAnswer) -> None:
        arrived.append((connection, answer))
        first_came.set()
        if len(arrived) == 2:
            monkeypatch.undo()
            for one in arrived:
                arrive(*one)

    monkeypatch.setattr(_Connection, "_arrive", hold)
    asking = asyncio.ensure_future(here.ask(target, confirmed(0), credit=4))
    await other.called(len(other.calls) + 1)
    other.gate.permit(1)
    await asyncio.wait_for(first_came.wait(), PATIENCE_S)
    home.gate.open()
    answers = await asking
    assert [type(answer) for answer in answers] == [ev.Verified] * 5
    other.gate.open()
    assert moves_of(here) == {}


async def test_a_cancelled_hedge_is_not_counted(here: Here) -> None:
    target, _, other = await hedging(here, warm=True)
    for fake in here.fakes:
        fake.gate.close()
    results = Results(target, here.request(confirmed(0)))
    await other.called(len(other.calls) + 1)
    results.verification.close()
    assert [it.open_requests for it in here.targets._replicas.values()] == [0, 0]
    assert [member.rows_ahead for member in here.targets._replicas.values()] == [0, 0]


async def test_a_cold_replica_is_no_hedge(here: Here) -> None:
    target, home, other = await hedging(here, warm=False)
    home.gate.close()
    call_count = len(other.calls)
    asking = asyncio.ensure_future(here.ask(target, confirmed(0)))
    await asyncio.sleep(0.3)
    home.gate.open()
    [answer] = await asking
    assert isinstance(answer, ev.Verified)
    assert len(other.calls) == call_count


class LateTarget(FakeTarget):
    infos = 0

    async def GetTargetInfo(self, request: pb.GetTargetInfoRequest, context: Any) -> pb.GetTargetInfoResponse:
        self.infos += 1
        if self.infos == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return await super().GetTargetInfo(request, context)


async def test_a_pool_does_not_start_with_a_target_whose_lease_has_ended(world: World) -> None:
    async with Fleet(world, "a", LateTarget) as fleet:
        leases = Leases(2, 3)
        leases.leases = {fleet.addresses: fleet.members[0].lease()}
        targets = pool_of(leases, world)
        await targets.start(PATIENCE_S)
        assert targets.info.vocab_size == VOCAB
        assert leases.reads == 4
        await targets.close()
