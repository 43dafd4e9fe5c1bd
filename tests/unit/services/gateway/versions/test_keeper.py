"""What a gateway does with the versions of drafts: follow the split, count sessions, decide once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.core.errors import StoreUnavailable
from galley.core.names import GRAMMAR, LOOKUP
from galley.core.session.events import RoundEnded, SourceTokens, Timing, Verified
from galley.core.session.round import SpeculationStats
from galley.core.versions import state as versions
from galley.core.versions.counts import VersionCounts, session_counts
from galley.core.versions.split import Split, group_of
from galley.core.versions.state import VersionEvent, VersionState
from services.gateway.clock import MonotonicClock
from services.gateway.replicas.draft_session import DraftSession
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.membership import StaticAddresses
from services.gateway.session.tally import SessionTally
from services.gateway.telemetry.component_metrics import VersionMetrics
from services.gateway.versions.keeper import EMPTY_READS, VersionKeeper
from tests.fakes.readings import number, total
from tests.fakes.session_ports import SPEC
from tests.fakes.versions import MemoryVersions
from tests.unit.galley.core.versions.sessions import sessions

SHARE = 0.3


class ServedDrafts(DraftPool):
    """A pool that has a draft of each version of `served`, without a replica."""

    def __init__(self) -> None:
        clock = MonotonicClock()
        super().__init__(StaticAddresses([]), "tokenizer", lambda _: pytest.fail("no channel"), clock, 1)
        self.served = {"new", "old"}

    def serves(self, version: str) -> bool:
        return version in self.served


@pytest.fixture
def store() -> MemoryVersions:
    return MemoryVersions()


@pytest.fixture
def drafts() -> ServedDrafts:
    return ServedDrafts()


@pytest.fixture
def keeper(store: MemoryVersions, drafts: ServedDrafts) -> VersionKeeper:
    return VersionKeeper(store, drafts)


async def _begin(store: MemoryVersions, *keepers: VersionKeeper, tokens: int = 1000) -> None:
    state = store.state
    assert await store.change(
        state.epoch, *versions.try_version(state, "new", SHARE, tokens=tokens, author="ann")
    )
    for keeper in keepers:
        await keeper.turn()


def _round(
    *, accepted: int = 3, local: int = 0, own: str = GRAMMAR, reads_prompt: bool = False
) -> RoundEnded:
    verdict = Verified(1, 0, (), accepted, accepted, 0, "build", timing=Timing(0, 4_000_000))
    sources = (SourceTokens("model", 4, 4, accepted - local), SourceTokens(own, local, local, local))
    return RoundEnded(
        verdict,
        0,
        10_000_000,
        4,
        accepted,
        accepted + 1,
        0,
        0,
        0,
        0,
        Timing(0, 500_000),
        reads_prompt=reads_prompt,
        sources=sources,
    )


def _sessions(keeper: VersionKeeper, drafts: DraftPool, number: int, salt: bytes = b"") -> list[bool]:
    """Run sessions of one round; return which of them were given to the canary."""
    given = []
    for index in range(number):
        spec = replace(SPEC, session_id=f"session-{index}", k=4, tenant_salt=salt)
        tally = keeper.tally(spec, DraftSession(drafts), begins=True)
        if tally is not None:
            tally.add(_round())
            tally.stop(SpeculationStats())
        given.append(drafts.is_canary(spec))
    return given


async def test_without_a_trial_nothing_is_counted(
    keeper: VersionKeeper, store: MemoryVersions, drafts: ServedDrafts
) -> None:
    await keeper.turn()
    assert not any(_sessions(keeper, drafts, 10))
    await keeper.turn()

    assert dict(store.calls) == {"read": 2}
    assert drafts.placement == 0


async def test_a_session_counts_for_the_version_that_it_is_given(
    keeper: VersionKeeper, store: MemoryVersions, drafts: ServedDrafts
) -> None:
    await _begin(store, keeper)
    given = _sessions(keeper, drafts, 400)
    await keeper.turn()

    assert store.sums["new"].sessions == sum(given)
    assert store.sums[""].sessions == 400 - sum(given)
    assert sum(given) / 400 == pytest.approx(SHARE, abs=4 * (0.21 / 400) ** 0.5)


async def test_a_session_counts_in_the_group_of_its_principal(
    keeper: VersionKeeper, store: MemoryVersions, drafts: ServedDrafts
) -> None:
    salts = [bytes([first]) * 16 for first in range(5)]
    counted: Counter[int] = Counter()
    await _begin(store, keeper)
    for count, salt in enumerate(salts, 1):
        _sessions(keeper, drafts, count, salt)
        counted[group_of(salt)] += count
    await keeper.turn()

    both = store.sums[""] + store.sums["new"]
    assert {group: its.sessions for group, its in both.groups.items()} == counted


async def test_a_session_that_requests_no_drafts_does_not_count(
    keeper: VersionKeeper, store: MemoryVersions, drafts: ServedDrafts
) -> None:
    await _begin(store, keeper)

    assert keeper.tally(replace(SPEC, k=0), DraftSession(drafts), begins=True) is None
    assert keeper.tally(replace(SPEC, k=1), DraftSession(drafts), begins=True) is not None


async def test_the_counts_of_a_session_are_those_of_its_rounds() -> None:
    reported: list[VersionCounts] = []
    draft = DraftSession(ServedDrafts())
    tally = SessionTally(draft, b"salt", reported.append)
    draft.failures = 2
    tally.add(_round(accepted=1, reads_prompt=True))
    tally.add(_round(accepted=3, local=2))
    tally.add(_round(accepted=3, local=3, own=LOOKUP))
    tally.stop(SpeculationStats(proposals=5))

    [counts] = reported
    assert counts == session_counts(
        output_tokens=10,
        accepted=2,
        proposals=5,
        failures=2,
        round_ns=20_000_000,
        plain_ns=counts.plain_ns,
        draft_compute_ns=1_500_000,
    ).of_group(group_of(b"salt"))
    assert counts.plain_ns > counts.round_ns


async def test_a_session_without_a_round_counts_for_nothing() -> None:
    SessionTally(DraftSession(ServedDrafts()), b"", lambda _: pytest.fail("counted")).stop(SpeculationStats())


async def test_no_session_counts_while_no_draft_of_the_canary_is_there(
    keeper: VersionKeeper, store: MemoryVersions, drafts: ServedDrafts
) -> None:
    await _begin(store, keeper)
    drafts.served.clear()
    assert any(_sessions(keeper, drafts, 20))
    await keeper.turn()
    assert not store.sums

    drafts.served.add("new")
    _sessions(keeper, drafts, 20)
    await keeper.turn()
    assert sum(counts.sessions for counts in store.sums.values()) == 20


@pytest.mark.parametrize("away", ["read", "add"])
async def test_counts_wait_for_a_store_that_is_away(
    away: str, keeper: VersionKeeper, store: MemoryVersions, drafts: ServedDrafts
) -> None:
    await _begin(store, keeper)
    split = store.state.split
    store.away = (away,)
    with capture_logs() as logs:
        for _ in range(3):
            _sessions(keeper, drafts, 10)
            await keeper.turn()
    assert [line["event"] for line in logs] == ["versions of drafts unavailable; the split stays"]
    assert keeper.state.split == split

    store.away = ()
    await keeper.turn()
    assert sum(counts.sessions for counts in store.sums.values()) == 30


async def test_a_state_that_the_store_has_lost_is_given_back(store: MemoryVersions) -> None:
    """Otherwise versions that were rolled back would get sessions again."""
    keepers = [VersionKeeper(store, ServedDrafts()) for _ in range(3)]
    await store.change(0, *versions.drain(store.state, "bad", reason="worse"))
    await _begin(store, *keepers)
    before = store.state
    store.state, store.events = VersionState(), []
    with capture_logs() as logs:
        await asyncio.gather(*(keeper.turn() for keeper in keepers))
        for keeper in keepers:
            await keeper.turn()

    assert store.state == before
    assert [(event.kind, event.author) for event in store.events] == [("restore", "gateway")]
    assert [line["event"] for line in logs] == ["versions of drafts restored; the store had lost them"]
    assert all(keeper.state == before for keeper in keepers)


async def test_a_state_that_is_older_is_taken_over(keeper: VersionKeeper, store: MemoryVersions) -> None:
    """Somebody may have begun anew in a store that had lost all."""
    await store.change(0, *versions.drain(store.state, "bad"))
    await _begin(store, keeper)
    store.state = VersionState()
    await store.change(0, *versions.promote(store.state, "other", author="ann"))
    with capture_logs() as logs:
        await keeper.turn()
        await keeper.turn()

    assert keeper.state == store.state
    assert [(event.kind, event.version) for event in store.events[2:]] == [("promote", "other")]
    assert [line for line in logs if line["log_level"] == "warning"] == [
        {"event": "versions of drafts are older", "log_level": "warning", "epoch": 1, "known_epoch": 2}
    ]


async def test_counts_that_wait_for_an_earlier_trial_are_dropped(
    keeper: VersionKeeper, store: MemoryVersions, drafts: ServedDrafts
) -> None:
    await _begin(store, keeper)
    _sessions(keeper, drafts, 30)
    await _begin(store, keeper)

    assert not store.sums


async def test_the_last_counts_are_given_at_the_end(
    keeper: VersionKeeper, store: MemoryVersions, drafts: ServedDrafts
) -> None:
    await _begin(store)
    await keeper.start()
    _sessions(keeper, drafts, 10)
    await keeper.close()

    assert sum(counts.sessions for counts in store.sums.values()) == 10


@pytest.mark.parametrize(
    ("gain", "kind", "split", "counted"),
    [
        (0.8, "promote", Split(stable="new"), "promoted"),
        (0.1, "roll_back", Split(drained=frozenset({"new"})), "rolled_back"),
    ],
)
async def test_one_of_many_gateways_decides(
    store: MemoryVersions, gain: float, kind: str, split: Split, counted: str
) -> None:
    registries = [Registry(GATEWAY) for _ in range(5)]
    keepers = [
        VersionKeeper(store, ServedDrafts(), metrics=VersionMetrics(registry)) for registry in registries
    ]
    await _begin(store, *keepers)
    chance = random.Random(3)
    store.sums = {"": sessions(chance, 200), "new": sessions(chance, 50, gain=gain)}
    with capture_logs() as logs:
        await asyncio.gather(*(keeper.turn() for keeper in keepers))
        for keeper in keepers:
            await keeper.turn()

    assert [event.kind for event in store.events] == ["try", kind]
    assert all(keeper.state.split == split for keeper in keepers)
    assert store.events[-1].author == "rule"
    assert "gain" in store.events[-1].reason
    decisions = [line for line in logs if line["event"].startswith("draft ")]
    assert [line["event"] for line in decisions] == ["draft " + counted.replace("_", " ")]
    assert decisions[0]["reason"] == store.events[-1].reason
    assert sum(number(registry, catalogue.DRAFT_VERSION_DECISIONS, counted) for registry in registries) == 1


class LostReply(MemoryVersions):
    """The reply to the first change with `loses` is lost."""

    loses = False

    async def change(self, expected_epoch: int, new: VersionState, event: VersionEvent) -> bool:
        changed = await super().change(expected_epoch, new, event)
        if self.loses:
            self.loses = False
            raise StoreUnavailable("the reply is lost")
        return changed


@pytest.mark.parametrize(("gain", "counted"), [(0.9, "promoted"), (0.1, "rolled_back"), (0.5, "no_gain")])
@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_decision_whose_reply_was_lost_is_counted_once(
    gain: float, counted: str, goes_on: bool
) -> None:
    """With `goes_on`, another trial has begun before the gateway reads the state again."""
    store, registry = LostReply(), Registry(GATEWAY)
    keeper = VersionKeeper(store, ServedDrafts(), metrics=VersionMetrics(registry))
    await _begin(store, keeper)
    chance = random.Random(3)
    store.sums = {"": sessions(chance, 200), "new": sessions(chance, 200, gain=gain)}
    store.loses = True
    with capture_logs() as logs:
        await keeper.turn()
        if goes_on:
            await store.change(store.state.epoch, *versions.try_version(store.state, "newer", SHARE))
        for _ in range(2):
            await keeper.turn()

    assert number(registry, catalogue.DRAFT_VERSION_DECISIONS, counted) == 1
    assert total(registry, catalogue.DRAFT_VERSION_DECISIONS) == 1
    event = "draft promoted" if counted == "promoted" else "draft rolled back"
    assert [line["event"] for line in logs if line["event"].startswith("draft ")] == [event]


async def test_a_decision_that_did_not_reach_the_store_is_made_again(store: MemoryVersions) -> None:
    registry = Registry(GATEWAY)
    keeper = VersionKeeper(store, ServedDrafts(), metrics=VersionMetrics(registry))
    await _begin(store, keeper)
    chance = random.Random(3)
    store.sums = {"": sessions(chance, 200), "new": sessions(chance, 200, gain=0.1)}
    store.away = ("change",)
    await keeper.turn()
    assert total(registry, catalogue.DRAFT_VERSION_DECISIONS) == 0

    store.away = ()
    for _ in range(2):
        await keeper.turn()
    assert number(registry, catalogue.DRAFT_VERSION_DECISIONS, "rolled_back") == 1


class OneOfTwo(MemoryVersions):
    """Two gateways change the same state at once, and the store gets only the first change."""

    def __init__(self) -> None:
        super().__init__()
        self.both: asyncio.Barrier | None = None

    async def change(self, expected_epoch: int, new: VersionState, event: VersionEvent) -> bool:
        if self.both is not None and await self.both.wait():
            raise StoreUnavailable("a call reached it too late")
        return await super().change(expected_epoch, new, event)


@pytest.mark.parametrize(("gain", "counted"), [(0.9, "promoted"), (0.1, "rolled_back"), (0.5, "no_gain")])
async def test_a_decision_that_another_gateway_made_is_not_counted(gain: float, counted: str) -> None:
    """Both have the same reason for it."""
    store, registries = OneOfTwo(), [Registry(GATEWAY) for _ in "12"]
    keepers = [VersionKeeper(store, ServedDrafts(), metrics=VersionMetrics(each)) for each in registries]
    await _begin(store, *keepers)
    chance = random.Random(3)
    store.sums = {"": sessions(chance, 200), "new": sessions(chance, 200, gain=gain)}
    store.both = asyncio.Barrier(2)
    with capture_logs() as logs:
        for _ in "12":
            await asyncio.gather(*(keeper.turn() for keeper in keepers))

    assert sum(number(registry, catalogue.DRAFT_VERSION_DECISIONS, counted) for registry in registries) == 1
    assert len([line for line in logs if line["event"].startswith("draft ")]) == 1
    assert store.calls["history"] == 1


async def test_a_trial_that_another_gateway_began_is_not_logged() -> None:
    store = OneOfTwo()
    store.both = asyncio.Barrier(2)
    with capture_logs() as logs:
        await _trying(store, ("new", SHARE), 2)

    assert [event.kind for event in store.events] == ["try"]
    assert len([line for line in logs if line["event"] == "trial of a draft began"]) == 1


class DrainedMeanwhile(MemoryVersions):
    """A person drains the canary between a keeper's look and its change."""

    async def counts(self, of: Collection[str]) -> dict[str, VersionCounts]:
        if self.sums:
            await self.change(self.state.epoch, *versions.drain(self.state, "new", author="ann"))
        return await super().counts(of)


