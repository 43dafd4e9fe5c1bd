"""The gRPC service of the gateway. Invalid requests are rejected before any work is done for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import grpc
from structlog.contextvars import bind_contextvars

from galley.common.wire.codec import logprobs_message
from galley.core.admission.admission import AdmissionSlot
from galley.core.answer.answer import Chunk, Ending, NumericsChanged, Reason, SessionSpec
from galley.core.errors import Broken
from galley.core.names import STRATEGIES
from galley.core.session import events as ev
from galley.core.session.events import Clock
from galley.core.session.machine import Session
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.gateway.auth.authentication import caller
from services.gateway.clock import SECOND
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.targets import TargetPool
from services.gateway.request.threads import PromptThreads
from services.gateway.request.validate import (
    Limits,
    Model,
    PromptRefused,
    body_hash,
    check_model,
    check_priority,
    parse_generate,
    parse_resume,
    parse_session_id,
    session_id_for,
    tenant_salt_for,
)
from services.gateway.session.runner import SessionRunner
from services.gateway.session.streams import Pump, Streams
from services.gateway.telemetry.observer import RequestObserver, RequestObservers

if TYPE_CHECKING:
    from galley.common.models.tokenizer import Tokenizer


_REASONS = {
    Reason.STOP: pb.Finished.REASON_STOP,
    Reason.LENGTH: pb.Finished.REASON_LENGTH,
    Reason.ABORTED: pb.Finished.REASON_ABORTED,
}
_STATS = tuple(pb.SpeculationStats.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, its pools and limits. `default_k` and `default_strategy` hold in mode AUTO."""

    name: str
    targets: TargetPool
    tokenizer: Tokenizer
    drafts: DraftPool
    limits: Limits
    max_sessions: int
    default_k: int
    default_strategy: str

    @property
    def info(self) -> pb.GetTargetInfoResponse:
        return self.targets.info

    def request_model(self) -> Model:
        """Return the model that requests are validated against, with all strategies until a draft was met."""
        return Model(
            self.name,
            self.info.context_window,
            self.info.vocab_size,
            self.drafts.strategies or STRATEGIES,
            tuple(self.info.eos_token_ids),
            self.default_k,
            self.default_strategy,
        )

    def describe(self) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model=self.name,
            context_window=self.info.context_window,
            vocab_size=self.info.vocab_size,
            tokenizer_hash=self.info.tokenizer_hash,
            fingerprint=self.info.fingerprint,
            deterministic=self.info.deterministic,
            max_draft_tokens=self.limits.max_draft_tokens,
            strategies=self.drafts.strategies,
            dtype=self.info.dtype,
            device=self.info.device,
            max_sessions=self.max_sessions,
        )


