"""Cycles of learning over a real store: what is trained, offered, recorded, replayed and left behind."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import typer
from safetensors import SafetensorError
from structlog.testing import capture_logs
from typer.testing import CliRunner

from galley.cli.distill import distill
from galley.common.draft_loading import draft_version
from galley.common.models.files import DEFAULT_MODEL
from galley.core.errors import InvalidField, StoreUnavailable
from galley.core.versions.state import NOT_TRIED
from galley.distill.data.corpus import Conversation, corpus_of, write_corpus
from galley.distill.export import read_draft, write_draft
from galley.distill.follow.canaries import LONGEST_TRIAL_S
from galley.distill.follow.journal import RECORD, Journal, locked
from galley.distill.follow.options import FollowOptions
from galley.distill.follow.run import Stopped
from galley.distill.training.evaluation import agreement
from galley.distill.training.models import read_target
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.stored import stored, written
from tests.fakes.tiny_model import VOCAB
from tests.integration.galley.distill.deployment import (
    ALICE,
    BOB,
    POOL,
    Deployment,
    deployment,
    workload,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(VALKEY) as server:
        yield server


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """Return a draft that knows nothing of the workloads, and half of the vocabulary."""
    folder = tmp_path_factory.mktemp("start")
    target, heads = read_target(target_dir), np.arange(0, VOCAB, 2)
    write_draft(folder, target.student(1, torch.from_numpy(heads)), target, heads, target_dir)
    return folder


@pytest.fixture
def options(tmp_path: Path, target_dir: Path, start: Path) -> FollowOptions:
    return FollowOptions(
        work=tmp_path / "work",
        target=target_dir,
        start=start,
        cycle_tokens=8_000,
        new_tokens=1_000,
        batch=256,
        rate=0.02,
        dtype="float32",
        share=0.2,
        trial_tokens=500,
    )


@pytest.fixture
async def deployed(server: Server, options: FollowOptions, tmp_path: Path) -> AsyncIterator[Deployment]:
    await server.command("FLUSHALL")
    version = draft_version(options.start)
    async with deployment(server, options, [version, version], tmp_path) as deployed:
        yield deployed


def last(deployed: Deployment) -> dict[str, Any]:
    return cast("dict[str, Any]", deployed.cycles()[-1])


async def reasons_of_a_cycle(deployed: Deployment) -> str:
    """Run a cycle; return the reasons in its log, a line each."""
    with capture_logs() as logs:
        await deployed.cycle()
    return "\n".join(line.get("reason", "") for line in logs)


def acceptance(folder: Path, target_dir: Path, step: int = 5) -> float:
    target = read_target(target_dir)
    sessions = workload("test", 40, step=step, seed=99)
    corpus = corpus_of([Conversation(one.tokens, one.prompt_len, "a", 0.0) for one in sessions])
    draft, heads = read_draft(folder, target, "start")
    return float(agreement(corpus, draft, heads, torch.float32).mean())


async def test_acceptance_on_an_unseen_workload_rises_and_the_draft_becomes_a_canary(
    deployed: Deployment, options: FollowOptions, target_dir: Path
) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    cycle = last(deployed)
    assert cycle["decision"] == "offered", cycle["reason"]
    assert cycle["acceptance"]["all"]["difference"] > 0.15
    loaded = next(draft for draft in deployed.drafts if draft.loads)
    assert loaded.loads == [cycle["version"]] == [draft_version(loaded.directory)]
    assert acceptance(loaded.directory, target_dir) > acceptance(options.start, target_dir) + 0.15
    state = await deployed.versions.read()
    assert (state.split.canary, state.split.share, state.tokens) == (cycle["version"], 0.2, 500)
    assert cycle["version"] not in state.split.drained
    assert cycle["seed"] == options.seed + 1
    [try_event, drain_event] = await deployed.versions.history()
    assert (try_event.kind, try_event.author, drain_event.kind) == ("try", "learning", "drain")


async def test_learning_waits_while_a_version_is_on_trial_and_goes_on_from_the_promoted_one(
    deployed: Deployment, target_dir: Path
) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    first = last(deployed)["version"]
    await deployed.add(ALICE, workload("b", 300, step=11))
    await deployed.cycle()
    assert len(deployed.cycles()) == 1
    await deployed.versions.promote(first, author="rule")
    await deployed.cycle()
    second = last(deployed)
    assert (second["cycle"], second["present"], second["decision"]) == (2, first, "offered")
    # The replica that had the old version got the promoted one; the other one then got the canary.
    assert sorted(draft.version for draft in deployed.drafts) == sorted([first, second["version"]])
    canary = next(draft for draft in deployed.drafts if draft.version == second["version"])
    assert acceptance(canary.directory, target_dir, step=11) > acceptance(
        deployed.options.work / "drafts" / first, target_dir, step=11
    )


async def test_a_canary_that_no_replica_serves_any_more_is_loaded_again(deployed: Deployment) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    canary = last(deployed)["version"]
    restarted = next(draft for draft in deployed.drafts if draft.version == canary)
    restarted.version = draft_version(deployed.options.start)
    await deployed.cycle()
    assert [draft.version for draft in deployed.drafts].count(canary) == 1
    await deployed.cycle()
    assert sum(len(draft.loads) for draft in deployed.drafts) == 2, "once is enough"
    assert (await deployed.versions.read()).split.canary == canary


async def test_a_trial_that_thin_traffic_does_not_decide_is_given_up_after_a_day(
    deployed: Deployment, options: FollowOptions
) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    first = last(deployed)["version"]
    await deployed.add(ALICE, workload("b", 300, step=11))
    await deployed.begin_earlier(LONGEST_TRIAL_S - 3600)
    await deployed.cycle()
    assert (await deployed.versions.read()).split.canary == first
    await deployed.begin_earlier(3600)
    await deployed.cycle()
    state = await deployed.versions.read()
    assert state.decided[first] == "undecided after 24 hours"
    assert (last(deployed)["cycle"], last(deployed)["present"]) == (2, draft_version(options.start))
    assert state.split.canary == last(deployed)["version"]
    events = await deployed.versions.history()
    assert ("roll_back", first, "learning") in [(each.kind, each.version, each.author) for each in events]


async def test_a_trial_of_others_is_not_given_up(deployed: Deployment) -> None:
    await deployed.versions.try_version("by-hand", 0.1, author="ada")
    await deployed.begin_earlier(2 * LONGEST_TRIAL_S)
    await deployed.cycle()
    assert (await deployed.versions.read()).split.canary == "by-hand"


async def test_a_canary_that_was_rolled_back_leaves_its_replica(deployed: Deployment) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    canary = last(deployed)["version"]
    await deployed.versions.roll_back(author="rule", reason="worse")
    await deployed.cycle()
    assert [draft.version for draft in deployed.drafts] == [draft_version(deployed.options.start)] * 2
    assert len(deployed.cycles()) == 1, "it has read these sessions"
    assert canary in (await deployed.versions.read()).split.drained


async def test_a_draft_that_was_rolled_back_is_not_offered_again_by_a_learner_that_lost_its_cycle(
    deployed: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sessions give the same weights, and so the same version."""
    await deployed.add(ALICE, workload("a", 250))
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", Mock(side_effect=OSError("No space left on device")))
        await deployed.cycle()
    canary = (await deployed.versions.read()).split.canary
    await deployed.versions.roll_back(author="rule", reason="worse")
    await deployed.cycle()
    assert (last(deployed)["version"], last(deployed)["decision"]) == (canary, "not offered")
    assert last(deployed)["reason"] == f"{canary} was decided before: worse"
    assert [event.kind for event in await deployed.versions.history()].count("try") == 1
    assert (await deployed.versions.read()).decided[canary] == "worse"