async def test_a_decision_loses_against_a_change_by_people() -> None:
    store = DrainedMeanwhile()
    keeper = VersionKeeper(store, ServedDrafts())
    await _begin(store, keeper)
    chance = random.Random(3)
    store.sums = {"": sessions(chance, 200), "new": sessions(chance, 50, gain=0.9)}
    await keeper.turn()
    await keeper.turn()

    assert store.refused == 1
    assert [event.kind for event in store.events] == ["try", "drain"]
    assert keeper.state.split == Split(drained=frozenset({"new"}))


async def _trying(store: MemoryVersions, setting: tuple[str, float], number: int = 1) -> list[VersionKeeper]:
    """Return gateways that have followed the store long enough to begin the trial of their setting."""
    keepers = [VersionKeeper(store, ServedDrafts(), setting) for _ in range(number)]
    for _ in range(EMPTY_READS + 2):
        await asyncio.gather(*(keeper.turn() for keeper in keepers))
    return keepers


async def test_a_setting_begins_one_trial(store: MemoryVersions) -> None:
    keepers = await _trying(store, ("new", 0.05), 3)

    assert [(event.kind, event.version, event.author) for event in store.events] == [
        ("try", "new", "draft_split")
    ]
    assert all(keeper.state.split == Split(canary="new", share=0.05) for keeper in keepers)