@dataclass(frozen=True, slots=True)
class GenerationServicer(rpc.GenerationServicer):
    """Serve `galley.v1.Generation`; `address` (host:port) names the gateway in traces."""

    streams: Streams
    model: ServedModel
    clock: Clock
    id_secret: bytes
    observers: RequestObservers
    address: str = ""
    prompt_threads: PromptThreads = field(default_factory=PromptThreads)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Start a session, or join the one of the same idempotency key."""
        with self.observers.stream(request, context, self.model.name, self.address) as observer:
            principal = caller()
            check_priority(request.priority, principal.limits.max_priority)
            with self.streams.admit(principal) as slot:
                deadline_ns = self._deadline_ns(context)
                await self.streams.reserve(slot, self._max_output_tokens(request), deadline_ns)
                runner = await self._begin(request, slot, deadline_ns)
                async with aclosing(self._stream(runner, slot, context, observer)) as events:
                    async for event in events:
                        yield pb.GenerateResponse(event=event)

    async def Resume(
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ResumeResponse]:
        with (
            self.observers.stream(request, context, self.model.name, self.address) as observer,
            self.streams.admit(caller()) as slot,  # `claim` reserves what the answer still needs
        ):
            parsed = parse_resume(request)
            _name_in_logs(parsed.session_id)
            runner = await self.streams.claim(
                slot, parsed.session_id, parsed.next_index, parsed.seen_hash, self._deadline_ns(context)
            )
            async with aclosing(self._stream(runner, slot, context, observer)) as events:
                async for event in events:
                    yield pb.ResumeResponse(event=event)

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AbortResponse:
        self.observers.unary()
        session_id = parse_session_id(request.session_id)
        _name_in_logs(session_id)
        await self.streams.abort(session_id, caller().name, self._deadline_ns(context))
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        check_model(request.model, self.model.request_model())
        return self.model.describe()

    async def _begin(
        self, request: pb.GenerateRequest, slot: AdmissionSlot, deadline_ns: int | None
    ) -> SessionRunner:
        """Check the request and store its session, or join the stored one; return its runner."""
        principal = slot.principal.name
        try:
            spec, hashed = await self.prompt_threads.run(principal, partial(self._parse, request))
        except PromptRefused as error:
            self.streams.charge(slot, error.tokens)
            raise
        session_id = session_id_for(principal, request.idempotency_key, self.id_secret)
        _name_in_logs(session_id)
        salt = tenant_salt_for(principal, self.id_secret)
        spec = replace(spec, session_id=session_id, arrival_ns=time.time_ns(), tenant_salt=salt)
        return await self.streams.create(slot, spec, hashed, deadline_ns)

    def _parse(self, request: pb.GenerateRequest) -> tuple[SessionSpec, bytes]:
        model = self.model
        spec = parse_generate(
            request, model.limits, model.tokenizer, model.request_model(), partial(secrets.randbits, 64)
        )
        return spec, body_hash(request)

    def _max_output_tokens(self, request: pb.GenerateRequest) -> int:
        most = request.max_tokens if request.HasField("max_tokens") else self.model.limits.default_max_tokens
        return min(most, self.model.info.context_window)

    def _deadline_ns(self, context: grpc.aio.ServicerContext[Any, Any]) -> int | None:
        remaining_s = cast("float | None", context.time_remaining())  # None where the call has no deadline
        return None if remaining_s is None else self.clock.now_ns() + int(remaining_s * SECOND)

    async def _stream(
        self,
        runner: SessionRunner,
        slot: AdmissionSlot,
        context: grpc.aio.ServicerContext[Any, Any],
        observer: RequestObserver,
    ) -> AsyncGenerator[pb.StreamEvent, None]:
        pump = Pump(runner, context, self.streams, slot)
        try:
            yield _started(runner.session, self.model.name)
            while not isinstance(item := await runner.outbox.next(), ev.End):
                observer.sending(item)
                yield _item(item)
            observer.sending(item)
            yield _finished(runner.session, _ending(item))
        finally:
            pump.leave()


def _name_in_logs(session_id: str) -> None:
    """Add the session to all log lines of this call; each call has its own context."""
    bind_contextvars(session_id=session_id)


def _ending(end: ev.End) -> Ending:
    if end.ending is None:
        raise end.error or Broken("a stream ended without a reason")
    return end.ending


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


def _item(value: Chunk | NumericsChanged) -> pb.StreamEvent:
    if isinstance(value, NumericsChanged):
        return pb.StreamEvent(
            numerics_changed=pb.NumericsChanged(index=value.index, fingerprint=value.fingerprint)
        )
    return pb.StreamEvent(
        chunk=pb.Chunk(
            index=value.index,
            token_ids=value.tokens,
            text=value.text,
            from_draft=[value.from_draft] * len(value.tokens),
            logprobs=[logprobs_message(entry) for entry in value.logprobs],
        )
    )


def _finished(session: Session, ending: Ending) -> pb.StreamEvent:
    message = pb.Finished(
        reason=_REASONS[ending.reason],
        usage=pb.Usage(
            prompt_tokens=len(session.spec.prompt),
            output_tokens=session.logged_output,
        ),
        speculation=pb.SpeculationStats(**{name: getattr(session.stats, name) for name in _STATS}),
        fingerprint=session.answer.fingerprint or "",
    )
    if isinstance(ending.matched, str):
        message.stop = ending.matched
    elif ending.matched is not None:
        message.stop_token_id = ending.matched
    return pb.StreamEvent(finished=message)
