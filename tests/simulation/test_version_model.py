"""Compare the versions of drafts in memory with the real scripts on a server: same calls, same answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry, draft_lease
from galley.common.registry.trials import DraftVersions
from galley.core.versions import state as versions
from galley.core.versions.counts import session_counts
from galley.core.versions.split import SplitBy
from galley.core.versions.state import Change, VersionState
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.versions import MemoryVersions

_RUNS = 12
_CALLS = 50
_NAMES = ("one", "two", "three")
_SPLITS: tuple[SplitBy, ...] = ("session", "tenant", "workload")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(VALKEY, "--appendfsync", "no") as server:
        yield server


async def test_random_changes_and_counts_match_the_scripts(server: Server) -> None:
    changed, added = set(), set()
    for seed in range(_RUNS):
        await server.command("FLUSHALL")
        rng, model = random.Random(seed), MemoryVersions()
        real = DraftVersions(server.url, call_timeout_s=20)
        states = [VersionState()]
        for number in range(_CALLS):
            if rng.random() < 0.5:
                changed.add(await _same_change(rng, states, model, real))
            else:
                added.add(await _same_counts(rng, states, model, real))
            state = await real.read()
            assert _timeless(state) == _timeless(await model.read()), (seed, number)
            assert await real.counts(["", *_NAMES]) == await model.counts(["", *_NAMES]), (seed, number)
            states.append(state)
        history = [replace(event, at_ms=0) for event in await real.history()]
        assert history == [replace(event, at_ms=0) for event in reversed(model.events)], seed
        await real.close()
    assert changed == added == {True, False}


async def test_the_same_decisions_are_forgotten(server: Server) -> None:
    rng, model = random.Random(1), MemoryVersions()
    model.registered = {"v1", "v2", "v40"}
    await server.command("FLUSHALL")
    real, registry = DraftVersions(server.url, call_timeout_s=20), ReplicaRegistry(server.url, lease_s=3600)
    for version in model.registered:
        info = pb.GetDraftInfoResponse(incarnation="i", version=version)
        await registry.publish(DRAFT_POOL, draft_lease(f"{version}:1", info))
    for number in range(versions.MAX_DECIDED + 20):
        before = await real.read()
        new, event = rng.choice([versions.promote, versions.drain, versions.drain])(before, f"v{number}")
        assert await real.change(before.epoch, new, event)
        assert await model.change(before.epoch, new, event)
        assert _timeless(await real.read()) == _timeless(await model.read()), number
    await registry.close()
    await real.close()
    assert versions.MAX_DECIDED < len(model.state.decided) <= versions.MAX_DECIDED + 3


async def _same_change(
    rng: random.Random, states: list[VersionState], model: MemoryVersions, real: DraftVersions
) -> bool:
    """Change the latest state, or one that was read earlier."""
    before = states[-1] if rng.random() < 0.7 else rng.choice(states)
    expected, (new, event) = _change(rng, before)
    result = await model.change(expected, new, event)
    assert await real.change(expected, new, event) == result, event
    return result


def _change(rng: random.Random, before: VersionState) -> tuple[int, Change]:
    """Return the expected epoch and a change that is allowed of the state `before`."""
    name, by = rng.choice(_NAMES), rng.choice(_SPLITS)
    trial = partial(versions.try_version, share=rng.choice([0.1, 0.123]), by=by, tokens=rng.randrange(1, 99))
    if before.epoch and rng.random() < 0.1:
        return 0, versions.restore(before, author="gateway")
    if rng.random() < 0.3 and before.split.canary:
        return before.epoch, versions.roll_back(before, reason='worse: "0.1"')
    if rng.random() < 0.5 and not before.split.canary and name != before.split.stable:
        return before.epoch, trial(before, name, author="ann")
    end = rng.choice([versions.promote, versions.drain])
    return before.epoch, end(before, name, author="rule", reason="it's\nbetter")


async def _same_counts(
    rng: random.Random, states: list[VersionState], model: MemoryVersions, real: DraftVersions
) -> bool:
    """Add counts to the latest trial, or to an earlier one."""
    name, trial = rng.choice(["", *_NAMES]), rng.choice([states[-1], rng.choice(states)]).trial
    # Whole ms, so that sums of squares are exact.
    ms = 1_000_000
    counts = session_counts(
        output_tokens=rng.randrange(1, 99),
        accepted=rng.randrange(9),
        proposals=rng.randrange(9),
        failures=rng.randrange(2),
        round_ns=ms * rng.randrange(1, 99),
        plain_ns=ms * rng.randrange(99),
        draft_compute_ns=ms * rng.randrange(99),
    )
    if rng.random() < 0.5:
        counts = counts.of_group(rng.choice([0, 15]))
    result = await model.add(name, counts, trial)
    assert await real.add(name, counts, trial) == result, (name, trial)
    return result


def _timeless(state: VersionState) -> VersionState:
    return replace(state, since_ms=0)
