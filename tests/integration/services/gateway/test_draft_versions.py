"""Gateways that split sessions between versions of drafts: whichever drafts, the tokens are the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from galley.client.options import Speculation
from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.registry.trials import DraftVersions
from galley.common.server.server import Parts
from galley.core import names
from galley.core.versions.split import Split
from galley.core.versions.state import VersionState
from services.gateway.versions import keeper
from services.gateway.versions.keeper import VersionKeeper
from tests.fakes.fleet import DraftFleet
from tests.fakes.readings import number
from tests.fakes.redis_servers import Server
from tests.fakes.spans import KeptSpans, attributes_of
from tests.fakes.waiting import PATIENCE_S, Watch
from tests.fakes.world import MAX_TOKENS, Gateway, Received, World, must_be_true, receive

FIXED = Speculation(k=4)


@dataclass
class Versions:
    """A world with two drafts, one of version `old` and one of `new`."""

    world: World
    fleet: DraftFleet
    store: DraftVersions
    pool: str
    turned: Watch = field(default_factory=Watch)
    turns: Counter[VersionKeeper] = field(default_factory=Counter)
    registries: list[Registry] = field(default_factory=list)

    async def gateway(self, **given: object) -> Gateway:
        self.registries.append(Registry(GATEWAY))
        parts = Parts(metrics=self.registries[-1])
        return await self.world.gateway_of(parts, draft="", pool=self.pool, **given)

    async def used(self, split: Split) -> None:
        """Wait until all gateways use a split."""
        await self.turned.until(lambda: all(it.state.split == split for it in self.turns))

    async def turn(self) -> None:
        """Wait until all gateways have followed the store once more, from the beginning."""
        due = {keeper: turns + 2 for keeper, turns in self.turns.items()}
        await self.turned.until(lambda: all(self.turns[it] >= turns for it, turns in due.items()))

    async def begin(self, share: float = 0.5, tokens: int = 1_000_000) -> VersionState:
        state = await self.store.try_version("new", share, tokens=tokens, author="ann")
        await self.used(state.split)
        return state

    def answers(
        self, *gateways: Gateway, number: int, max_tokens: int = MAX_TOKENS
    ) -> list[Coroutine[Any, Any, Received]]:
        """Return the reading of so many new sessions of each gateway."""
        return [
            receive(gateway.generate(speculation=FIXED, max_tokens=max_tokens))
            for gateway in gateways
            for _ in range(number)
        ]

    async def answer(self, *gateways: Gateway, number: int) -> None:
        """Have each gateway answer sessions, and check each token."""
        for received in await asyncio.gather(*self.answers(*gateways, number=number)):
            must_be_true(received)
            assert any(received.from_draft)

    async def counted(self) -> dict[str, int]:
        return {name: it.sessions for name, it in (await self.store.counts(["", "new"])).items()}

    def sessions(self) -> tuple[set[str], set[str]]:
        old, new = self.fleet.members
        return old.sessions, new.sessions


@pytest.fixture
async def versions(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Versions]:
    pool = f"versions-{world.id}"
    store = DraftVersions(world.redis_url, pool)
    async with DraftFleet(world) as fleet:
        for member, version in zip(fleet.members, ("old", "new"), strict=True):
            member.fake.version, member.pool_name = version, pool
        await fleet.register()
        made = Versions(world, fleet, store, pool)
        turn = VersionKeeper.turn

        async def noted(self: VersionKeeper) -> None:
            await turn(self)
            made.turns[self] += 1
            made.turned.changed()

        monkeypatch.setattr(VersionKeeper, "turn", noted)
        monkeypatch.setattr(keeper, "READ_S", 0.02)
        yield made
    await store.close()


async def test_without_a_split_any_version_serves(versions: Versions) -> None:
    gateway = await versions.gateway()
    await versions.answer(gateway, number=4)

    assert all(versions.sessions())
    assert await versions.counted() == {"": 0, "new": 0}


async def test_all_gateways_give_a_session_to_the_same_version(versions: Versions) -> None:
    gateways = [await versions.gateway() for _ in range(2)]
    state = await versions.begin()
    await versions.answer(*gateways, number=30)

    old, new = versions.sessions()
    assert old
    assert new
    assert all(state.split.is_canary(session_id, b"", "") for session_id in new)
    assert not any(state.split.is_canary(session_id, b"", "") for session_id in old)

    for gateway in gateways:
        await gateway.idle()
    await versions.turn()
    assert await versions.counted() == {"": len(old), "new": len(new)}
    assert number(versions.registries[0], catalogue.DRAFT_VERSION_SHARE, "new") == 0.5


async def test_a_session_counts_once_however_often_it_is_resumed(versions: Versions) -> None:
    gateways = [await versions.gateway() for _ in range(2)]
    await versions.begin()
    versions.world.target.gate.close()
    received, stream = Received(), gateways[0].generate(speculation=FIXED, max_tokens=120)
    for turn in range(1, 5):
        versions.world.target.gate.permit(1)
        await received.listen(stream, until=len(received.tokens) + 1)
        stream.cancel()
        await gateways[(turn - 1) % 2].idle()
        stream = gateways[turn % 2].client.resume_stream(stream)
    versions.world.target.gate.open()
    must_be_true(await received.listen(stream), 120)

    for gateway in gateways:
        await gateway.idle()
    await versions.turn()
    assert sum((await versions.counted()).values()) <= 1


async def test_a_trace_names_the_version_that_a_session_is_given(versions: Versions) -> None:
    kept = KeptSpans()
    gateway = await versions.world.gateway_of(kept.parts(), draft="", pool=versions.pool)
    state = await versions.begin()
    await versions.answer(gateway, number=6)

    requests = await kept.requests(6)
    for request in requests:
        [assigned] = kept.events(request, names.DRAFT_ASSIGNED)
        session_id = str(attributes_of(request)[names.SESSION_ID])
        is_canary = state.split.is_canary(session_id, b"", "")
        assert assigned == {names.DRAFT_VERSION: "new" if is_canary else "", names.IS_CANARY: is_canary}


async def test_a_bad_version_is_rolled_back(versions: Versions) -> None:
    _, new = versions.fleet.members
    new.fake.spoil_rate = 1.0
    gateway = await versions.gateway()
    await versions.begin()
    for received in await asyncio.gather(*versions.answers(gateway, number=40)):
        must_be_true(received)
    await versions.used(Split(drained=frozenset({"new"})))

    assert "worse" in (await versions.store.read()).decided["new"]
    assert number(versions.registries[0], catalogue.DRAFT_VERSION_DECISIONS, "rolled_back") == 1
    before = new.sessions
    await versions.answer(gateway, number=10)
    assert new.sessions == before


async def test_open_sessions_leave_a_version_that_is_rolled_back(versions: Versions) -> None:
    old, new = versions.fleet.members
    gateway = await versions.gateway()
    await versions.begin()
    versions.world.target.gate.close_after(20)  # no session can end by these
    answers = versions.answers(gateway, number=16, max_tokens=120)
    reading = [asyncio.create_task(answer) for answer in answers]
    await new.fake.called(1)
    await versions.world.target.gate.has_waiter()
    held = new.sessions
    await versions.store.roll_back(author="ann")
    await versions.used(Split(drained=frozenset({"new"})))
    new.fake.calls.clear()
    versions.world.target.gate.open()

    for received in await asyncio.gather(*reading):
        must_be_true(received, 120)
    assert held <= old.sessions
    late = Counter(call.slice.session_id for call in new.fake.calls)
    assert set(late.values()) <= {1}, "only what was under way"


async def test_a_better_version_is_promoted_by_one_of_many_gateways(versions: Versions) -> None:
    old, _ = versions.fleet.members
    old.fake.spoil_rate = 1.0
    gateways = [await versions.gateway() for _ in range(3)]
    await versions.begin(tokens=300)
    for received in await asyncio.gather(*versions.answers(*gateways, number=20)):
        must_be_true(received)
    await versions.used(Split(stable="new"))

    history = await versions.store.history()
    assert [event.kind for event in history] == ["promote", "try"]
    assert history[0].author == "rule"
    counted = [number(it, catalogue.DRAFT_VERSION_DECISIONS, "promoted") for it in versions.registries]
    assert sum(counted) == 1
    before = old.sessions
    await versions.answer(await versions.gateway(), number=3)
    assert old.sessions == before


async def test_sessions_of_a_canary_that_dies_go_on_at_another_version(versions: Versions) -> None:
    old, new = versions.fleet.members
    gateway = await versions.gateway()
    await versions.begin()
    await versions.answer(gateway, number=16)
    assert new.fake.calls
    await new.fake.stop()
    before = old.sessions
    await versions.answer(gateway, number=8)

    assert len(old.sessions - before) == 8


async def test_a_setting_begins_a_trial_once(versions: Versions) -> None:
    for _ in range(2):
        await versions.gateway(draft_split="new=0.25")
    await versions.used(Split(canary="new", share=0.25))
    await versions.store.drain("new")
    await versions.used(Split(drained=frozenset({"new"})))
    await versions.gateway(draft_split="new=0.25")
    await versions.used(Split(drained=frozenset({"new"})))

    assert [event.kind for event in await versions.store.history()] == ["drain", "try"]


async def test_a_redis_that_loses_its_data_gets_the_versions_back(
    versions: Versions, shared_store: Server
) -> None:
    await versions.gateway()
    await versions.store.drain("new")
    await versions.used(Split(drained=frozenset({"new"})))
    before = await versions.store.read()
    key = f"galley:drafts:{{{versions.pool}}}"
    await shared_store.command("DEL", key, f"{key}:history")
    async with asyncio.timeout(PATIENCE_S):
        while (after := await versions.store.read()).epoch != before.epoch:
            pass

    assert replace(after, since_ms=before.since_ms) == before
    assert [event.kind for event in await versions.store.history()] == ["restore"]
