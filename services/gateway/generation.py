"""The calls of clients: start, resume and abort sessions. gRPC and HTTP translate to and from this.

Invalid requests are rejected before any work is done for them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from structlog.contextvars import bind_contextvars

from galley.common.fair_threads import FairThreads
from galley.common.wire.handlers import text_metadata
from galley.core.admission.admission import AdmissionSlot
from galley.core.admission.attempts import ATTEMPT_KEY, Attempt
from galley.core.answer.answer import SessionSpec
from galley.core.audit import AuditReport
from galley.core.errors import InvalidField, LogLost, NotFinished, UnknownSession
from galley.core.names import STRATEGIES
from galley.core.session.events import Clock
from galley.core.store import StoredSession
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.audit.auditor import Auditor
from services.gateway.auth.authentication import caller
from services.gateway.client_call import ClientCall
from services.gateway.clock import SECOND
from services.gateway.learning.collector import Collector
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.targets import TargetPool
from services.gateway.request.grammars import Grammars
from services.gateway.request.validate import (
    Limits,
    Model,
    PromptRefused,
    body_hash,
    check_priority,
    parse_generate,
    parse_resume,
    parse_session_id,
    session_id_for,
    tenant_salt_for,
)
from services.gateway.session.runner import SessionRunner
from services.gateway.session.streams import AnswerStream, PreparedClaim, Streams
from services.gateway.telemetry.observer import RequestObserver, RequestObservers

if TYPE_CHECKING:
    from galley.common.models.tokenizer import Tokenizer

_T = TypeVar("_T")
_SEED_BITS = 52
"""Bits of a drawn seed: as a double, which JavaScript reads, it and those of further choices are the same."""
SHORT_BYTES = 1024
FEW_MESSAGES = 16


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
    grammars: Grammars
    default_sampling: pb.SamplingParams | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held for each slice of long work on answers, so that together they take one slice before others."""

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
            tuple(self.info.lora_adapters),
            tuple(self.info.eos_token_ids),
            self.default_k,
            self.default_strategy,
            self.default_sampling,
            tuple(self.info.grammar_kinds),
            self.grammars.compile,
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
            default_sampling=self.default_sampling,
            lora_adapters=self.info.lora_adapters,
        )

    def name_of(self, spec: SessionSpec) -> str:
        """Return the name of the model that answers a session: its adapter, or the served model."""
        return spec.lora or self.name


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request with the hash that recognizes its repeats; its spec has no session id yet."""

    spec: SessionSpec
    body_hash: bytes
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Generation:
    """The calls of clients; `address` (host:port) names the gateway in traces."""

    streams: Streams
    model: ServedModel
    clock: Clock
    id_secret: bytes
    observers: RequestObservers
    auditor: Auditor
    address: str = ""
    prompt_threads: FairThreads = field(default_factory=FairThreads)
    collector: Collector | None = None

    @asynccontextmanager
    async def generate(self, request: pb.GenerateRequest, call: ClientCall) -> AsyncIterator[AnswerStream]:
        """Start a session, or join the one of the same idempotency key."""
        with self.observe(request, call), self.admit(request, call) as [slot]:
            deadline_ns = self.deadline_ns(call)
            await self.reserve([request], [slot], deadline_ns)
            runner = await self.begin(await self.check(request, slot), slot, deadline_ns)
            with AnswerStream(runner, call, self.streams, slot) as answer:
                yield answer

    @asynccontextmanager
    async def resume(self, request: pb.ResumeRequest, call: ClientCall) -> AsyncIterator[AnswerStream]:
        """Continue the session of a stream that was cut off."""
        with self.observe(request, call), self.hold_slots(call) as [slot]:
            deadline_ns = self.deadline_ns(call)
            claims = await self.prepare_claims([request], [slot], deadline_ns)
            runner = await self.claim(claims.pop(), deadline_ns)
            with AnswerStream(runner, call, self.streams, slot) as answer:
                yield answer

    async def abort(self, session_id: str, call: ClientCall) -> None:
        """End a session permanently."""
        self.observers.unary()
        session_id = parse_session_id(session_id)
        bind_contextvars(session_id=session_id)
        await self.streams.abort(session_id, caller(), self.deadline_ns(call))

    async def delete(self, session_id: str, call: ClientCall) -> None:
        """End a session of the caller permanently, and remove it from the store and from what is learned."""
        self.observers.unary()
        # First: if this fails, a repeated call still finds the session.
        await self.unlearn(session_id, is_recent=True)
        await self.streams.delete(session_id, caller(), self.deadline_ns(call))

    async def unlearn(self, session_id: str, *, is_recent: bool) -> None:
        """Remove a session from what drafts are trained on, which outlasts the store's sessions.

        With `is_recent`, also one that is not added yet: it must be a session of the caller.
        """
        if self.collector is not None:
            with suppress(InvalidField, UnknownSession):
                await self.collector.remove(parse_session_id(session_id), caller(), is_recent=is_recent)

    async def audit(self, session_id: str, call: ClientCall) -> AuditReport:
        """Have a target compute a finished session of the caller again, and compare it with its log.

        Charge its tokens. Raise UnknownSession, NotFinished, Overloaded or Unavailable.
        """
        self.observers.unary()
        session_id, principal = parse_session_id(session_id), caller()
        bind_contextvars(session_id=session_id)
        with self.streams.admit_audit(principal):
            try:
                stored = await self.streams.read(session_id, principal, self.deadline_ns(call))
            except LogLost:
                return await self.auditor.damaged(session_id)
            if stored.state != "finished":
                self.streams.charge_read(stored, principal)
                raise NotFinished(session_id)
            self.streams.charge_audit(stored, principal)
            return await self.auditor.audit(stored)

    # ----------------------------------------------------------------------- the parts of a call --

    def observe(
        self, request: pb.GenerateRequest | pb.ResumeRequest, call: ClientCall
    ) -> AbstractContextManager[RequestObserver]:
        return self.observers.stream(request, call, self.model.name, self.address)

    def check_choices(self, prompts: int, n: int) -> None:
        """Raise InvalidField if the caller can never have a slot for each answer of a request."""
        most = self.streams.most(caller())
        if n > most:
            raise InvalidField("n", f"must be <= {most} (most streams of one caller), got {n}")
        if prompts > most // n:
            bound = f"must have <= {most // n} entries with n={n} ({most} streams of one caller at most)"
            raise InvalidField("prompt", f"{bound}, got {prompts}")

    def check_resumed_choices(self, choices: int) -> None:
        """Raise InvalidField if the caller can never have a slot for each answer that a session has."""
        most = self.streams.most(caller())
        if choices > most:
            bound = f"must have <= {most} answers (most streams of one caller)"
            raise InvalidField("session_id", f"{bound}, got {choices}")

    def admit(
        self, request: pb.GenerateRequest, call: ClientCall, sessions: int = 1
    ) -> AbstractContextManager[Sequence[AdmissionSlot]]:
        """Hold a slot for each session that answers the request. Raise Overloaded, or InvalidField."""
        check_priority(request.priority, caller().limits.max_priority)
        return self.hold_slots(call, sessions)

    @contextmanager
    def hold_slots(self, call: ClientCall, sessions: int = 1) -> Iterator[Sequence[AdmissionSlot]]:
        """Hold a slot for each session of a call. Raise Overloaded, or InvalidField.

        Of resumed ones, `prepare_claims` reserves what the answers still need.
        """
        attempt = _attempt_of(call)
        with ExitStack() as held:
            slots = [held.enter_context(self.streams.admit(caller())) for _ in range(sessions)]
            for slot in slots:
                slot.attempt = attempt
            yield slots

    async def reserve(
        self, requests: Sequence[pb.GenerateRequest], slots: Sequence[AdmissionSlot], deadline_ns: int | None
    ) -> None:
        """Reserve the most output tokens of each request. Raise Overloaded or StoreUnavailable."""
        await self.streams.reserve(slots, [*map(self._max_output_tokens, requests)], deadline_ns)

    async def check_all(
        self, requests: Sequence[pb.GenerateRequest], slots: Sequence[AdmissionSlot]
    ) -> list[Request]:
        """Return the checked requests of a call, each with its slot. Raise as `check` does.

        If a request is refused, charge those before it, too.
        """
        checked: list[Request] = []
        try:
            for request, slot in zip(requests, slots, strict=True):
                checked.append(await self.check(request, slot))
        except BaseException:  # also if the client leaves
            self.streams.charge(slots[0], sum(map(_tokens_of, checked)))
            raise
        return checked

    async def check(self, request: pb.GenerateRequest, slot: AdmissionSlot) -> Request:
        """Return the checked request, tokenized. Raise InvalidField, Unimplemented or GrammarsUnavailable."""
        work = partial(self._check, request)
        return await self.tokenize(work, _tokens_of, slot, in_thread=not _is_short(request))

    async def tokenize(
        self, work: Callable[[], _T], tokens_of: Callable[[_T], int], slot: AdmissionSlot, *, in_thread: bool
    ) -> _T:
        """Return `work()`, which tokenizes a prompt, in a thread if it may take long. Raise what it raises.

        Charge the slot for a prompt that is refused, or whose client leaves, after it was tokenized.
        """

        def abandoned(done: asyncio.Future[_T]) -> None:
            if done.cancelled():  # the gateway stops
                return
            error = done.exception()
            if error is None:
                self.streams.charge(slot, tokens_of(done.result()))
            elif isinstance(error, PromptRefused):
                self.streams.charge(slot, error.tokens)

        try:
            if not in_thread:
                return work()
            return await self.prompt_threads.run(slot.principal.name, work, abandoned)
        except PromptRefused as error:
            self.streams.charge(slot, error.tokens)
            raise

    async def begin(
        self,
        request: Request,
        slot: AdmissionSlot,
        deadline_ns: int | None,
        session_id: str = "",
        stored: Mapping[str, bytes] | None = None,
    ) -> SessionRunner:
        """Store the session of a request, or join the stored one; return its runner.

        A new session keeps the fields `stored`, too.
        """
        principal = slot.principal.name
        session_id = session_id or session_id_for(principal, request.idempotency_key, self.id_secret)
        bind_contextvars(session_id=session_id)
        salt = tenant_salt_for(principal, self.id_secret)
        spec = replace(request.spec, session_id=session_id, arrival_ns=time.time_ns(), tenant_salt=salt)
        return await self.streams.create(slot, spec, request.body_hash, deadline_ns, stored or {})

    async def prepare_claims(
        self, requests: Sequence[pb.ResumeRequest], slots: Sequence[AdmissionSlot], deadline_ns: int | None
    ) -> list[PreparedClaim]:
        """Check the requests and their sessions, and reserve what all of their answers still need."""
        resumes = [*map(parse_resume, requests)]
        bind_contextvars(session_id=resumes[0].session_id)
        return await self.streams.prepare_claims(slots, resumes, deadline_ns)

    async def claim(self, claim: PreparedClaim, deadline_ns: int | None) -> SessionRunner:
        """Take over a session; return its runner."""
        bind_contextvars(session_id=claim.resume.session_id)
        return await self.streams.claim(claim, deadline_ns)

    def admit_reading_call(self, call: ClientCall, *, to_end: bool = False) -> None:
        """Hold a slot for `read` until the call has ended: its response is sent. Raise Overloaded.

        A caller in debt is refused, unless it reads a session `to_end` it.
        """
        held = ExitStack()
        held.enter_context(self.streams.admit_answer(caller(), to_end=to_end))
        call.add_done_callback(lambda _: held.close())

    async def read(self, session_id: str, call: ClientCall) -> StoredSession:
        """Return a session of the caller as the store holds it, within a slot."""
        self.observers.unary()
        session_id = parse_session_id(session_id)
        bind_contextvars(session_id=session_id)
        return await self.streams.read(session_id, caller(), self.deadline_ns(call))

    def _check(self, request: pb.GenerateRequest) -> Request:
        model = self.model
        spec = parse_generate(
            request,
            model.limits,
            model.tokenizer,
            model.request_model(),
            partial(secrets.randbits, _SEED_BITS),
        )
        return Request(spec, body_hash(request), request.idempotency_key)

    def _max_output_tokens(self, request: pb.GenerateRequest) -> int:
        most = request.max_tokens if request.HasField("max_tokens") else self.model.limits.default_max_tokens
        return min(most, self.model.info.context_window)

    def deadline_ns(self, call: ClientCall) -> int | None:
        remaining_s = call.time_remaining()
        return None if remaining_s is None else self.clock.now_ns() + int(remaining_s * SECOND)


def _attempt_of(call: ClientCall) -> Attempt | None:
    """Return the call's place in its stream, None if its client did not tell it. Raise InvalidField."""
    text = text_metadata(call).get(ATTEMPT_KEY)
    try:
        return None if text is None else Attempt.parse(text)
    except ValueError as error:
        raise InvalidField(ATTEMPT_KEY, str(error)) from None


def _tokens_of(request: Request) -> int:
    """Return how many tokens a request is charged for when its session starts."""
    return len(request.spec.prompt) + len(request.spec.prediction)


def _is_short(request: pb.GenerateRequest) -> bool:
    """Return True if the request needs no thread: it is parsed and tokenized in less than a millisecond.

    A thread begins and ends in several turns of a busy event loop. So in a thread the short prompts of one
    principal would wait for each other much longer than they take.
    """
    return (
        request.ByteSize() <= SHORT_BYTES
        and len(request.messages.messages) <= FEW_MESSAGES
        and not request.HasField("structured_output")
    )