async def test_a_setting_begins_no_trial_before_a_lost_state_could_be_given_back(
    store: MemoryVersions,
) -> None:
    """It would be the later state, by which the decisions of the earlier one are lost."""
    running = VersionKeeper(store, ServedDrafts())
    await store.change(0, *versions.drain(store.state, "bad", reason="worse"))
    await running.turn()
    store.state, store.events = VersionState(), []
    starting = VersionKeeper(store, ServedDrafts(), ("new", 0.05))
    for _ in range(2):
        await starting.turn()
    await running.turn()
    for _ in range(2):
        await starting.turn()

    assert [event.kind for event in store.events] == ["restore", "try"]
    assert store.state.split == Split(canary="new", share=0.05, drained=frozenset({"bad"}))


async def test_a_setting_begins_no_trial_of_a_version_that_was_decided(store: MemoryVersions) -> None:
    await store.change(0, *versions.drain(store.state, "new"))
    keeper = VersionKeeper(store, ServedDrafts(), ("new", 0.05))
    for _ in range(2):
        await keeper.turn()

    assert [event.kind for event in store.events] == ["drain"]


async def test_a_setting_waits_for_the_end_of_a_trial_that_another_began(store: MemoryVersions) -> None:
    await _begin(store)
    keeper = VersionKeeper(store, ServedDrafts(), ("newer", 0.2))
    for _ in range(3):
        await keeper.turn()
    assert [event.version for event in store.events] == ["new"]

    await store.change(store.state.epoch, *versions.roll_back(store.state))
    for _ in range(2):
        await keeper.turn()
    assert [(event.kind, event.version) for event in store.events] == [
        ("try", "new"),
        ("roll_back", "new"),
        ("try", "newer"),
    ]


