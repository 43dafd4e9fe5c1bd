"""Which replica a session asks next, as leases, streams and answers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import pytest

from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.registry import target_lease
from services.core import events as ev
from services.core.answer import SessionSpec
from services.core.content import prefix_hash
from services.core.params import SamplingParams
from services.gateway.clock import MonotonicClock
from services.gateway.router import SessionTarget
from services.gateway.targets import Targets
from tests.service.fakes import FakeTarget
from tests.service.fleet import Fleet
from tests.service.truth import SEED, VOCAB, true_output
from tests.service.waiting import PATIENCE_S
from tests.service.world import PROMPT_TOKENS, World

if TYPE_CHECKING:
    from services.core.routing import TargetLease

SPEC = SessionSpec(
    session_id="s",
    prompt=tuple(PROMPT_TOKENS),
    sampling=SamplingParams(seed=SEED),
    max_position=200,
    vocab_size=VOCAB,
)


@dataclass
class Leases:
    """A registry that tells what the test says."""

    told: dict[str, TargetLease | None] = field(default_factory=dict)
    changes = False

    async def read(self) -> Mapping[str, TargetLease | None]:
        return dict(self.told)

    async def close(self) -> None:
        pass


class Here:
    """Two replicas, and what a gateway knows of them; `refresh` lets it look."""

    def __init__(self, leases: Leases, targets: Targets, fakes: list[FakeTarget]) -> None:
        self.leases = leases
        self.targets = targets
        self.fakes = fakes
        self._requests = 0

    async def tell(self, fake: FakeTarget) -> None:
        """The replica's lease is what it says of itself now."""
        info = await fake.GetTargetInfo(pb.GetTargetInfoRequest(), None)
        self.leases.told[fake.address] = target_lease(fake.address, info)

    def request(self, tokens: list[int], credit: int = 0) -> ev.Verify:
        self._requests += 1
        return ev.Verify(self._requests, ev.Slice(0, tuple(tokens), prefix_hash(())), (), credit=credit)

    async def ask(
        self, target: SessionTarget, tokens: list[int], *, credit: int = 0, until: int | None = None
    ) -> list[ev.Verified | ev.CacheMissed | ev.Failed]:
        """The answers to an item: all, or the first `until`, after which it is given up."""
        answers: list[ev.Verified | ev.CacheMissed | ev.Failed] = []
        item = target.verify(SPEC, self.request(tokens, credit), None)
        async with asyncio.timeout(PATIENCE_S):
            async for answer in item:
                answers.append(answer)
                if len(answers) == until:
                    break
            await item.aclose()
        return answers

    def asked(self) -> list[int]:
        """How many items each was asked."""
        return [len(fake.calls) for fake in self.fakes]

    def home(self) -> tuple[FakeTarget, FakeTarget]:
        """The one that was asked, and the other."""
        first, second = self.fakes
        return (first, second) if first.calls else (second, first)


@pytest.fixture
async def here(world: World) -> AsyncIterator[Here]:
    async with Fleet(world) as fleet:
        fakes = [target.fake for target in fleet.targets]
        leases = Leases()
        targets = Targets(
            leases, world.tokenizer_hash, grpc.aio.insecure_channel, MonotonicClock(), max_draft_tokens=16
        )
        here = Here(leases, targets, fakes)
        for fake in fakes:
            await here.tell(fake)
        await targets.start(PATIENCE_S)
        yield here
        for fake in fakes:
            fake.gate.open()
        await targets.close()


def confirmed(count: int) -> list[int]:
    """The prompt and the first tokens of the answer."""
    return [*PROMPT_TOKENS, *true_output(PROMPT_TOKENS, count, SEED)]


async def test_a_session_stays_where_only_the_lease_has_ended(here: Here) -> None:
    """A registry that lost its data: what serves a session still does, and has its KV."""
    target = SessionTarget(here.targets)
    await here.ask(target, confirmed(0))
    home, other = here.home()
    del here.leases.told[home.address]
    await here.targets.refresh()
    for count in range(1, 4):
        [answer] = await here.ask(target, confirmed(count))
        assert isinstance(answer, ev.Verified)
    assert len(home.calls) == 4
    assert not other.calls
    await here.ask(SessionTarget(here.targets), confirmed(0))
    assert len(other.calls) == 1, "a new session goes where a lease lives"


async def test_a_replica_that_falls_silent_in_mid_item_is_not_asked_next(here: Here) -> None:
    target = SessionTarget(here.targets)
    for fake in here.fakes:
        fake.gate.close()
        fake.gate.permit(1)
    await here.ask(target, confirmed(0), credit=8, until=1)
    home, other = here.home()
    other.gate.open()
    await here.ask(target, confirmed(1))
    assert (len(home.calls), len(other.calls)) == (1, 1)


async def test_a_session_stays_after_an_item_that_was_answered_whole(here: Here) -> None:
    target = SessionTarget(here.targets)
    answers = await here.ask(target, confirmed(0), credit=2)
    assert len(answers) == 3
    await here.ask(target, confirmed(3))
    assert sorted(here.asked()) == [0, 2]


@pytest.mark.parametrize("told", [True, False], ids=["told", "registered"])
async def test_a_replica_that_died_unnoticed_gets_no_new_sessions(here: Here, told: bool) -> None:
    """While no item was open, it is the look at who is there that finds out."""
    await here.ask(SessionTarget(here.targets), confirmed(0))
    home, other = here.home()
    await home.stop()
    if told:
        here.leases.told = dict.fromkeys(here.leases.told)
    else:  # it has come back, says the lease, but it cannot be met
        home.incarnations += 1
        await here.tell(home)
    await here.targets.refresh()
    [answer] = await here.ask(SessionTarget(here.targets), confirmed(0))
    assert isinstance(answer, ev.Verified)
    assert len(other.calls) == 1


async def test_a_session_comes_back_to_its_build_though_its_stream_broke(here: Here) -> None:
    """Rule 3: while a replica of its own fingerprint lives, it goes to no other."""
    target = SessionTarget(here.targets)
    await here.ask(target, confirmed(0))
    home, other = here.home()
    other.fingerprint = "build-2"
    await here.tell(other)
    other.incarnations += 1  # so that it is met again
    await here.tell(other)
    await here.targets.refresh()
    home.fail(grpc.StatusCode.INVALID_ARGUMENT, times=1)
    [failed] = await here.ask(target, confirmed(1))
    assert isinstance(failed, ev.Failed)
    [answer] = await here.ask(target, confirmed(1))
    assert isinstance(answer, ev.Verified)
    assert answer.fingerprint == "build-1"
    assert not other.calls


async def test_a_session_goes_to_another_build_if_its_own_is_dead(here: Here) -> None:
    target = SessionTarget(here.targets)
    await here.ask(target, confirmed(0))
    home, other = here.home()
    other.fingerprint = "build-2"
    other.incarnations += 1
    await here.tell(other)
    await here.targets.refresh()
    await home.stop()
    answers = [*await here.ask(target, confirmed(1)), *await here.ask(target, confirmed(1))]
    assert isinstance(answers[-1], ev.Verified)
    assert answers[-1].fingerprint == "build-2"


async def test_an_item_that_nobody_waits_for_is_not_counted_for_ever(here: Here) -> None:
    target = SessionTarget(here.targets)
    before = [member.items for member in here.targets._members.values()]
    item = target.verify(SPEC, here.request(confirmed(0)), None)
    await item.aclose()
    assert [member.items for member in here.targets._members.values()] == before
