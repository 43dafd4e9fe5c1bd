"""A deployment to learn from: its spool, and draft replicas that keep what is loaded into them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from galley.common.draft_loading import ACCEPTED
from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry, draft_lease
from galley.common.registry.spool import LearningSpool, SpooledSession
from galley.common.registry.trials import DraftVersions
from galley.common.tls.channels import open_channel
from galley.distill.follow.canaries import Canaries
from galley.distill.follow.cycle import Learner
from galley.distill.follow.journal import Journal
from galley.distill.follow.options import FollowOptions
from galley.distill.follow.run import Follower
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.redis_servers import Server
from tests.fakes.tiny_model import VOCAB

POOL = "learning"
ALICE, BOB = "alice", "bob"
MOST_TOKENS = 1_000_000
_WORDS, _NOISE = 30, 0.15


class LoadableDraft(rpc.DraftServicer):
    def __init__(self, version: str, directory: Path) -> None:
        self.version = version
        self.weights_digest = ""
        self.directory = directory
        self.loads: list[str] = []
        self.refusal = ""
        self.ends_early = ""
        """Why it ends a load after its first piece."""
        self._loading: asyncio.Event | None = None
        self._may_go_on = asyncio.Event()
        self.is_loadable = True
        self.address = ""
        self.on_loaded: Callable[[], Awaitable[None]]

    async def LoadDraft(
        self,
        request_iterator: AsyncIterator[pb.LoadDraftRequest],
        context: grpc.aio.ServicerContext[pb.LoadDraftRequest, pb.LoadDraftResponse],
    ) -> pb.LoadDraftResponse:
        first = await anext(request_iterator)
        if self.refusal:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)
        if (replaces := first.draft.replaces) not in {"", self.version}:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"serves {self.version}, not {replaces}")
        await context.send_initial_metadata(((ACCEPTED, "1"),))
        if self._loading is not None:
            self._loading.set()
            await self._may_go_on.wait()
        if self.ends_early:
            await anext(request_iterator)
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.ends_early)
        data = b"".join([request.data async for request in request_iterator])
        self.version = first.draft.version
        self.loads.append(self.version)
        for file in first.draft.files:
            (self.directory / file.name).write_bytes(data[: file.size])
            data = data[file.size :]
        await self.on_loaded()
        return pb.LoadDraftResponse(version=self.version)

    async def hang(self) -> None:
        """End no load until `go_on`; return once one has begun."""
        self._loading = asyncio.Event()
        await self._loading.wait()

    def go_on(self) -> None:
        self._may_go_on.set()

    async def GetDraftInfo(self, request: pb.GetDraftInfoRequest, context: object) -> pb.GetDraftInfoResponse:
        raise NotImplementedError

    async def Propose(self, request: pb.ProposeRequest, context: object) -> pb.ProposeResponse:
        raise NotImplementedError

    async def ProposeStream(
        self, request_iterator: AsyncIterator[pb.ProposeStreamRequest], context: object
    ) -> AsyncIterator[pb.ProposeStreamResponse]:
        async for _ in request_iterator:
            yield pb.ProposeStreamResponse()


@dataclass
class Deployment:
    server: Server
    options: FollowOptions
    drafts: Sequence[LoadableDraft]
    spool: LearningSpool
    versions: DraftVersions
    registry: ReplicaRegistry
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def register(self) -> None:
        """Publish the leases of the drafts, as they are now."""
        for draft in self.drafts:
            info = pb.GetDraftInfoResponse(
                version=draft.version,
                weights_digest=draft.weights_digest,
                max_load_bytes=1 << 30 if draft.is_loadable else 0,
                incarnation="life",
                strategies=["model"],
            )
            await self.registry.publish(DRAFT_POOL, draft_lease(draft.address, info))

    async def begin_earlier(self, earlier_s: int) -> None:
        """Let the trial have begun `earlier_s` before the time that it names."""
        await self.server.command("HINCRBY", f"galley:drafts:{{{POOL}}}", "since_ms", str(-1000 * earlier_s))

    def follower(self) -> Follower:
        share, tokens = self.options.share, self.options.trial_tokens
        canaries = Canaries(
            self.registry,
            self.versions,
            lambda address: open_channel(address, None),
            share,
            tokens,
        )
        return Follower(self.options, Learner(self.options), Journal(self.options.work), self.spool, canaries)

    async def cycle(self) -> None:
        await self.register()
        await self.follower().run(self.stop, cycles=1)
        await self.register()

    def cycles(self) -> Sequence[dict[str, object]]:
        return Journal(self.options.work).cycles

    async def add(self, principal: str, sessions: Sequence[SpooledSession]) -> None:
        for session in sessions:
            await self.spool.add(principal, session, MOST_TOKENS)


def workload(
    name: str, count: int, *, step: int = 5, length: int = 40, seed: int = 1
) -> list[SpooledSession]:
    """Return sessions in which each token decides the next one, but a few; so a draft can learn them."""
    source = np.random.default_rng([seed, step])
    words = np.random.default_rng(step).permutation(np.arange(2, VOCAB))[:_WORDS]
    sessions = []
    for number in range(count):
        tokens = [int(source.choice(words))]
        while len(tokens) < length:
            follows = words[(int(np.flatnonzero(words == tokens[-1])[0]) + 1) % _WORDS]
            tokens.append(int(source.choice(words) if source.random() < _NOISE else follows))
        sessions.append(SpooledSession(f"{name}{number:028x}", name, 0.0, 4, tokens))
    return sessions


@asynccontextmanager
async def deployment(
    server: Server, options: FollowOptions, versions: Sequence[str], folder: Path
) -> AsyncIterator[Deployment]:
    drafts = []
    servers = []
    for number, version in enumerate(versions):
        directory = folder / f"replica-{number}"
        directory.mkdir()
        draft, running = LoadableDraft(version, directory), grpc.aio.server()
        rpc.add_DraftServicer_to_server(draft, running)
        draft.address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
        await running.start()
        drafts.append(draft)
        servers.append(running)
    spool, split = LearningSpool(server.url, POOL), DraftVersions(server.url, POOL)
    registry = ReplicaRegistry(server.url, POOL, lease_s=600)
    deployed = Deployment(server, options, drafts, spool, split, registry)
    for draft in drafts:
        draft.on_loaded = deployed.register
    try:
        yield deployed
    finally:
        for closing in (spool, split, registry):
            await closing.close()
        for running in servers:
            await running.stop(None)
