"""Run the choices of a request: each is a session of its own, and all have one client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from opentelemetry import trace

from galley.common.tracing.telemetry import traceparent_of
from galley.core.admission.admission import AdmissionSlot
from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.content import RunningHash
from galley.core.session.machine import Session
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.generation import Generation, Request
from services.gateway.http.api.format import Format, choice_id
from services.gateway.http.api.positions import START, Position, position_before
from services.gateway.http.api.rounds import Rounds
from services.gateway.http.transport.http_call import HttpCall
from services.gateway.session.runner import SessionRunner
from services.gateway.session.streams import AnswerStream
from services.gateway.telemetry.interceptor import RequestTracer
from services.gateway.telemetry.observer import RequestObserver, observe_with

_T = TypeVar("_T")
_SEEDS = 1 << 64


class Choice:
    """One answer of a request while it is sent: its session, and the place that it has reached."""

    def __init__(
        self, index: int, session: Session, position: Position, rounds: Rounds | None = None
    ) -> None:
        self.index = index
        self.session = session
        self.rounds = rounds
        self.position = position
        self._hash: RunningHash | None = None

    @property
    def has_advanced(self) -> bool:
        """Return False before the first chunk.

        Until then, the answer may have fewer tokens than the client: a store can lose the latest, which a
        target then computes again.
        """
        return self._hash is not None

    def begin(self) -> None:
        self.position = replace(self.position, has_begun=True)

    def advance(self, chunk: Chunk) -> None:
        if self._hash is None:
            self._hash = RunningHash(self.session.answer.output[: chunk.index])
        self._hash.add(chunk.tokens)
        self.position = Position(
            chunk.index + len(chunk.tokens), self._hash.digest(), has_begun=True, has_ended=False
        )

    def end(self) -> None:
        if not self.position.seen_hash:
            self.position = position_before(self.position.index, self.session.answer.output)
        self.position = replace(self.position, has_begun=True, has_ended=True)


class Reader(Protocol):
    """Take the answers of a request; called for one choice at a time."""

    async def begin(self, choices: Sequence[Choice]) -> None:
        """Begin the response; all sessions have begun."""

    async def item(self, choice: Choice, item: Chunk | NumericsChanged) -> None: ...

    async def end(self, choice: Choice, answer: AnswerStream) -> None: ...


@dataclass(frozen=True, slots=True)
class ChoiceRunner:
    """Run the choices of requests; `tracer` is None where traces are off."""

    generation: Generation
    tracer: RequestTracer | None = None

    async def generate(
        self,
        requests: Sequence[pb.GenerateRequest],
        form: Format,
        call: HttpCall,
        reader: Reader,
        complete: Callable[[], Awaitable[Mapping[str, bytes]]],
    ) -> None:
        """Answer each request `form.n` times.

        `complete` is called once the requests are admitted: it sets what takes long to translate, and returns
        further fields that the first session keeps. Raise what refuses a request, or ends a session.
        """
        generation = self.generation
        with generation.observe(requests[0], call) as observer, ExitStack() as held:
            generation.check_choices(len(requests), form.n)
            admit = generation.admit
            slots = [slot for one in requests for slot in held.enter_context(admit(one, call, form.n))]
            deadline_ns = generation.deadline_ns(call)
            each = [requests[index // form.n] for index in range(len(slots))]
            await generation.reserve(each, slots, deadline_ns)
            stored = await complete()
            checked = await generation.check_all(requests, slots[:: form.n])
            body_hash = form.body_hash(b"".join(one.body_hash for one in checked), stored)
            keyed = replace(checked[0], body_hash=body_hash)
            fields = {**form.stored, **stored}
            first = await generation.begin(keyed, slots[0], deadline_ns, stored=fields)

            def begin(index: int) -> Awaitable[SessionRunner]:
                spec = _spec_of(checked[index // form.n], first.session, index, form.n)
                return generation.begin(
                    spec, slots[index], deadline_ns, choice_id(first.session.spec.session_id, index)
                )

            group = _Group(self, call, reader, slots, [START] * form.choices, form.n, form.rounds)
            await group.run(first, observer, each.__getitem__, begin)

    async def resume(
        self,
        session_id: str,
        form: Format,
        positions: Sequence[Position],
        call: HttpCall,
        since_ns: int,
        reader: Reader,
    ) -> None:
        """Continue the choices of a request at these places; its call came at `since_ns`."""
        generation = self.generation

        requests = [
            pb.ResumeRequest(
                session_id=choice_id(session_id, index), next_index=at.index, seen_hash=at.seen_hash
            )
            for index, at in enumerate(positions)
        ]
        with generation.observe(requests[0], call) as observer, ExitStack() as held:
            generation.check_resumed_choices(form.choices)
            slots = held.enter_context(generation.hold_slots(call, form.choices))
            for slot in slots:
                slot.since_ns = since_ns  # before its session was read, which may have waited for the store
            deadline_ns = generation.deadline_ns(call)
            claims = dict(enumerate(await generation.prepare_claims(requests, slots, deadline_ns)))

            def claim(index: int) -> Awaitable[SessionRunner]:
                return generation.claim(claims.pop(index), deadline_ns)  # it holds the token log

            group = _Group(self, call, reader, slots, positions, 1, form.rounds)
            await group.run(await claim(0), observer, requests.__getitem__, claim)

    def traced(self, call: HttpCall) -> AbstractAsyncContextManager[None]:
        """Give a further choice an observer of its own, in the context of its task."""
        if self.tracer is not None:
            return self.tracer.stream(call, call.span_attributes)
        observe_with(RequestObserver())
        return nullcontext()


def _spec_of(request: Request, first: Session, index: int, n: int) -> Request:
    """Return the request of a choice: it has the first one's seed, plus its number among its prompt's."""
    sampling = replace(request.spec.sampling, seed=(first.spec.sampling.seed + index % n) % _SEEDS)
    return replace(request, spec=replace(request.spec, sampling=sampling))


@dataclass(slots=True)
class _Group:
    """The choices of one request; those beyond the first run in tasks of their own."""

    of: ChoiceRunner
    call: HttpCall
    reader: Reader
    slots: Sequence[AdmissionSlot]
    positions: Sequence[Position]
    n: int
    keeps_rounds: bool
    _choices: dict[int, Choice] = field(default_factory=dict)
    _all_begun: asyncio.Event = field(default_factory=asyncio.Event)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _first_items: dict[int, asyncio.Event] = field(default_factory=dict)
    _has_failed: bool = False

    async def run(
        self,
        first: SessionRunner,
        observer: RequestObserver,
        request: Callable[[int], pb.GenerateRequest | pb.ResumeRequest],
        begin: Callable[[int], Awaitable[SessionRunner]],
    ) -> None:
        if len(self.slots) == 1:
            await self._follow(0, first, self.call, observer)
            return
        span = observer.context
        parent = traceparent_of(span) if span != trace.INVALID_SPAN_CONTEXT else ""

        async def other(index: int) -> None:
            call = self.call.beside(parent)
            try:
                async with self.of.traced(call):
                    with self.of.generation.observe(request(index), call) as own:
                        await self._follow(index, await begin(index), call, own)
            finally:
                call.ended()

        async with _one_error(), asyncio.TaskGroup() as tasks:
            for index in range(1, len(self.slots)):
                tasks.create_task(other(index))
            await self._follow(0, first, self.call, observer)

    async def _follow(
        self, index: int, runner: SessionRunner, call: HttpCall, observer: RequestObserver
    ) -> None:
        session, streams = runner.session, self.of.generation.streams
        kept = observer.keep_rounds() if self.keeps_rounds else None
        rounds = None if kept is None else Rounds(kept, len(session.spec.prompt))
        choice = self._choices[index] = Choice(index, session, self.positions[index], rounds)
        await self._begin()
        try:
            await self._wait_for_prompt(index)
        except asyncio.CancelledError:
            if session.spec.continue_without_client and not self._has_failed:  # as those that do not wait
                with AnswerStream(runner, call, streams, self.slots[index]):
                    pass
            raise
        try:
            with AnswerStream(runner, call, streams, self.slots[index]) as answer:
                async for item in answer:
                    async with self._turn:
                        await self.reader.item(choice, item)
                    self._first_item(index).set()
                answer.stop_watching()  # the connection watches, also while other choices go on
                async with self._turn:
                    await self.reader.end(choice, answer)
        except Exception:
            self._has_failed = True
            raise
        finally:
            self._first_item(index).set()

    async def _begin(self) -> None:
        """Begin the response once all choices have a session."""
        if len(self._choices) < len(self.slots):
            await self._all_begun.wait()
            return
        await self.reader.begin([self._choices[index] for index in range(len(self.slots))])
        self._all_begun.set()

    async def _wait_for_prompt(self, index: int) -> None:
        """Wait for the first token of the prompt's first choice: then the target has cached the prompt."""
        if index % self.n:
            await self._first_item(index - index % self.n).wait()

    def _first_item(self, index: int) -> asyncio.Event:
        return self._first_items.setdefault(index, asyncio.Event())


@asynccontextmanager
async def _one_error() -> AsyncIterator[None]:
    """Raise the first error of a group of tasks as itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
