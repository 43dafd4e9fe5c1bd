"""The gRPC service of the gateway: it translates to and from `Generation`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import grpc

from galley.common.models.token_bytes import TokenBytes
from galley.common.wire.codec import logprobs_message
from galley.core.answer.answer import Chunk, Ending, NumericsChanged
from galley.core.audit import AuditReport, difference_fields
from galley.core.errors import Broken
from galley.core.session.machine import Session
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.gateway.client_call import client_call
from services.gateway.generation import Generation
from services.gateway.request.validate import adapter_of
from services.gateway.session.streams import AnswerStream

_ResponseT = TypeVar("_ResponseT", pb.GenerateResponse, pb.ResumeResponse)
_STATS = tuple(name for name in pb.SpeculationStats.DESCRIPTOR.fields_by_name if name != "sources")


@dataclass(frozen=True, slots=True)
class GenerationServicer(rpc.GenerationServicer):
    """Serve `galley.v1.Generation`."""

    generation: Generation

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Start a session, or join the one of the same idempotency key."""
        answering = self.generation.generate(request, client_call(context))
        async with answering as answer, aclosing(self._events(answer, pb.GenerateResponse)) as events:
            async for event in events:
                yield event

    async def Resume(
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ResumeResponse]:
        answering = self.generation.resume(request, client_call(context))
        async with answering as answer, aclosing(self._events(answer, pb.ResumeResponse)) as events:
            async for event in events:
                yield event

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AbortResponse:
        await self.generation.abort(request.session_id, client_call(context))
        return pb.AbortResponse()

    async def Audit(
        self, request: pb.AuditRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AuditResponse:
        return _audited(await self.generation.audit(request.session_id, client_call(context)))

    async def GetAuditCounts(
        self, _request: pb.GetAuditCountsRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetAuditCountsResponse:
        return pb.GetAuditCountsResponse(**asdict(await self.generation.auditor.counts()))

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        model = self.generation.model
        adapter_of(request.model, model.request_model())
        return model.describe()

    async def _events(self, answer: AnswerStream, kind: type[_ResponseT]) -> AsyncGenerator[_ResponseT, None]:
        model = self.generation.model
        yield kind(event=_started(answer.session, model.name_of(answer.session.spec)))
        async for item in answer:
            response = kind()
            _fill(response.event, item, model.tokenizer.token_bytes)
            yield response
        if answer.ending is None:
            raise Broken("a stream ended without a reason")
        yield kind(event=_finished(answer.session, answer.ending))


def _audited(report: AuditReport) -> pb.AuditResponse:
    return pb.AuditResponse(
        verdict=pb.AuditResponse.Verdict.Value(f"VERDICT_{report.verdict.name}"),
        output_tokens=report.output_tokens,
        compared=report.compared,
        differing=report.differing,
        differences=[pb.AuditDifference(**difference_fields(one)) for one in report.differences],
        fingerprint=report.fingerprint,
        deterministic=report.deterministic,
    )


def _started(session: Session, model: str) -> pb.StreamEvent:
    spec = session.spec
    return pb.StreamEvent(
        started=pb.Started(
            session_id=spec.session_id,
            seed=spec.sampling.seed,
            prompt_tokens=len(spec.prompt),
            model=model,
        )
    )


def _fill(event: pb.StreamEvent, item: Chunk | NumericsChanged, token_bytes: TokenBytes) -> None:
    """Set the fields in place: that takes a third of the time of making the messages one by one."""
    if isinstance(item, NumericsChanged):
        change = event.numerics_changed
        change.index, change.fingerprint = item.index, item.fingerprint
        return
    chunk = event.chunk
    chunk.index, chunk.text = item.index, item.text
    chunk.token_ids.extend(item.tokens)
    chunk.from_draft.extend(item.from_draft)
    if item.logprobs:
        chunk.logprobs.extend([logprobs_message(entry) for entry in item.logprobs])
        for token, entry in zip(item.tokens, chunk.logprobs, strict=True):
            entry.token_bytes = token_bytes(token)
            for top in entry.top:
                top.token_bytes = token_bytes(top.token_id)
    if item.text_ends:
        chunk.text_ends.extend(item.text_ends)


def _finished(session: Session, ending: Ending) -> pb.StreamEvent:
    stats = session.stats
    accepted, rejected = session.predicted
    message = pb.Finished(
        reason=pb.Finished.Reason.Value(f"REASON_{ending.reason.name}"),
        usage=pb.Usage(
            prompt_tokens=len(session.spec.prompt),
            output_tokens=session.logged_output,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=rejected,
        ),
        speculation=pb.SpeculationStats(
            **{name: getattr(stats, name) for name in _STATS},
            sources=[
                pb.SourceStats(
                    source=of.source, drafted=of.drafted, verified=of.verified, accepted=of.accepted
                )
                for of in stats.sources.values()
            ],
        ),
        fingerprint=session.answer.fingerprint or "",
    )
    if isinstance(ending.matched, str):
        message.stop = ending.matched
    elif ending.matched is not None:
        message.stop_token_id = ending.matched
    return pb.StreamEvent(finished=message)
