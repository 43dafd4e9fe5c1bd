"""A draft that a cycle of learning made, in real draft replicas: loaded, registered and proposing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from galley.common.draft_loading import draft_version
from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry
from galley.common.registry.spool import LearningSpool
from galley.common.registry.trials import DraftVersions
from galley.common.tls.channels import open_channel
from galley.distill.export import write_draft
from galley.distill.follow.canaries import Canaries
from galley.distill.follow.cycle import Learner
from galley.distill.follow.journal import Journal
from galley.distill.follow.options import FollowOptions
from galley.distill.follow.run import Follower
from galley.distill.training.models import read_target
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.redis_clusters import until
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.tiny_model import VOCAB, save_tiny_model
from tests.integration.galley.distill.deployment import ALICE, MOST_TOKENS, POOL, workload
from tests.integration.services.draft.conftest import draft_server
from tests.integration.services.draft.test_propose import item, proposals


@pytest.fixture
def server() -> Iterator[Server]:
    with running(VALKEY) as server:
        yield server


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "target")


@pytest.fixture
def start(tmp_path: Path, target: Path) -> Path:
    """Return a draft whose head has half of the vocabulary."""
    read, heads = read_target(target), np.arange(0, VOCAB, 2)
    write_draft(tmp_path / "start", read.student(1, torch.from_numpy(heads)), read, heads, target)
    return tmp_path / "start"


@pytest.fixture
async def addresses(server: Server, target: Path, start: Path) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as held:
        settings = {"model": str(start), "target_model": str(target), "dtype": "float32", "pool": POOL}
        yield [
            (
                await held.enter_async_context(draft_server(**settings, redis_url=server.url, max_load_mib=1))
            ).address
            for _ in range(2)
        ]


async def test_a_learned_draft_serves_in_one_of_two_replicas(
    server: Server, target: Path, start: Path, addresses: list[str], tmp_path: Path
) -> None:
    options = FollowOptions(
        tmp_path / "work", target, start, cycle_tokens=8_000, batch=256, rate=0.02, dtype="float32",
        new_tokens=1_000,
    )  # fmt: skip
    spool, versions = LearningSpool(server.url, POOL), DraftVersions(server.url, POOL)
    registry = ReplicaRegistry(server.url, POOL)
    sessions = workload("a", 250)
    for session in sessions:
        await spool.add(ALICE, session, MOST_TOKENS)

    async def versions_of_replicas() -> list[str]:
        return [lease.version for lease in await registry.read(DRAFT_POOL)]

    async def are_there() -> bool:
        return len(await versions_of_replicas()) == len(addresses)

    await until(are_there)
    canaries = Canaries(registry, versions, lambda address: open_channel(address, None), 0.2, 500)
    follower = Follower(options, Learner(options), Journal(options.work), spool, canaries)
    await follower.run(asyncio.Event(), cycles=1)
    canary = (await versions.read()).split.canary
    assert canary == Journal(options.work).cycles[-1]["version"] != ""

    async def serves() -> bool:
        return sorted(await versions_of_replicas()) == sorted([canary, draft_version(start)])

    await until(serves)
    hits = []
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: rpc.DraftAsyncStub = rpc.DraftStub(channel)
            info = await stub.GetDraftInfo(pb.GetDraftInfoRequest())
            found = 0
            for number, session in enumerate(sessions[:40]):
                known = list(session.tokens[:20])
                [tokens] = await proposals(stub, item(known, 1, "model", session_id=f"s{number}"))
                found += tokens == [session.tokens[20]]
            hits.append((info.version, found))
    by_version = dict(hits)
    assert by_version[canary] > by_version[draft_version(start)] + 8
    for closing in (spool, versions, registry):
        await closing.close()
