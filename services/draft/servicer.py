"""The Draft service: takes items, has all that wait proposed for in one step, answers each."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from services.common.batching import Batcher
from services.common.items import answer_all, answer_or_status, answer_stream
from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
from services.common.telemetry import item_span, links_to
from services.draft.items import DraftInfo, answer_of, read_item

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from opentelemetry.trace import Tracer

    from services.draft.drafter import Drafter, ProposeJob, ProposeOutcome


class DraftService(rpc.DraftServicer):
    """Serves one drafter; `incarnation` names this life of the process, whose caches end with it."""

    grpc_services = ("galley.v1.Draft",)

    def __init__(self, drafter: Drafter, info: DraftInfo, tracer: Tracer, *, max_waiting: int) -> None:
        self._drafter = drafter
        self._info = info
        self._tracer = tracer
        self._incarnation = secrets.token_hex(8)
        self._batcher: Batcher[ProposeJob, ProposeOutcome] = Batcher(self._step, max_waiting=max_waiting)

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
        async for answers in answer_stream(request_iterator, self._answer, self._batcher.draining):
            yield pb.ProposeStreamResponse(answers=answers)

    async def GetDraftInfo(
        self,
        request: pb.GetDraftInfoRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.GetDraftInfoResponse:
        """Say what is offered here, and by which life of this process."""
        return pb.GetDraftInfoResponse(
            model=self._info.model,
            tokenizer_hash=self._info.tokenizer_hash,
            strategies=self._info.strategies,
            default_strategy=self._info.default_strategy,
            incarnation=self._incarnation,
            max_draft_tokens=self._info.max_draft_tokens,
            vocab_size=self._info.vocab_size,
        )

    async def drain(self) -> None:
        """Refuse new items and answer those that are here."""
        await self._batcher.drain()

    async def close(self) -> None:
        """End the loop and its thread."""
        await self._batcher.close()

    async def _answer(self, item: pb.ProposeItem) -> pb.ProposeAnswer:
        return await answer_or_status(
            self._propose(item),
            lambda status: pb.ProposeAnswer(
                session_id=item.slice.session_id, request_id=item.slice.request_id, status=status
            ),
            item.slice.session_id,
            item_span(self._tracer, "galley.v1.Draft/Propose", item.slice.traceparent),
        )

    async def _propose(self, item: pb.ProposeItem) -> pb.ProposeAnswer:
        job = read_item(item, self._info)
        done = await self._batcher.submit(job.slice.key, job, item.slice.remaining_ns)
        return answer_of(item, done)

    def _step(self, jobs: Sequence[ProposeJob]) -> Sequence[ProposeOutcome]:
        """On the worker thread: one step, in a span that links to those of its requests."""
        links = links_to(job.slice.traceparent for job in jobs)
        with self._tracer.start_as_current_span("draft.step", links=links) as span:
            span.set_attribute("galley.batch_sessions", len(jobs))
            return self._drafter.step(jobs)
