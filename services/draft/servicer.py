"""The Draft service: takes items by call and by stream, gives them to the loop, answers each."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from galley.common.metrics.registry import Registry
from galley.common.registry.leases import draft_lease
from galley.common.server.requests import answer_all, answer_or_status, answer_stream
from galley.common.tracing.light_spans import SpanScope
from galley.core.lru import RecentKeys
from galley.core.routing.choice import DraftLease
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.drafter import Drafter
from services.draft.items import DraftInfo, answer_of, read_item
from services.draft.loop import MAX_WAITING, DraftLoop
from services.draft.spans import ProposeSpan


class DraftService(rpc.DraftServicer):
    """Serves one drafter; `incarnation` names this life of the process, whose caches end with it."""

    grpc_services = ("galley.v1.Draft",)

    def __init__(
        self,
        drafter: Drafter,
        info: DraftInfo,
        spans: SpanScope | None,
        *,
        max_waiting: int = MAX_WAITING,
        metrics: Registry | None = None,
    ) -> None:
        self._info = info
        self._spans = spans
        self._incarnation = secrets.token_hex(8)
        self._recent = RecentKeys()
        self._loop = DraftLoop(drafter, spans, max_waiting=max_waiting, metrics=metrics)
        self._loop.meter.expect(info.strategies)

    async def Propose(
        self,
        request: pb.ProposeRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.ProposeResponse:
        """Answer all items of one request."""
        return pb.ProposeResponse(answers=await answer_all(request.items, self._answer))

    async def ProposeStream(
        self,
        request_iterator: AsyncIterator[pb.ProposeStreamRequest],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.ProposeStreamResponse]:
        """Answer items as they complete."""
        async for answers in answer_stream(request_iterator, self._answer, self._loop.draining):
            yield pb.ProposeStreamResponse(answers=answers)

    async def GetDraftInfo(
        self,
        request: pb.GetDraftInfoRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.GetDraftInfoResponse:
        """Say what is offered here, and by which life of this process."""
        return self._describe()

    def lease(self, address: str) -> DraftLease:
        """What a lease says of this replica now; `address` is where gateways reach it."""
        sessions = self._recent.count(time.monotonic_ns())
        return draft_lease(address, self._describe(), sessions=sessions, queue_depth=self._loop.queue_depth)

    async def drain(self) -> None:
        """Refuse new items and answer those that are here."""
        await self._loop.drain()

    async def close(self) -> None:
        """End the loop and its thread."""
        await self._loop.close()

    async def _answer(self, item: pb.ProposeItem) -> pb.ProposeAnswer:
        span = ProposeSpan(self._spans, item)
        try:
            return await answer_or_status(
                self._propose(item, span),
                lambda status: pb.ProposeAnswer(
                    session_id=item.slice.session_id, request_id=item.slice.request_id, status=status
                ),
                item.slice.session_id,
                span,
            )
        finally:
            span.end()

    async def _propose(self, item: pb.ProposeItem, span: ProposeSpan) -> pb.ProposeAnswer:
        meter, strategy = self._loop.meter, item.strategy or self._info.default_strategy
        try:
            answer = await self._proposed(item, span)
        except asyncio.CancelledError:
            meter.ended(strategy, "cancelled")
            raise
        except Exception:
            meter.ended(strategy, "error")
            raise
        meter.ended(strategy, answer.WhichOneof("outcome") or "error")
        return answer

    async def _proposed(self, item: pb.ProposeItem, span: ProposeSpan) -> pb.ProposeAnswer:
        job = read_item(item, self._info)
        span.asked(job)
        self._recent.add(job.slice.key, time.monotonic_ns())
        done = await self._loop.submit(job, item.slice.remaining_ns, span.span)
        span.answered(job, done)
        return answer_of(item, done)

    def _describe(self) -> pb.GetDraftInfoResponse:
        return pb.GetDraftInfoResponse(
            model=self._info.model,
            tokenizer_hash=self._info.tokenizer_hash,
            strategies=self._info.strategies,
            default_strategy=self._info.default_strategy,
            incarnation=self._incarnation,
            max_draft_tokens=self._info.max_draft_tokens,
            vocab_size=self._info.vocab_size,
        )