async def test_a_setting_replaces_the_trial_of_an_earlier_one(store: MemoryVersions) -> None:
    """In a roll-out, gateways of both settings run, and those of the earlier one may start again."""
    earlier = await _trying(store, ("new", 0.05), 2)
    later = [VersionKeeper(store, ServedDrafts(), ("newer", 0.2)) for _ in range(2)]
    await asyncio.gather(*(keeper.turn() for keeper in later))
    restarted = VersionKeeper(store, ServedDrafts(), ("new", 0.05))
    for _ in range(3):
        for keeper in (restarted, *earlier, *later):
            await keeper.turn()

    assert [(event.kind, event.version, event.reason) for event in store.events] == [
        ("try", "new", ""),
        ("try", "newer", "in place of new"),
    ]
    assert store.state.split == Split(canary="newer", share=0.2, drained=frozenset({"new"}))
    assert store.state.decided == {"new": "replaced by newer"}


async def test_a_setting_replaces_no_trial_that_began_after_the_gateway(store: MemoryVersions) -> None:
    """An earlier setting that has waited must not end the trial of a later one."""
    await _begin(store)
    earlier = VersionKeeper(store, ServedDrafts(), ("one", 0.05))
    await earlier.turn()
    later = VersionKeeper(store, ServedDrafts(), ("two", 0.05))
    await later.turn()
    await store.change(store.state.epoch, *versions.roll_back(store.state))
    for keeper in (later, earlier, later, earlier):
        await keeper.turn()

    assert [event.version for event in store.events] == ["new", "new", "two"]


async def test_a_setting_replaces_no_trial_that_was_begun_anew_by_hand(store: MemoryVersions) -> None:
    await _trying(store, ("new", 0.05))
    await _begin(store)
    keeper = VersionKeeper(store, ServedDrafts(), ("newer", 0.2))
    for _ in range(2):
        await keeper.turn()

    assert [(event.version, event.author) for event in store.events] == [
        ("new", "draft_split"),
        ("new", "ann"),
    ]


async def test_a_setting_that_was_decided_replaces_nothing(store: MemoryVersions) -> None:
    await store.change(0, *versions.drain(store.state, "newer"))
    await VersionKeeper(store, ServedDrafts(), ("new", 0.05)).turn()
    await VersionKeeper(store, ServedDrafts(), ("newer", 0.2)).turn()

    assert store.state.split.canary == "new"
