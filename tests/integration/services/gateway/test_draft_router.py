"""Which draft a session asks next, as leases, streams and answers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from structlog.testing import capture_logs

from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry
from galley.core.answer.answer import SessionSpec
from galley.core.content import prefix_hash
from galley.core.names import FEATURES, MODEL, NGRAM
from galley.core.routing.breaker import FAILURES
from galley.core.session import events as ev
from galley.core.store import CacheLocation
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import SECOND, MonotonicClock
from services.gateway.replicas import clients
from services.gateway.replicas.draft_session import DraftSession
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.membership import POLL_S, RegisteredAddresses, StaticAddresses
from tests.fakes.fleet import DraftFleet
from tests.fakes.replicas import states_of
from tests.fakes.truth import SEED, true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import PROMPT_TOKENS, SPEC, World

K = 4
# Long enough that a draft answers in time on a busy machine.
TIMEOUT_S = 1.0
SOON_S = 0.1
TIMED_OUT = "no answer in time"


class Here:
    def __init__(self, fleet: DraftFleet, drafts: DraftPool) -> None:
        self.fleet = fleet
        self.drafts = drafts
        self._requests = 0

    async def ask(
        self,
        session: DraftSession,
        spec: SessionSpec = SPEC,
        *,
        strategy: str = "",
        ahead: int = 0,
        within_s: float = TIMEOUT_S,
    ) -> ev.Proposed | ev.CacheMissed | ev.Failed:
        self._requests += 1
        part = ev.Slice(0, spec.prompt, prefix_hash(()))
        request = ev.Propose(self._requests, part, K, strategy, ahead)
        try:
            async with asyncio.timeout(within_s):
                return await session.propose(spec, request, int(TIMEOUT_S * SECOND))
        except TimeoutError:
            return ev.Failed(self._requests, TIMED_OUT)

    async def proposed(self, session: DraftSession, spec: SessionSpec = SPEC) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(answer := await self.ask(session, spec), ev.Failed):
                await self.drafts.refresh()
        must_be_right(answer)


def must_be_right(answer: object) -> None:
    assert isinstance(answer, ev.Proposed), answer
    assert list(answer.tokens) == true_output(PROMPT_TOKENS, K, SEED)


@pytest.fixture
async def here(world: World) -> AsyncIterator[Here]:
    async with DraftFleet(world) as fleet:
        await fleet.register()
        drafts = drafts_of(world)
        await drafts.start()
        yield Here(fleet, drafts)
        await drafts.close()


def drafts_of(world: World) -> DraftPool:
    return DraftPool(
        RegisteredAddresses(ReplicaRegistry(world.redis_url), DRAFT_POOL),
        world.tokenizer_hash,
        grpc.aio.insecure_channel,
        MonotonicClock(),
        int(TIMEOUT_S * SECOND),
    )


def named(session_id: str) -> SessionSpec:
    return replace(SPEC, session_id=session_id)


async def test_sessions_are_spread_and_each_stays(here: Here) -> None:
    sessions = {name: DraftSession(here.drafts) for name in "wxyz"}
    for _ in range(3):
        for name, session in sessions.items():
            must_be_right(await here.ask(session, named(name)))
    first, second = (draft.sessions for draft in here.fleet.members)
    assert (len(first), len(second)) == (2, 2)
    assert not first & second


async def test_a_new_session_goes_to_the_least_busy_draft(here: Here) -> None:
    busy, other = here.fleet.members
    await busy.publish(busy=3)
    await here.drafts.refresh()
    for name in "wxy":
        must_be_right(await here.ask(DraftSession(here.drafts), named(name)))
    assert len(other.sessions) == 3
    assert not busy.fake.calls


async def test_a_killed_draft_is_replaced_within_a_proposal(here: Here) -> None:
    session = DraftSession(here.drafts)
    must_be_right(await here.ask(session))
    home, other = here.fleet.holder()
    home.fake.gate.close()
    asking = asyncio.ensure_future(here.ask(session))
    await home.fake.called(2)
    await home.fake.stop()
    must_be_right(await asking)
    assert other.sessions == {"s"}


async def test_a_frozen_draft_costs_each_session_one_timeout(here: Here) -> None:
    sessions = {name: DraftSession(here.drafts) for name in "wxyz"}
    for name, session in sessions.items():
        await here.ask(session, named(name))
    frozen, other = here.fleet.members
    frozen.fake.freeze()
    for _ in range(2):
        await asyncio.gather(*(here.ask(session, named(name)) for name, session in sessions.items()))
    call_count = len(frozen.fake.calls)
    for name, session in sessions.items():
        await here.proposed(session, named(name))
    assert len(frozen.fake.calls) == call_count
    assert other.sessions == set(sessions)


async def test_a_hanging_draft_fails_all_its_requests(here: Here) -> None:
    sessions = [DraftSession(here.drafts) for _ in "wx"]
    must_be_right(await here.ask(sessions[0], named("w")))
    home, other = here.fleet.holder()
    await other.publish(busy=9)
    await here.drafts.refresh()
    must_be_right(await here.ask(sessions[1], named("x")))
    assert home.sessions == {"w", "x"}
    home.fake.freeze()
    patient = ev.Propose(99, ev.Slice(0, SPEC.prompt, prefix_hash(())), K, "")
    waiting = asyncio.ensure_future(sessions[1].propose(named("x"), patient, None))
    await home.fake.called(3)
    assert isinstance(await here.ask(sessions[0], named("w")), ev.Failed)
    async with asyncio.timeout(PATIENCE_S / 4):
        must_be_right(await waiting)


async def test_a_frozen_draft_is_left_although_the_target_is_always_first(here: Here) -> None:
    """With credit, a request is cancelled once the target has confirmed what it asks for."""
    session = DraftSession(here.drafts)
    must_be_right(await here.ask(session))
    frozen, other = here.fleet.holder()
    frozen.fake.freeze()
    async with asyncio.timeout(PATIENCE_S):
        while isinstance(answer := await here.ask(session, within_s=SOON_S), ev.Failed):
            pass
    must_be_right(answer)
    assert other.sessions == {"s"}


async def test_a_draft_that_reads_for_long_keeps_its_sessions(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftPool, "probe_timeout_s", PATIENCE_S)  # on a busy machine too
    session = DraftSession(here.drafts)
    must_be_right(await here.ask(session))
    reading, other = here.fleet.holder()
    reading.fake.gate.close()
    before = reading.fake.probes
    async with asyncio.timeout(PATIENCE_S):
        while reading.fake.probes < before + 2:
            assert isinstance(await here.ask(session, within_s=SOON_S), ev.Failed)
    reading.fake.gate.open()
    must_be_right(await here.ask(session))
    assert not other.sessions


async def test_a_draft_that_thaws_is_used_again(here: Here) -> None:
    only, other = here.fleet.members
    await other.leave()
    session = DraftSession(here.drafts)
    await here.proposed(session)
    only.fake.freeze()
    assert isinstance(await here.ask(session), ev.Failed)
    only.fake.thaw()
    await here.proposed(session)


async def test_an_error_in_a_connection_fails_the_proposal(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> bytes:
        raise KeyError

    session = DraftSession(here.drafts)
    with monkeypatch.context() as patched, capture_logs():
        patched.setattr(clients, "varint", fail)
        failed = await here.ask(session)
    assert isinstance(failed, ev.Failed)
    assert failed.message != TIMED_OUT
    await here.proposed(session)


async def test_only_the_late_session_leaves_a_late_draft(here: Here) -> None:
    session = DraftSession(here.drafts)
    await here.ask(session)
    home, other = here.fleet.holder()
    home.fake.gate.close()
    assert isinstance(await here.ask(session), ev.Failed)
    must_be_right(await here.ask(session))
    assert len(other.fake.calls) == 1
    home.fake.gate.open()
    await other.publish(busy=9)
    await here.drafts.refresh()
    must_be_right(await here.ask(DraftSession(here.drafts), named("x")))
    assert "x" in home.sessions


async def test_a_restarted_draft_is_used_again(here: Here) -> None:
    home, other = here.fleet.members
    await other.leave()
    session = DraftSession(here.drafts)
    await here.proposed(session)
    assert session.replica is not None
    before = session.replica
    await home.fake.stop()
    await home.fake.start()
    await here.proposed(session)
    assert session.replica is not None
    assert (session.replica.address, before.address) == (home.fake.address, home.fake.address)
    assert session.replica.incarnation != before.incarnation


@pytest.mark.parametrize(
    ("addresses", "problem"), [([], "no draft configured"), (["a:1", "b:2"], "no draft at a:1, b:2")]
)
def test_a_pool_without_drafts_says_where_it_looked(addresses: list[str], problem: str) -> None:
    source = StaticAddresses(addresses)
    assert DraftPool(source, "hash", grpc.aio.insecure_channel, MonotonicClock(), SECOND).problem == problem


async def test_a_first_draft_is_used_once_it_registers(world: World) -> None:
    async with DraftFleet(world, "a") as fleet:
        drafts = drafts_of(world)
        await drafts.start()
        here, session = Here(fleet, drafts), DraftSession(drafts)
        failed = await here.ask(session)
        assert isinstance(failed, ev.Failed)
        assert "no draft in the registry" in failed.message
        assert session.replica is None
        await fleet.register()
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(await here.ask(session), ev.Failed):  # noqa: ASYNC110  # it finds out by itself
                await asyncio.sleep(0.01)
        assert fleet.members[0].fake.calls
        await drafts.close()


async def test_a_draining_draft_loses_its_sessions(here: Here) -> None:
    session = DraftSession(here.drafts)
    must_be_right(await here.ask(session))
    home, other = here.fleet.holder()
    await home.drain()
    await here.drafts.refresh()
    must_be_right(await here.ask(session))
    assert other.sessions == {"s"}
    await other.leave()
    await here.drafts.refresh()
    answer = await here.ask(DraftSession(here.drafts), named("new"))
    assert isinstance(answer, ev.Failed), "it takes no new ones, whatever else there is"
    assert "new" not in home.sessions


async def test_a_draining_only_draft_keeps_its_sessions(here: Here) -> None:
    session = DraftSession(here.drafts)
    must_be_right(await here.ask(session))
    home, other = here.fleet.holder()
    await other.leave()
    await home.drain()
    await here.drafts.refresh()
    must_be_right(await here.ask(session))


async def test_a_draft_is_contacted_again_after_a_broken_stream(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = DraftSession(here.drafts)
    home, other = here.fleet.members
    await other.leave()
    await here.proposed(session)
    monkeypatch.setattr("services.gateway.replicas.membership.POLL_S", 3600.0)
    await asyncio.sleep(POLL_S)
    await here.drafts.refresh()  # joins the last poll, if it is still under way
    home.fake.fail(grpc.StatusCode.INTERNAL, times=1)
    assert isinstance(await here.ask(session), ev.Failed)
    async with asyncio.timeout(PATIENCE_S):
        while isinstance(await here.ask(session), ev.Failed):  # noqa: ASYNC110  # it is met meanwhile
            await asyncio.sleep(0.01)


async def test_a_resumed_session_returns_to_its_draft(here: Here) -> None:
    for home in here.fleet.members:
        held = CacheLocation(home.fake.address, home.fake.info().incarnation, len(SPEC.prompt))
        for number in range(3):
            name = f"{home.fake.address}-{number}"
            must_be_right(await here.ask(DraftSession(here.drafts, held), named(name)))
        assert len(home.sessions) == 3
    held = CacheLocation(here.fleet.members[0].fake.address, "an earlier life", len(SPEC.prompt))
    await here.fleet.members[0].publish(busy=9)
    await here.drafts.refresh()
    must_be_right(await here.ask(DraftSession(here.drafts, held), named("late")))
    assert "late" in here.fleet.members[1].sessions


async def test_an_expired_lease_moves_sessions_only_to_a_live_one(here: Here) -> None:
    session = DraftSession(here.drafts)
    must_be_right(await here.ask(session))
    home, other = here.fleet.holder()
    await home.withdraw()
    await here.drafts.refresh()
    must_be_right(await here.ask(session))
    assert other.sessions == {"s"}
    await other.withdraw()
    await here.drafts.refresh()
    must_be_right(await here.ask(session))  # a registry that lost its data is no reason to stop


async def test_a_refused_tokenizer_is_logged_once(world: World) -> None:
    async with DraftFleet(world) as fleet:
        wrong, right = fleet.members
        wrong.fake.tokenizer_hash = "another"
        await fleet.register()
        drafts = drafts_of(world)
        with capture_logs() as logs:
            await drafts.start()
            for _ in range(3):
                await drafts.refresh()
        here = Here(fleet, drafts)
        for name in "wx":
            must_be_right(await here.ask(DraftSession(drafts), named(name)))
        await drafts.close()
        assert len(right.sessions) == 2
        assert not wrong.fake.calls
        [line] = [line for line in logs if line["event"] == "replica refused"]
        assert "another" in line["reason"]
        assert world.tokenizer_hash in line["reason"]


async def test_a_cancelled_proposal_is_cancelled_at_the_draft(here: Here) -> None:
    session = DraftSession(here.drafts)
    for draft in here.fleet.members:
        draft.fake.gate.close()
    asking = asyncio.ensure_future(here.ask(session))
    await asyncio.wait(
        {asking, *(asyncio.ensure_future(it.fake.called(1)) for it in here.fleet.members)},
        return_when=asyncio.FIRST_COMPLETED,
    )
    home, other = here.fleet.holder()
    asking.cancel()
    await home.fake.was_cancelled()
    for draft in here.fleet.members:
        draft.fake.gate.open()
    must_be_right(await here.ask(session))
    assert not other.fake.calls, "giving up is no reproach"


async def test_a_request_ahead_says_so(here: Here) -> None:
    await here.ask(DraftSession(here.drafts), ahead=3)
    home, _ = here.fleet.holder()
    assert [call.ahead for call in home.fake.calls] == [3]


async def test_a_strategy_is_requested_where_it_is_offered(here: Here) -> None:
    answer = await here.ask(DraftSession(here.drafts), strategy="clairvoyance")
    assert isinstance(answer, ev.Failed)
    assert not any(draft.fake.calls for draft in here.fleet.members)
    must_be_right(await here.ask(DraftSession(here.drafts), strategy="model"))


async def test_a_failing_draft_gets_one_probe_at_a_time(here: Here) -> None:
    bad, other = here.fleet.members
    await other.leave()
    await here.drafts.refresh()
    bad.fake.corrupt = refuse
    sessions = [DraftSession(here.drafts) for _ in range(8)]
    for session in sessions:
        assert isinstance(await here.ask(session), ev.Failed)
    assert len(bad.fake.calls) == FAILURES
    await until_used(here, bad.fake.address)
    for session in sessions:
        assert isinstance(await here.ask(session), ev.Failed)
    assert len(bad.fake.calls) == FAILURES + 1
    bad.fake.corrupt = lambda _item, _answer: None
    await until_used(here, bad.fake.address)
    for session in sessions:
        must_be_right(await here.ask(session))


async def test_a_draft_that_does_not_take_a_session_serves_others(here: Here) -> None:
    def refuse_some(item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
        if item.slice.session_id == "odd":
            answer.status.code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
            answer.status.message = "slice.sampling.logit_bias: must be below 128, got 130"

    for draft in here.fleet.members:
        draft.fake.corrupt = refuse_some
    for _ in range(2 * FAILURES):
        assert isinstance(await here.ask(DraftSession(here.drafts), named("odd")), ev.Failed)
    must_be_right(await here.ask(DraftSession(here.drafts)))


async def test_misses_are_no_failures(here: Here) -> None:
    session = DraftSession(here.drafts)
    must_be_right(await here.ask(session))
    home, _ = here.fleet.holder()
    for _ in range(2 * FAILURES):
        home.fake.forget()
        part = ev.Slice(len(PROMPT_TOKENS), (1,), prefix_hash(PROMPT_TOKENS))
        answer = await session.propose(SPEC, ev.Propose(1, part, K, ""), None)
        assert isinstance(answer, ev.CacheMissed)
    must_be_right(await here.ask(session))


async def test_late_proposals_open_the_breaker(here: Here) -> None:
    slow, other = here.fleet.members
    await other.leave()
    await here.drafts.refresh()
    slow.fake.gate.close()
    asking = [here.ask(DraftSession(here.drafts), named(str(number))) for number in range(FAILURES)]
    await asyncio.gather(*asking)
    call_count = len(slow.fake.calls)
    failed = await here.ask(DraftSession(here.drafts))
    assert isinstance(failed, ev.Failed)
    assert failed.message != TIMED_OUT
    assert len(slow.fake.calls) == call_count


async def test_a_session_degrades_by_steps_and_recovers(
    here: Here,
) -> None:
    model, looking_up = here.fleet.members
    looking_up.fake.strategies = (NGRAM,)
    await looking_up.fake.stop()
    await looking_up.fake.start()
    await looking_up.withdraw()
    await looking_up.register()
    await here.drafts.refresh()
    session = DraftSession(here.drafts, may_look_up=True)

    async def requested_strategy() -> str:
        counts = [len(draft.fake.calls) for draft in here.fleet.members]
        answer = await here.ask(session, strategy=MODEL)
        assert isinstance(answer, ev.Proposed)
        for draft, count in zip(here.fleet.members, counts, strict=True):
            if len(draft.fake.calls) > count:
                return str(draft.fake.calls[-1].strategy)
        assert answer.prefix_hash == prefix_hash(SPEC.prompt)
        assert session.replica is None, "what is looked up here no draft has"
        return "here"

    assert await requested_strategy() == MODEL
    await model.fake.stop()
    assert await requested_strategy() == NGRAM
    await looking_up.fake.stop()
    assert await requested_strategy() == "here"
    await looking_up.fake.start()
    await until_used(here, looking_up.fake.address)
    assert await requested_strategy() == NGRAM
    await model.fake.start()
    await until_used(here, model.fake.address)
    assert await requested_strategy() == MODEL
    assert sum(here.drafts.move_counts.values()) >= 2


async def until_used(here: Here, address: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not here.drafts._replicas[address].is_available(here.drafts.now_ns()):
            await here.drafts.refresh()
            await asyncio.sleep(0.02)


def refuse(_item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.status.code = grpc.StatusCode.INTERNAL.value[0]


async def test_a_session_that_leaves_its_draft_takes_no_states_along(here: Here) -> None:
    for member in here.fleet.members:
        member.fake.feature_layers, member.fake.strategies = (2, 5), (FEATURES, NGRAM)
        member.fake.forget()  # so that it describes itself anew
        await member.publish()
    await here.drafts.refresh()
    session = DraftSession(here.drafts)
    form = session.form_for(SPEC)
    assert form is not None
    verdict = pb.VerifyAnswer(result=pb.VerifyResult(features=states_of(range(4), form.layers)))
    session.receive(form, [verdict])
    must_be_right(await here.ask(session))
    home, other = here.fleet.holder()
    assert home.fake.calls[0].features == verdict.result.features
    home.fake.gate.close()
    asking = asyncio.ensure_future(here.ask(session))
    await home.fake.called(2)
    session.receive(form, [verdict])
    await home.fake.stop()
    must_be_right(await asking)
    assert [call.features for call in other.fake.calls] == [b""]


@pytest.mark.parametrize("registered", [True, False])
async def test_the_weights_of_a_running_draft_may_change(world: World, registered: bool) -> None:
    """Its incarnation stays, so only its lease or the draft itself tells."""
    async with DraftFleet(world, "a") as fleet:
        [member] = fleet.members
        member.fake.version, member.fake.max_load_bytes = "old", 1
        if registered:
            await fleet.register()
            drafts = drafts_of(world)
        else:
            source = StaticAddresses([member.fake.address])
            drafts = DraftPool(source, world.tokenizer_hash, grpc.aio.insecure_channel, MonotonicClock(), 1)
        try:
            for version in ("old", "new"):
                member.fake.version = version
                if registered:
                    await member.publish()
                await drafts.refresh()
                draft = drafts.choose("", None, (), "a")
                assert draft is not None
                assert draft.client.info.version == version
        finally:
            await drafts.close()
