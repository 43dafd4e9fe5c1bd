"""A gateway that sends scripted responses over real gRPC, for tests of clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, repeat

import grpc

from galley.common.wire.status import DETAILS_KEY, code_of, message_of, rich_status
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

SESSION = "session-1"


@dataclass(frozen=True)
class FakeChunk:
    token_ids: tuple[int, ...]
    text: str
    from_draft: bool = False
    logprobs: tuple[float, ...] = ()
    token_bytes: tuple[bytes, ...] = ()
    """Of the tokens with logprobs. Empty: as a gateway that does not send them."""


SCRIPT = (FakeChunk((11,), "Hello"), FakeChunk((12, 13), ", wor", from_draft=True), FakeChunk((14,), "ld!\n"))


@dataclass
class FakeGateway(rpc.GenerationServicer):
    """Send `script`; raise `error` or hang before chunk `fail_at`, `failures` times (None: always)."""

    script: tuple[FakeChunk, ...] = SCRIPT
    error: Exception | None = None
    fail_at: int = 0
    hang: bool = False
    failures: int | None = None
    silent: bool = False
    session_id: str = SESSION
    stop: str = "!"
    reason: pb.Finished.Reason.ValueType = pb.Finished.REASON_STOP
    sources: tuple[pb.SourceStats, ...] = ()
    accepted_prediction_tokens: int = 0
    requests: list[pb.GenerateRequest | pb.ResumeRequest | pb.AbortRequest | pb.AuditRequest] = field(
        default_factory=list
    )
    cancelled: threading.Event = field(default_factory=threading.Event)
    deadline_s: float | None = None
    default_sampling: pb.SamplingParams = field(default_factory=pb.SamplingParams)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    audit: pb.AuditResponse = field(
        default_factory=lambda: pb.AuditResponse(
            verdict=pb.AuditResponse.VERDICT_SAME,
            output_tokens=4,
            compared=4,
            fingerprint="build-1",
            deterministic=True,
        )
    )
    audit_counts: pb.GetAuditCountsResponse = field(default_factory=pb.GetAuditCountsResponse)

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self._note(request, context)
        self.deadline_s = context.time_remaining()
        max_tokens = request.max_tokens if request.HasField("max_tokens") else None
        for event in self._events(0, context, max_tokens):
            yield pb.GenerateResponse(event=event)

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> Iterator[pb.ResumeResponse]:
        self._note(request, context)
        for event in self._events(request.next_index, context):
            yield pb.ResumeResponse(event=event)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        self.requests.append(request)
        self._maybe_fail(0, context)
        return pb.AbortResponse()

    def Audit(self, request: pb.AuditRequest, context: grpc.ServicerContext) -> pb.AuditResponse:
        self.requests.append(request)
        self._maybe_fail(0, context)
        return self.audit

    def GetAuditCounts(
        self, request: pb.GetAuditCountsRequest, context: grpc.ServicerContext
    ) -> pb.GetAuditCountsResponse:
        self._maybe_fail(0, context)
        return self.audit_counts

    def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetModelInfoResponse:
        self.deadline_s = context.time_remaining()
        self._maybe_fail(0, context)
        return pb.GetModelInfoResponse(
            model="tiny", strategies=["ngram"], default_sampling=self.default_sampling
        )

    def _note(self, request: pb.GenerateRequest | pb.ResumeRequest, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))

    def _events(
        self, next_index: int, context: grpc.ServicerContext, max_tokens: int | None = None
    ) -> Iterator[pb.StreamEvent]:
        context.add_callback(self.cancelled.set)
        if self.silent:
            self._maybe_fail(self.fail_at, context)
        yield pb.StreamEvent(
            started=pb.Started(session_id=self.session_id, seed=2**63, prompt_tokens=5, model="tiny")
        )
        index = 0
        for number, chunk in enumerate(self.script):
            self._maybe_fail(number, context)
            token_ids = chunk.token_ids if max_tokens is None else chunk.token_ids[: max_tokens - index]
            size = len(token_ids)
            if index >= next_index and size:
                yield pb.StreamEvent(
                    chunk=pb.Chunk(
                        index=index,
                        token_ids=token_ids,
                        text=chunk.text,
                        from_draft=[chunk.from_draft] * size,
                        logprobs=[
                            pb.PositionLogprobs(
                                logprob=logprob,
                                top=[pb.TokenLogprob(token_id=token_id, logprob=logprob, token_bytes=data)],
                                token_bytes=data,
                            )
                            for token_id, logprob, data in zip(
                                token_ids, chunk.logprobs, chain(chunk.token_bytes, repeat(b"")), strict=False
                            )
                        ],
                    )
                )
            index += size
        stats = pb.SpeculationStats(rounds=2, drafted=4, verified=4, accepted=2, sources=self.sources)
        stats.proposals, stats.proposals_with_features = 2, 1
        stats.verified_by_rank.extend((3, 1))
        stats.accepted_by_rank.extend((1, 1))
        yield pb.StreamEvent(
            finished=pb.Finished(
                reason=self.reason,
                stop=self.stop,
                usage=pb.Usage(
                    prompt_tokens=5,
                    output_tokens=index,
                    accepted_prediction_tokens=self.accepted_prediction_tokens,
                ),
                speculation=stats,
                fingerprint="build-1",
            )
        )
        self._maybe_fail(len(self.script), context)

    def _maybe_fail(self, number: int, context: grpc.ServicerContext) -> None:
        if number != self.fail_at:
            return
        if self.hang:
            self.cancelled.wait()
        if self.error is not None and self.failures != 0:
            if self.failures is not None:
                self.failures -= 1
            context.set_trailing_metadata(((DETAILS_KEY, rich_status(self.error).SerializeToString()),))
            context.abort(code_of(self.error), message_of(self.error))


@contextlib.contextmanager
def serving(gateway: FakeGateway, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool)
        rpc.add_GenerationServicer_to_server(gateway, server)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            gateway.cancelled.set()
            server.stop(None).wait()
