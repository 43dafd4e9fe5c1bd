"""The Target service: takes items, has all that wait verified in one step, answers each."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from services.common.batching import Batcher, Unfinished
from services.common.items import answer_all, answer_or_status, answer_stream
from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
from services.common.telemetry import item_span, links_to
from services.target.items import answer_of, read_item

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from opentelemetry.trace import Tracer

    from services.target.engine import VerifyEngine, VerifyJob, VerifyOutcome


class TargetService(rpc.TargetServicer):
    """Serves one engine; `incarnation` names this life of the process, whose caches end with it."""

    grpc_services = ("galley.v1.Target",)

    def __init__(
        self, engine: VerifyEngine, tracer: Tracer, *, max_draft_tokens: int, max_waiting: int
    ) -> None:
        self._engine = engine
        self._tracer = tracer
        self._max_draft_tokens = max_draft_tokens
        self._incarnation = secrets.token_hex(8)
        self._batcher: Batcher[VerifyJob, VerifyOutcome] = Batcher(self._step, max_waiting=max_waiting)

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:  # noqa: ARG002
        """Answer all items of one request."""
        return pb.VerifyResponse(answers=await answer_all(request.items, self._answer))

    async def VerifyStream(
        self,
        request_iterator: AsyncIterator[pb.VerifyStreamRequest],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.VerifyStreamResponse]:
        """Answer items as they complete."""
        async for answers in answer_stream(request_iterator, self._answer, self._batcher.draining):
            yield pb.VerifyStreamResponse(answers=answers)

    async def GetTargetInfo(
        self,
        request: pb.GetTargetInfoRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.GetTargetInfoResponse:
        """Say what is served here, and by which life of this process."""
        info = self._engine.info
        return pb.GetTargetInfoResponse(
            model=info.model,
            tokenizer_hash=info.tokenizer_hash,
            context_window=info.context_window,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            fingerprint=info.fingerprint,
            deterministic=info.deterministic,
            incarnation=self._incarnation,
            max_draft_tokens=self._max_draft_tokens,
            dtype=info.dtype,
            device=info.device,
        )

    async def drain(self) -> None:
        """Refuse new items and answer those that are here."""
        await self._batcher.drain()

    async def close(self) -> None:
        """End the loop and its thread."""
        await self._batcher.close()

    async def _answer(self, item: pb.VerifyItem) -> pb.VerifyAnswer:
        return await answer_or_status(
            self._verify(item),
            lambda status: pb.VerifyAnswer(
                session_id=item.slice.session_id, request_id=item.slice.request_id, status=status
            ),
            item.slice.session_id,
            item_span(self._tracer, "galley.v1.Target/Verify", item.slice.traceparent),
        )

    async def _verify(self, item: pb.VerifyItem) -> pb.VerifyAnswer:
        job = read_item(item, self._engine.info, self._max_draft_tokens)
        done = await self._batcher.submit(job.slice.key, job, item.slice.remaining_ns)
        return answer_of(item, done, self._engine.info.fingerprint)

    def _step(self, jobs: Sequence[VerifyJob]) -> Sequence[VerifyOutcome | Unfinished]:
        """On the worker thread: one step of the engine, in a span that links to those of its requests."""
        links = links_to(job.slice.traceparent for job in jobs)
        with self._tracer.start_as_current_span("target.step", links=links) as span:
            span.set_attribute("galley.batch_sessions", len(jobs))
            return self._engine.step(jobs)
