"""Drafts whose steps a test lets happen one by one, in a real grpc.aio server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from galley.common.metrics.registry import Registry
from galley.common.models.grammars import ReplicaGrammars
from galley.common.server.server import Parts, start_server
from galley.common.tracing.light_spans import SpanScope
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.loop import DraftLoop
from services.draft.servicer import DraftService
from services.draft.settings import DraftSettings
from services.draft.strategies.base import DraftJob, Proposal, Strategy
from services.draft.strategies.model import ModelSteps, ModelStrategy
from tests.fakes.tiny_model import VOCAB, load_tiny_model
from tests.fakes.verify_items import slice_of

PATIENCE_S = 5
MODEL = "model"


class Gated:
    def __init__(self, inner: Strategy) -> None:
        self._inner = inner
        self._started = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._open = False
        self.steps: list[str] = []
        self.failure: BaseException | None = None

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return self._inner.begin(jobs)

    def advance(self, proposals: Sequence[Proposal]) -> None:
        self.steps.append("".join(proposal.job.slice.key[1] for proposal in proposals))
        self._started.release()
        if not self._open and not self._allowed.acquire(timeout=PATIENCE_S):
            raise TimeoutError
        if self.failure is not None:
            raise self.failure
        self._inner.advance(proposals)

    async def step_started(self) -> None:
        if not await asyncio.to_thread(self._started.acquire, timeout=PATIENCE_S):
            raise TimeoutError

    async def pass_on(self) -> None:
        self._allowed.release()
        await self.step_started()

    def open(self) -> None:
        self._open = True
        self._allowed.release()


class Stream:
    def __init__(self, draft: rpc.DraftAsyncStub) -> None:
        self._stream: Any = draft.ProposeStream()
        self._read: list[pb.ProposeAnswer] = []

    async def send(self, *items: pb.ProposeItem) -> None:
        await self._stream.write(pb.ProposeStreamRequest(items=items))
        await self._settle()

    async def cancel(self, session_id: str) -> None:
        await self._stream.write(
            pb.ProposeStreamRequest(cancelled=[pb.ItemRef(session_id=session_id, request_id=7)])
        )
        await self._settle()

    async def next(self) -> pb.ProposeAnswer:
        if not self._read:
            await self._fetch()
        return self._read.pop(0)

    async def _settle(self) -> None:
        """Send an invalid item; its refusal shows that all items before it were read."""
        await self._stream.write(
            pb.ProposeStreamRequest(items=[pb.ProposeItem(slice=slice_of([], session_id="!"))])
        )
        kept: list[pb.ProposeAnswer] = []
        while (answer := await self.next()).session_id != "!":
            kept.append(answer)
        self._read = kept + self._read

    async def _fetch(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            response = await self._stream.read()
        assert isinstance(response, pb.ProposeStreamResponse), "the stream has ended"
        self._read += response.answers


@dataclass(frozen=True)
class Serving:
    stub: rpc.DraftAsyncStub
    loop: DraftLoop
    service: DraftService


@asynccontextmanager
async def serving(
    strategy: Strategy,
    *,
    spans: SpanScope | None = None,
    metrics: Registry | None = None,
    grammars: ReplicaGrammars | None = None,
    **limits: int,
) -> AsyncIterator[Serving]:
    loop = DraftLoop(
        {MODEL: strategy},
        **({"max_sessions": 16, "max_tokens": 4096, "max_batch": 8, "max_waiting": 64} | limits),
        spans=spans,
        metrics=metrics,
    )
    info = pb.GetDraftInfoResponse(
        strategies=[MODEL], default_strategy=MODEL, max_draft_tokens=32, vocab_size=VOCAB
    )

    service = DraftService(loop, info, spans, grammars=grammars)

    async def build(server: grpc.aio.Server, parts: Parts) -> DraftService:
        rpc.add_DraftServicer_to_server(service, server)
        return service

    running = await start_server(DraftSettings(drain_timeout_s=5), build)
    try:
        async with grpc.aio.insecure_channel(running.address) as channel:
            yield Serving(rpc.DraftStub(channel), loop, service)
    finally:
        await running.stop()


@asynccontextmanager
async def gating(tiny: Path, **given: Any) -> AsyncIterator[tuple[Gated, Stream, Serving]]:
    gated = Gated(ModelStrategy(ModelSteps(load_tiny_model(tiny, kv_blocks=256))))
    async with serving(gated, **given) as draft:
        try:
            yield gated, Stream(draft.stub), draft
        finally:
            gated.open()


def item(tokens: list[int], k: int, session_id: str, ahead: int = 0, **given: Any) -> pb.ProposeItem:
    return pb.ProposeItem(slice=slice_of(tokens, session_id=session_id, **given), k=k, ahead=ahead)
