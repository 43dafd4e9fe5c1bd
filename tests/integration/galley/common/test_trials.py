"""The versions of drafts in Redis, on a real Valkey and a cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry, draft_lease
from galley.common.registry.trials import MAX_HISTORY, DraftVersions
from galley.core.errors import Broken, StoreUnavailable
from galley.core.versions import state as versions
from galley.core.versions.counts import VersionCounts, session_counts
from galley.core.versions.split import Split
from galley.core.versions.state import VersionState
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.link import Link
from tests.fakes.redis_clusters import Cluster
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.relay import Relay
from tests.fakes.waiting import PATIENCE_S

COUNTS = session_counts(
    output_tokens=100,
    accepted=41,
    proposals=30,
    failures=2,
    round_ns=5_123_456_789,
    plain_ns=7_000_000_001,
    draft_compute_ns=987_654,
).of_group(3)


@pytest.fixture
async def drafts(server: Server | Cluster) -> AsyncIterator[DraftVersions]:
    drafts = DraftVersions(server.url, call_timeout_s=5)
    yield drafts
    await drafts.close()


async def test_without_a_state_there_is_no_split(drafts: DraftVersions) -> None:
    assert await drafts.read() == VersionState()
    assert await drafts.history() == []
    assert await drafts.counts() == {"": VersionCounts()}


async def test_a_state_is_read_as_it_was_written(drafts: DraftVersions) -> None:
    await drafts.promote("old", author="ann")
    await drafts.drain("bad", reason="wrong, and 'odd'\n")
    written = await drafts.try_version("new", 0.123, by="tenant", tokens=77, author="bo", digest="12ab")

    state = await drafts.read()
    assert state.since_ms > 1_700_000_000_000
    assert state == replace(written, since_ms=state.since_ms)
    assert state.split == Split("old", "new", 0.123, "tenant", frozenset({"bad"}))
    assert state.decided == {"old": "promoted", "bad": "wrong, and 'odd'\n"}


async def test_the_drain_of_a_version_that_is_registered_is_not_forgotten(
    drafts: DraftVersions, server: Server | Cluster
) -> None:
    registry = ReplicaRegistry(server.url, lease_s=3600, call_timeout_s=5)
    info = pb.GetDraftInfoResponse(incarnation="i", version="v1")
    await registry.publish(DRAFT_POOL, draft_lease("a:1", info))
    await registry.close()
    for number in range(versions.MAX_DECIDED + 3):
        await drafts.drain(f"v{number}")

    state = await drafts.read()
    assert list(state.decided) == ["v1", *(f"v{number}" for number in range(3, versions.MAX_DECIDED + 3))]
    assert state.split.drained == state.decided.keys()


async def test_other_changes_leave_the_time_at_which_the_trial_began(drafts: DraftVersions) -> None:
    await drafts.try_version("new", 0.1)
    began_ms = (await drafts.read()).since_ms
    await drafts.drain("bad")
    while (await drafts.history())[0].at_ms == began_ms:
        await drafts.drain("bad")
    assert (await drafts.read()).since_ms == began_ms
    await drafts.roll_back()
    await drafts.try_version("newer", 0.1)
    assert (await drafts.read()).since_ms == (await drafts.history())[0].at_ms > began_ms


async def test_of_two_that_change_a_state_one_wins(drafts: DraftVersions, server: Server | Cluster) -> None:
    other = DraftVersions(server.url, call_timeout_s=5)
    await drafts.try_version("new", 0.1)
    state = await drafts.read()
    changes = [versions.promote(state, "new"), versions.roll_back(state)]
    results = await asyncio.gather(
        *(by.change(state.epoch, *change) for by, change in zip((drafts, other), changes, strict=True))
    )
    await other.close()

    assert sorted(results) == [False, True]
    assert (await drafts.read()).epoch == state.epoch + 1
    assert len(await drafts.history()) == 2


async def test_people_who_change_at_once_all_succeed(drafts: DraftVersions) -> None:
    await asyncio.gather(*(drafts.drain(f"v{number}") for number in range(5)))

    assert (await drafts.read()).split.drained == {f"v{number}" for number in range(5)}
    assert [event.epoch for event in await drafts.history()] == [5, 4, 3, 2, 1]


async def test_the_history_says_who_changed_what_and_why(drafts: DraftVersions) -> None:
    await drafts.try_version("new", 0.1, author="ann", reason="trained on sql")
    await drafts.roll_back(author="rule", reason='worse: gain "0.1"')

    rolled_back, tried = await drafts.history()
    assert (tried.kind, tried.version, tried.share, tried.author) == ("try", "new", 0.1, "ann")
    assert (rolled_back.kind, rolled_back.author, rolled_back.reason) == (
        "roll_back",
        "rule",
        'worse: gain "0.1"',
    )
    assert rolled_back.at_ms >= tried.at_ms > 1_700_000_000_000


async def test_the_history_is_bounded(drafts: DraftVersions) -> None:
    for number in range(MAX_HISTORY + 3):
        await drafts.drain(f"v{number % 3}")

    events = await drafts.history()
    assert len(events) == MAX_HISTORY
    assert events[0].epoch == MAX_HISTORY + 3


async def test_counts_add_up_exactly(drafts: DraftVersions) -> None:
    trial = (await drafts.try_version("new", 0.1)).trial
    for _ in range(3):
        assert await drafts.add("new", COUNTS, trial)
    assert await drafts.add("", COUNTS + COUNTS, trial)
    other = session_counts(output_tokens=7, accepted=0).of_group(15)
    assert await drafts.add("", other, trial)

    counts = await drafts.counts()
    assert counts["new"].gain.value == pytest.approx(0.41)
    assert counts["new"].sessions == 3
    assert counts["new"].round_ns == 3 * 5_123_456_789
    assert counts["new"].round_sq == pytest.approx(3 * 5_123.456789**2)
    assert counts[""].output_tokens == 207
    assert counts[""].groups == {3: (COUNTS + COUNTS).groups[3], 15: other.groups[15]}
    assert await drafts.counts(["new"]) == {"new": counts["new"]}


async def test_a_new_trial_begins_with_no_counts_and_takes_none_of_an_earlier_one(
    drafts: DraftVersions,
) -> None:
    await drafts.promote("old")
    first = (await drafts.try_version("new", 0.1)).trial
    for name in ("old", "new"):
        await drafts.add(name, COUNTS, first)
    await drafts.roll_back()
    assert await drafts.add("new", COUNTS, first)  # of sessions that end after it
    assert (await drafts.counts())["new"].sessions == 2

    second = (await drafts.try_version("new", 0.2)).trial
    assert set((await drafts.counts()).values()) == {VersionCounts()}
    assert not await drafts.add("new", COUNTS, first)
    assert await drafts.add("new", COUNTS, second)
    assert (await drafts.counts())["new"] == COUNTS


async def test_a_drain_of_the_stable_version_does_not_bring_back_the_counts_of_an_earlier_trial(
    drafts: DraftVersions,
) -> None:
    first = (await drafts.try_version("one", 0.1)).trial
    assert await drafts.add("", COUNTS, first)
    await drafts.promote("one")
    await drafts.try_version("two", 0.1)
    state = await drafts.drain("one")

    assert (state.split.stable, state.split.canary) == ("", "two")
    assert (await drafts.counts([""])) == {"": VersionCounts()}


async def test_pools_do_not_see_one_another(drafts: DraftVersions, server: Server | Cluster) -> None:
    other = DraftVersions(server.url, "other", call_timeout_s=5)
    await drafts.drain("bad")

    assert await other.read() == VersionState()
    await other.close()


UNREADABLE = [
    ("by", "moon"),
    ("share", "moon"),
    ("share", "nan"),
    ("share", "5"),
    ("canary", "the moon"),
    ("decided", '["the moon"]'),
]


@pytest.mark.parametrize(("name", "value"), UNREADABLE)
async def test_a_state_that_cannot_be_read_says_so(
    drafts: DraftVersions, server: Server | Cluster, name: str, value: str
) -> None:
    await drafts.drain("bad")
    await server.command("HSET", "galley:drafts:{default}", name, value)

    with pytest.raises(Broken, match=f"cannot be read: .*{re.escape(value)}"):
        await drafts.read()


@pytest.mark.parametrize(("name", "value"), [("sessions", "many"), ("round_sq", "moon"), ("sessions@a", "2")])
async def test_counts_that_cannot_be_read_say_so(
    drafts: DraftVersions, server: Server | Cluster, name: str, value: str
) -> None:
    trial = (await drafts.try_version("new", 0.1)).trial
    await drafts.add("new", COUNTS, trial)
    await server.command("HSET", "galley:drafts:{default}:counts:new", name, value)

    with pytest.raises(Broken, match="counts of a draft's version cannot be read"):
        await drafts.counts(["new"])


async def test_a_redis_that_is_away_is_said_so() -> None:
    with running(VALKEY) as server:
        drafts = DraftVersions(server.url, call_timeout_s=5)
        await drafts.drain("bad")
        server.kill()
        for call in (drafts.read, drafts.history, drafts.counts):
            with pytest.raises(StoreUnavailable):
                await call()
        server.start()
        assert (await drafts.read()).split.drained == {"bad"}
        await drafts.close()


LONG_REQUEST = 350
"""Bytes that only a change takes."""


class ChangesHeld(Link):
    """A link that holds changes on their way to the server while `holds`."""

    holds = False

    def sending_s(self, size: int) -> float:
        if self.holds and size > LONG_REQUEST:
            self.cut(responses=False)
        return super().sending_s(size)


async def scripts_run(server: Server) -> int:
    stats = await server.command("INFO", "commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


async def test_a_change_that_arrives_after_its_caller_gave_up_does_nothing() -> None:
    link = ChangesHeld()
    with running(VALKEY) as server:
        async with Relay(server.url.removeprefix("unix://"), link) as relay:
            drafts = DraftVersions(f"redis://{relay.address}", call_timeout_s=1)
            before = await drafts.try_version("new", 0.1)
            run_before = await scripts_run(server)

            link.holds = True
            with pytest.raises(StoreUnavailable):
                await drafts.promote("new")
            link.holds = False
            link.mend()
            async with asyncio.timeout(PATIENCE_S):
                while await scripts_run(server) == run_before:
                    pass

            state = await drafts.read()
            assert (state.epoch, state.split) == (before.epoch, before.split)
            await drafts.promote("new")
            await drafts.close()