async def test_a_replica_that_was_loaded_since_its_lease_is_left_alone(deployed: Deployment) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    loaded = next(draft for draft in deployed.drafts if draft.version == last(deployed)["version"])
    await deployed.versions.roll_back(author="rule", reason="worse")
    loaded.version = "a-persons"
    with capture_logs() as logs:
        await deployed.follower().run(deployed.stop, cycles=1)
    [line] = [line for line in logs if line["event"] == "draft not loaded"]
    assert line["reason"] == f"{loaded.address}: serves a-persons, not {last(deployed)['version']}"
    await deployed.cycle()
    assert loaded.version == "a-persons"


async def test_a_trial_that_begins_while_drafts_are_loaded_keeps_its_replica(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    await server.command("FLUSHALL")
    start = draft_version(options.start)
    Journal(options.work).append({"cycle": 1, "version": "learned", "inputs": {"train": []}})
    async with deployment(server, options, [start, "learned", "learned"], tmp_path) as deployed:
        await deployed.versions.promote(start, author="a person")
        await deployed.register()
        first, second = sorted(deployed.drafts[1:], key=lambda draft: draft.address)
        loading = asyncio.create_task(first.hang())
        running = asyncio.create_task(deployed.follower().run(deployed.stop, cycles=1))
        async with asyncio.timeout(60):
            await loading
            await deployed.versions.try_version("learned", 0.1, author="a person")
            first.go_on()
            await running
        assert (first.version, second.version) == (start, "learned")


async def test_a_canary_whose_decision_was_lost_leaves_its_replica(
    server: Server, deployed: Deployment
) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    await deployed.versions.roll_back(author="rule", reason="worse")
    await server.command("DEL", f"galley:drafts:{{{POOL}}}")
    await deployed.cycle()
    assert [draft.version for draft in deployed.drafts] == [draft_version(deployed.options.start)] * 2


async def test_many_principals_are_read_in_turns(deployed: Deployment) -> None:
    """Those whose turn is first have too little for a cycle."""
    for number in range(70):
        await deployed.add(f"p{number:02}", workload(f"{number:02}", 1 if number < 64 else 40, seed=number))
    await deployed.register()
    deployed.options = replace(deployed.options, every_s=0.0, new_tokens=5_000)
    await deployed.follower().run(deployed.stop, cycles=1)
    assert not deployed.cycles()
    await deployed.follower().run(deployed.stop, cycles=2)
    [cycle] = deployed.cycles()
    assert cycle["cycle"] == 1


async def test_a_draft_that_learned_nothing_is_not_offered(
    deployed: Deployment, options: FollowOptions
) -> None:
    deployed.options = replace(options, rate=1e-7)
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    cycle = last(deployed)
    assert cycle["decision"] == "not offered"
    assert cycle["reason"].startswith("not better")
    assert not any(draft.loads for draft in deployed.drafts)
    assert (await deployed.versions.read()).epoch == 0


async def test_a_flood_and_adversarial_sessions_do_no_harm(
    deployed: Deployment, options: FollowOptions, target_dir: Path
) -> None:
    source = np.random.default_rng(4)
    flood = [replace(one, tokens=source.integers(2, VOCAB, 40).tolist()) for one in workload("f", 600)]
    loops = [replace(one, tokens=[*one.tokens[:4], *[9, 8, 7] * 12]) for one in workload("c", 60)]
    beyond = [replace(one, tokens=[*one.tokens[:-1], VOCAB + 5]) for one in workload("d", 40)]
    await deployed.add(BOB, [*flood, *loops, *beyond])
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    cycle = last(deployed)
    counts = list(cycle["inputs"]["principals"].values())
    assert sorted(one["looping"] for one in counts) == [0, 60]
    assert sorted(one["invalid"] for one in counts) == [0, 40]
    assert max(one["train_tokens"] for one in counts) <= 8_000
    made = options.work / "drafts" / cycle["version"]
    assert acceptance(made, target_dir) > acceptance(options.start, target_dir) + 0.1


async def test_conversations_of_the_corpus_are_mixed_in_and_measured(
    deployed: Deployment, options: FollowOptions, tmp_path: Path, target_dir: Path
) -> None:
    known = workload("k", 200, step=23)
    path = tmp_path / "corpus.npz"
    write_corpus(corpus_of([Conversation(one.tokens, 4, "known", 0.0) for one in known]), path)
    deployed.options = replace(options, corpus=(path,))
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    cycle = last(deployed)
    assert cycle["acceptance"]["corpus"]["sessions"] >= 8
    assert cycle["acceptance"]["corpus"]["difference"] > 0
    made = options.work / "drafts" / cycle["version"]
    assert acceptance(made, target_dir, step=23) > acceptance(options.start, target_dir, step=23)


async def test_a_refused_load_is_recorded_and_its_version_gets_no_sessions(deployed: Deployment) -> None:
    for draft in deployed.drafts:
        draft.refusal = "another vocabulary"
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    cycle = last(deployed)
    assert cycle["decision"] == "not offered"
    assert cycle["reason"].endswith("another vocabulary")
    split = (await deployed.versions.read()).split
    assert split.canary == ""
    assert split.drained == {cycle["version"]}


async def test_a_load_that_ends_in_the_middle_is_recorded_with_its_reason(
    deployed: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("galley.common.draft_loading.PIECE_BYTES", 16)
    for draft in deployed.drafts:
        draft.ends_early = "No space left on device"
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    reasons = {f"{draft.address}: {draft.ends_early}" for draft in deployed.drafts}
    assert last(deployed)["reason"] in reasons


async def test_replicas_that_began_with_a_name_get_the_promoted_draft_too(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    await server.command("FLUSHALL")
    named = replace(options, start_version="v1")
    async with deployment(server, named, ["v1", "v1", "a-persons"], tmp_path) as deployed:
        await deployed.versions.drain("a-persons", author="a person")
        await deployed.add(ALICE, workload("a", 250))
        deployed.drafts[2].refusal = "it must not be asked"
        deployed.drafts[2].is_loadable = False
        await deployed.cycle()
        cycle = last(deployed)
        assert cycle["present"] == cycle["start"] == draft_version(options.start)
        promoted = cycle["version"]
        await deployed.versions.promote(promoted, author="rule")
        deployed.drafts[2].is_loadable = True
        await deployed.cycle()
        assert [draft.version for draft in deployed.drafts] == [promoted, promoted, "a-persons"]


async def test_a_version_that_people_loaded_is_left_to_them_until_it_is_tried(deployed: Deployment) -> None:
    await deployed.add(ALICE, workload("a", 250))
    deployed.drafts[1].version = "a-persons"
    await deployed.versions.drain("a-persons", author="a person", reason=NOT_TRIED)
    reasons = await reasons_of_a_cycle(deployed)
    assert "a-persons was started or loaded by hand" in reasons
    assert not any(draft.loads for draft in deployed.drafts)
    await deployed.versions.try_version("a-persons", 0.2)
    await deployed.versions.roll_back(author="rule", reason="worse")
    await deployed.cycle()
    assert deployed.drafts[1].loads == [last(deployed)["version"]]


async def test_the_first_offer_leaves_replicas_that_people_started(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    """Before the first promotion all versions get sessions; one may be another pool's."""
    await server.command("FLUSHALL")
    version = draft_version(options.start)
    async with deployment(server, options, [version] * 3, tmp_path) as deployed:
        # Of replicas that get sessions, the last one by its address takes a draft.
        by_hand = max(deployed.drafts, key=lambda draft: draft.address)
        by_hand.version = "v3"
        await deployed.add(ALICE, workload("a", 250))
        await deployed.cycle()
        cycle = last(deployed)
        assert cycle["decision"] == "offered", cycle["reason"]
        assert sorted(draft.version for draft in deployed.drafts) == sorted([version, cycle["version"], "v3"])
        assert by_hand.version == "v3"


async def test_replicas_that_people_start_after_a_promotion_are_left_to_them(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    await server.command("FLUSHALL")
    stable = draft_version(options.start)
    async with deployment(server, options, [stable, stable, "v3"], tmp_path) as deployed:
        await deployed.versions.promote(stable, author="rule")
        await deployed.cycle()
        await deployed.versions.try_version("v3", 0.2, author="a person")
        await deployed.cycle()
        assert [draft.version for draft in deployed.drafts] == [stable, stable, "v3"]
        assert not any(draft.loads for draft in deployed.drafts)


async def test_a_canary_that_waits_for_the_end_of_a_trial_keeps_its_replica(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    await server.command("FLUSHALL")
    stable = draft_version(options.start)
    async with deployment(server, options, [stable, stable, "v2"], tmp_path) as deployed:
        await deployed.versions.promote(stable, author="rule")
        await deployed.add(ALICE, workload("a", 250))
        await deployed.cycle()
        given_up = last(deployed)["version"]
        assert (await deployed.versions.read()).split.canary == given_up
        await deployed.begin_earlier(LONGEST_TRIAL_S)
        await deployed.cycle()
        assert given_up in (await deployed.versions.read()).split.drained
        assert [draft.version for draft in deployed.drafts] == [stable, stable, "v2"]
        assert not deployed.drafts[2].loads


async def test_a_trial_does_not_take_replicas_that_people_started_for_a_lost_draft(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    await server.command("FLUSHALL")
    stable = draft_version(options.start)
    async with deployment(server, options, ["v2", "v3"], tmp_path) as deployed:
        await deployed.versions.promote(stable, author="rule")
        await deployed.versions.try_version("v2", 0.2, author="a person")
        reasons = await reasons_of_a_cycle(deployed)
        assert not any(draft.loads for draft in deployed.drafts)
        assert "v3 was started or loaded by hand" in reasons


async def test_replicas_with_a_draft_that_is_not_kept_any_more_get_the_stable_one(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    """Such as one that could not be reached for some cycles."""
    await server.command("FLUSHALL")
    stable = draft_version(options.start)
    Journal(options.work).append({"cycle": 1, "version": "learned", "inputs": {"train": []}})
    async with deployment(server, options, [stable, "learned"], tmp_path) as deployed:
        await deployed.versions.promote(stable, author="rule")
        await deployed.cycle()
        assert [draft.version for draft in deployed.drafts] == [stable, stable]


async def test_a_start_that_is_not_the_draft_of_its_name_is_not_loaded_by_it(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    """Otherwise replicas of the stable version would serve different weights."""
    await server.command("FLUSHALL")
    named = replace(options, start_version="v1")
    Journal(options.work).append({"cycle": 1, "version": "learned", "inputs": {"train": []}})
    async with deployment(server, named, ["v1", "learned"], tmp_path) as deployed:
        await deployed.versions.promote("v1", author="a person")
        deployed.drafts[0].weights_digest = "0123456789abcdef"
        reasons = await reasons_of_a_cycle(deployed)
        assert not deployed.drafts[1].loads
        assert "(0123456789abcdef)" in reasons
        deployed.drafts[0].weights_digest = draft_version(options.start)
        await deployed.cycle()
        assert deployed.drafts[1].loads == ["v1"]


async def test_replicas_with_another_name_than_that_of_the_start_are_left_alone(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    await server.command("FLUSHALL")
    async with deployment(server, options, ["v1", "v1"], tmp_path) as deployed:
        await deployed.add(ALICE, workload("a", 250))
        reasons = await reasons_of_a_cycle(deployed)
        assert not deployed.cycles()
        assert not any(draft.loads for draft in deployed.drafts)
        assert "--start-version" in reasons


async def test_without_a_second_replica_nothing_is_offered(
    server: Server, options: FollowOptions, tmp_path: Path
) -> None:
    await server.command("FLUSHALL")
    async with deployment(server, options, [draft_version(options.start)], tmp_path) as deployed:
        await deployed.add(ALICE, workload("a", 250))
        with capture_logs() as logs:
            await deployed.cycle()
        assert [line["event"] for line in logs] == ["cycle waits"]
        assert "--max-load-mib" in logs[0]["reason"]
        assert not deployed.cycles()
        assert not deployed.drafts[0].loads


async def test_a_version_that_was_not_trained_here_is_not_replaced(deployed: Deployment) -> None:
    await deployed.versions.promote("another", author="a person")
    await deployed.add(ALICE, workload("a", 250))
    reasons = await reasons_of_a_cycle(deployed)
    assert not deployed.cycles()
    assert "another was not trained here" in reasons


async def test_what_a_cycle_waits_for_is_logged_with_its_bound(deployed: Deployment) -> None:
    await deployed.add(ALICE, workload("a", 20))
    with capture_logs() as logs:
        await deployed.cycle()
    [line] = [line for line in logs if line["event"] == "cycle waits"]
    assert 0 < line["new_tokens"] < line["fewest_new_tokens"] == deployed.options.new_tokens
    assert line["held_out_sessions"] < line["fewest_held_out_sessions"] == 8


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "config.json: No such file or directory"),
        ({"config.json": b"{}"}, "galley_draft is missing"),
        ({"config.json": b"{"}, "Expecting property name"),
        ({"config.json": b'{"galley_draft": {}}', "model.safetensors": b"\x80\x04K\x01."}, "header"),
    ],
)
def test_why_a_draft_cannot_be_read_is_said_in_a_line(
    tmp_path: Path, target_dir: Path, files: dict[str, bytes], problem: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidField) as refused:
        read_draft(tmp_path, read_target(target_dir), "start")
    assert refused.value.problem.startswith(f"{tmp_path}: must be a draft of this target, as galley distill")
    assert problem in refused.value.problem
    assert "\n" not in refused.value.problem
    assert "Error(" not in refused.value.problem


async def test_a_cycle_is_replayed_from_its_record_while_its_sessions_are_there(
    deployed: Deployment, options: FollowOptions
) -> None:
    sessions = workload("a", 250)
    await deployed.add(ALICE, sessions)
    await deployed.cycle()
    await deployed.add(ALICE, workload("b", 30, step=11))
    replayed = await deployed.follower().replay(1, deployed.stop)
    assert replayed.version == replayed.recorded == last(deployed)["version"]
    assert len([draft for draft in deployed.drafts if draft.loads]) == 1, "a replay offers nothing"
    deployed.options = replace(options, rate=0.03)
    with pytest.raises(InvalidField, match=r"rate: must be 0\.02, as in the cycle, got 0\.03"):
        await deployed.follower().replay(1, deployed.stop)
    deployed.options = options
    await deployed.spool.remove(ALICE, sessions[0].session_id, is_recent=False)
    with pytest.raises(InvalidField, match="1 of 250 sessions are gone"):
        await deployed.follower().replay(1, deployed.stop)
    with pytest.raises(InvalidField, match="must be a cycle"):
        await deployed.follower().replay(7, deployed.stop)


async def test_a_replay_is_stopped_within_a_step(deployed: Deployment) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.cycle()
    deployed.stop.set()
    with pytest.raises(Stopped):
        await deployed.follower().replay(1, deployed.stop)


async def test_learning_is_stopped_within_a_step_and_leaves_nothing(
    deployed: Deployment, options: FollowOptions
) -> None:
    deployed.options = replace(options, cycle_tokens=10**9, every_s=3600)
    await deployed.add(ALICE, workload("a", 250))
    await deployed.register()
    with capture_logs() as logs:
        running = asyncio.create_task(deployed.follower().run(deployed.stop))
        async with asyncio.timeout(60):
            while not any(line["event"] == "training" for line in logs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            deployed.stop.set()
            await running
    assert not deployed.cycles()
    assert not list((options.work / "drafts").iterdir())


async def test_learning_is_stopped_while_a_replica_does_not_respond(deployed: Deployment) -> None:
    loading = [asyncio.create_task(draft.hang()) for draft in deployed.drafts]
    await deployed.add(ALICE, workload("a", 250))
    await deployed.register()
    running = asyncio.create_task(deployed.follower().run(deployed.stop))
    async with asyncio.timeout(60):
        _, others = await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)
        deployed.stop.set()
        await running
    for other in others:
        other.cancel()
    assert not deployed.cycles()
    assert not (await deployed.versions.read()).split.canary


async def test_a_full_disk_delays_a_cycle(deployed: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    await deployed.add(ALICE, workload("a", 250))
    full = Mock(side_effect=SafetensorError("No space left on device"))
    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr("galley.distill.export.save_file", full)
        await deployed.cycle()
    assert logs[-1]["event"] == "cycle failed"
    assert "No space left on device" in logs[-1]["error"]
    await deployed.cycle()
    assert last(deployed)["decision"] == "offered"


def test_a_line_that_a_full_disk_cut_spoils_no_later_one(options: FollowOptions) -> None:
    journal = Journal(options.work)
    journal.append({"cycle": 1})
    with _full_disk((options.work / RECORD).stat().st_size + 5), pytest.raises(OSError, match="too large"):
        journal.append({"cycle": 2})
    journal.append({"cycle": 3})
    assert [cycle["cycle"] for cycle in Journal(options.work).cycles] == [1, 3]


@contextmanager
def _full_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes: a write stores what fits."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_key_that_was_not_written_whole_is_made_anew(
    options: FollowOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError("No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr("galley.distill.follow.journal.secrets.token_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            Journal(options.work)
    mark = Journal(options.work).mark("session")
    assert Journal(options.work).mark("session") == mark
    assert (options.work / "key").stat().st_mode & 0o777 == 0o600


async def test_a_store_that_is_away_delays_a_cycle(deployed: Deployment) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.register()
    follower = deployed.follower()
    cast("Any", follower)._spool = type("Away", (), {"principals": _away})()
    with capture_logs() as logs:
        await follower.run(deployed.stop, cycles=1)
    assert [line["event"] for line in logs] == ["cycle failed"]


async def _away(_self: object) -> list[str]:
    raise StoreUnavailable("the session store is unavailable")


async def test_no_token_id_is_found_outside_of_the_spool_and_forgetting_removes_all(
    server: Server, deployed: Deployment, options: FollowOptions
) -> None:
    """Look in the learner's directory, its log, and all that Redis has beside the spool."""
    sessions = {ALICE: workload("a", 250), BOB: workload("b", 250, step=11, seed=2)}
    with capture_logs() as logs:
        for principal, of_it in sessions.items():
            await deployed.add(principal, of_it)
        await deployed.cycle()
    assert deployed.cycles()
    runs = [one.tokens[at : at + 5] for of_it in sessions.values() for one in of_it for at in range(0, 35, 5)]
    files = [path for path in options.work.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"cycles.jsonl", "key", "config.json", "model.safetensors"}
    redis = await stored(server)
    assert any(key.startswith("galley:drafts:") for key in redis)
    beside = [value for key, value in redis.items() if not key.startswith("galley:learning:")]
    told = b"\n".join(
        [*(path.read_bytes() for path in files), json.dumps(logs, default=str).encode(), *beside]
    )
    for run in runs:
        assert not any(form in told for form in written(run))
    for name in (ALICE, BOB, *(one.session_id for of_it in sessions.values() for one in of_it[:20])):
        assert name.encode() not in told
    for principal, others in ((ALICE, BOB), (BOB, ALICE)):
        keys = await server.command("KEYS", f"galley:learning:*:{principal}")
        held = [await server.command("GET", key.decode()) for key in keys if b":entry:" in key]
        assert len(held) == 250
        for one in sessions[others][:50]:
            assert not any(array("I", one.tokens).tobytes() in entry for entry in held)
    assert await deployed.spool.forget(ALICE) == 250
    left = [key.decode() for key in await server.command("KEYS", "*")]
    assert [key for key in left if ALICE in key and ":forgotten:" not in key] == []
    values = [await server.command("GET", key) for key in left if ":entry:" in key]
    assert len(values) == 250
    for one in sessions[ALICE]:
        assert not any(array("I", one.tokens).tobytes() in entry for entry in values)
    with pytest.raises(InvalidField, match="sessions are gone"):
        await deployed.follower().replay(1, deployed.stop)


def _command(deployed: Deployment, *more: str) -> list[str]:
    options = deployed.options
    flags: dict[str, object] = {
        "target": options.target,
        "start": options.start,
        "redis-url": deployed.server.url,
        "pool": POOL,
        "cycle-tokens": options.cycle_tokens,
        "new-tokens": options.new_tokens,
        "batch": options.batch,
        "rate": options.rate,
        "dtype": options.dtype,
    }
    written = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [str(options.work), *written, *more]


async def test_the_command_learns_until_it_is_told_to_stop_and_replays(deployed: Deployment) -> None:
    await deployed.add(ALICE, workload("a", 250))
    await deployed.register()
    process = await _started(_command(deployed, "--follow"))
    assert process.stderr is not None
    async with asyncio.timeout(120):
        while line := await process.stderr.readline():
            if b"cycle ended" in line:
                break
        with pytest.raises(InvalidField, match="another learner"), locked(deployed.options.work):
            pass
        assert last(deployed)["decision"] == "offered"
        replayed = await _started(_command(deployed, "--replay", "1"))
        output, problems = await replayed.communicate()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        await process.stderr.read()
    assert replayed.returncode == 0, problems.decode()
    assert f"the same draft, {last(deployed)['version']}" in output.decode()


def test_a_second_learner_of_a_directory_is_refused(options: FollowOptions) -> None:
    """It would remove the draft that the first one has on trial."""
    app = typer.Typer()
    app.command()(distill)
    flags = ["--follow", "--cycles", "1", "--target", str(options.target), "--start", str(options.start)]
    command = [str(options.work), *flags, "--redis-url", "unix:///nowhere"]
    with locked(options.work):
        refused = CliRunner().invoke(app, command, env={"COLUMNS": "300", "TERM": "dumb"})
    assert refused.exit_code == 2
    assert f"OUT: {options.work}: must not be in use by another learner" in refused.output
    assert CliRunner().invoke(app, command).exit_code == 0


async def _started(arguments: list[str]) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "galley.cli", "distill", *arguments]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--follow", "--self-prompts", "5"], "--self-prompts"),
        (["--follow", "--target", "some/model"], "--start"),
        (["--follow", "--share", "0.9"], "--share"),
        (["--follow", "--start-version", "not a name"], "--start-version"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_any_work(
    tmp_path: Path, flags: list[str], problem: str
) -> None:
    app = typer.Typer()
    app.command()(distill)
    work = tmp_path / "work"
    refused = CliRunner().invoke(app, [str(work), *flags], env={"COLUMNS": "200", "TERM": "dumb"})
    assert refused.exit_code == 2
    assert problem in refused.output
    assert not work.exists()


def test_the_shipped_draft_is_found_by_the_name_of_the_default_model(
    tmp_path: Path, target_dir: Path
) -> None:
    """The target's image has it as a directory; here it is another model, for which the draft is refused."""
    model = tmp_path / DEFAULT_MODEL
    shutil.copytree(target_dir, model)
    app = typer.Typer()
    app.command()(distill)
    flags = [str(tmp_path / "work"), "--follow", "--target", str(model), "--redis-url", "unix:///nowhere"]
    refused = CliRunner().invoke(app, flags, env={"COLUMNS": "300", "TERM": "dumb"})
    assert refused.exit_code == 2
    assert "must be trained for this target" in refused.output
