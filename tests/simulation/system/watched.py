"""Instruments of a gateway: they check what it streams, raises, admits and counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc

from galley.common.server.interceptors import StatusInterceptor
from galley.common.wire.handlers import Behavior, Handler, WrappingInterceptor, wrap_handler
from galley.core.admission.admission import Admission, AdmissionSlot, Principal
from galley.core.answer.answer import Answer, SessionSpec
from galley.core.errors import (
    Broken,
    GalleyError,
    InvalidField,
    KeyReused,
    LogLost,
    Overloaded,
)
from galley.core.records import TokenRecord
from galley.core.routing import breaker as breakers
from galley.core.routing.breaker import Breaker
from galley.core.session import events as ev
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.auth.authentication import Authentication, Credentials, PrincipalInterceptor
from services.gateway.client_call import client_call
from services.gateway.clock import SECOND
from services.gateway.replicas.draft_session import DraftSession
from services.gateway.replicas.drafts import DraftPool, DraftReplica
from services.gateway.replicas.target_session import TargetSession
from services.gateway.replicas.targets import TargetReplica
from services.gateway.servicer import GenerationServicer
from services.gateway.session.replay import Replays
from services.gateway.session.runner import SessionRunner
from services.gateway.session.streams import Streams
from tests.simulation.ledger import Ledger
from tests.simulation.system.call import current_call
from tests.simulation.system.loop import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

_SERVICE = "/galley.v1.Generation/"
_REFUSALS = (InvalidField, LogLost, KeyReused, Overloaded)
"""Errors of calls that never owned the session: if the response was lost, until another took it."""


def behind(
    world: World, process: Process, servicer: GenerationServicer, serve_http: object
) -> SimpleNamespace:
    streamed: dict[str, Any] = {"Generate": servicer.Generate, "Resume": servicer.Resume}
    handlers: dict[str, Handler] = {
        name: grpc.unary_stream_rpc_method_handler(it) for name, it in streamed.items()
    }
    handlers["Abort"] = grpc.unary_unary_rpc_method_handler(servicer.Abort)
    handlers["Delete"] = grpc.unary_unary_rpc_method_handler(partial(_delete, servicer))
    for interceptor in (Watch(world, process), PrincipalInterceptor(Keys(world)), StatusInterceptor()):
        handlers = {name: interceptor.wrap(it, _SERVICE + name) for name, it in handlers.items()}
    methods = {name: it.unary_stream or it.unary_unary for name, it in handlers.items()}
    return SimpleNamespace(Http=serve_http, **methods)


async def _delete(servicer: GenerationServicer, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
    """Delete a session, as the HTTP port does for a response."""
    await servicer.generation.delete(request.session_id, client_call(context))
    return pb.AbortResponse()


class Keys(Authentication):
    """Authenticate a principal whose key is its name."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._known = {principal.name: principal for principal in world.schedule.principals}

    async def authenticate(self, credentials: Credentials) -> Principal:
        return self._known[credentials.key]


class Watch(WrappingInterceptor):
    """Check the tokens that a servicer streams against the log, and the errors that it raises."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def wrap(self, handler: Handler, method: str) -> Handler:
        return wrap_handler(handler, unary=self._unary, stream=self._stream)

    def _unary(self, behavior: Behavior) -> Behavior:
        async def watched(request: object, context: Any) -> Any:
            try:
                return await behavior(request, context)
            except Exception as error:
                self.raised(error)
                self.refused(error, Sent(self._world.ledger))
                raise

        return watched

    def _stream(self, behavior: Behavior) -> Behavior:
        async def watched(request: object, context: Any) -> AsyncIterator[Any]:
            sent = Sent(self._world.ledger)
            context.on_abort = partial(self._aborted, sent)
            try:
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        if self._process.alive:
                            sent.check(response.event)
                        yield response
            except Exception as error:
                self.raised(error)
                self.refused(error, sent)
                raise

        return watched

    def refused(self, error: Exception, sent: Sent) -> None:
        """Violate a rule if a call that was refused has changed a session: its owner, its log or its end.

        A call that has started its stream is refused only if the client has not the tokens that it names.
        """
        ledger, call = self._world.ledger, current_call()
        refusals = (InvalidField, LogLost) if sent.session_id else _REFUSALS
        if not isinstance(error, refusals) or sent.has_tokens or call is None or not call.has_changed:
            return
        # A log that the store has lost is claimed to compute it again, which tells what the client has.
        lost = isinstance(error, LogLost) and sent.session_id in ledger.forgotten
        if not (lost or ledger.roll_backs or ledger.damaged):
            ledger.violate(f"{call.near.name} was refused, but has changed a session: {error!r}")

    def raised(self, error: Exception) -> None:
        self._world.ledger.met[f"client: {type(error).__name__}"] += 1
        is_wrong = isinstance(error, InvalidField) and error.field != "next_index"  # of a wrong Resume
        if not isinstance(error, GalleyError) or isinstance(error, Broken) or is_wrong:
            self._world.ledger.violate(f"{self._process.name}: a call raised {error!r}")

    def _aborted(self, sent: Sent, code: grpc.StatusCode, details: str) -> None:
        if self._process.alive:
            self._world.ledger.note(f"{self._process.name} sends {code.name}: {details}")
            if "left unread" in details:
                self._world.ledger.met["client: Unread"] += 1
                self._world.ended_unread(self._process.name, sent.session_id)


class Sent:
    def __init__(self, ledger: Ledger) -> None:
        self.session_id = ""
        self.has_tokens = False
        self._ledger = ledger
        self._announced: int | None = None

    def check(self, event: pb.StreamEvent) -> None:
        match event.WhichOneof("event"):
            case "started":
                self.session_id = event.started.session_id
            case "numerics_changed":
                self._announced = event.numerics_changed.index
            case "chunk":
                self.has_tokens = True
                index, tokens = event.chunk.index, list(event.chunk.token_ids)
                self._ledger.streamed(self.session_id, index, tokens, current_call())
                is_new = self._announced == index
                self._ledger.announced(self.session_id, index, index + len(tokens), is_new=is_new)
            case _:
                pass


class CheckedAdmission(Admission):
    """Check that the sums of slots agree and that no slot is released twice."""

    ledger: Ledger

    def enter(self, principal: Principal, now: int, *, is_saturated: bool = False) -> AdmissionSlot:
        slot = super().enter(principal, now, is_saturated=is_saturated)
        self._check()
        return slot

    def leave(self, slot: AdmissionSlot, now: int) -> None:
        super().leave(slot, now)
        self._check()

    def _check(self) -> None:
        held = [account.held for account in self._accounts.values()]
        bounds = [(account.limits.max_sessions, account.held) for account in self._accounts.values()]
        over = any(most is not None and has > most for most, has in bounds)
        if over or min(held, default=0) < 0 or not sum(held) == self.held <= self._slots:
            self.ledger.violate(f"{self.held} of {self._slots} slots are held, by each {held}")


class CountedReplays(Replays):
    """Count the tokens that a gateway replays in each turn of the event loop."""

    def watch(self, ledger: Ledger, address: str) -> None:
        self._ledger, self._address = ledger, address

    async def _append(self, answer: Answer, entries: Iterable[tuple[int, TokenRecord]]) -> None:
        await super()._append(answer, self._counted(entries))

    def _counted(self, entries: Iterable[tuple[int, TokenRecord]]) -> Iterator[tuple[int, TokenRecord]]:
        loop: Any = asyncio.get_running_loop()
        task = hash(asyncio.current_task())
        for entry in entries:
            self._ledger.replayed(self._address, loop.turns, task)
            yield entry


class CountedStreams(Streams):
    def watch(self, ledger: Ledger, address: str) -> None:
        self._ledger, self._address = ledger, address
        for name in ("_admission", "_aborts"):
            checked = CheckedAdmission(getattr(self, name)._slots, getattr(self, name)._what)
            checked.ledger = ledger
            setattr(self, name, checked)
        self._replays = CountedReplays(self._replays._decode)
        self._replays.watch(ledger, address)

    def keep(self, work: asyncio.Task[None], slot: AdmissionSlot, used: Callable[[], int]) -> None:
        self._ledger.met["went on alone"] += 1
        super().keep(work, slot, used)

    @contextmanager
    def running(self, runner: SessionRunner) -> Iterator[None]:
        with super().running(runner), self._ledger.running(runner.log.owner):
            yield

    @property
    def left(self) -> int:
        return self._admission.held + self._aborts.held + len(self._running)


class CountedDrafts(DraftPool):
    ledger: Ledger

    def failed(self, draft: DraftReplica, breaker: Breaker, attempt: int) -> None:
        before = breaker._open_until
        super().failed(draft, breaker, attempt)
        if breaker._open_until is not None and breaker._open_until != before:
            pause_ns = min(breaker._open_until - self._clock.now_ns(), breakers.LONGEST_PAUSE_NS)
            self.ledger.rests(draft.address, pause_ns / SECOND)


class CountedDraft(DraftSession):
    ledger: Ledger

    def _look_up(
        self, spec: SessionSpec, request: ev.Propose, failed: ev.Failed
    ) -> ev.Proposed | ev.CacheMissed | ev.Failed:
        answer = super()._look_up(spec, request, failed)
        self.ledger.met["guessed by a gateway"] += isinstance(answer, ev.Proposed) and bool(answer.tokens)
        return answer


class CountedTarget(TargetSession):
    ledger: Ledger

    def other_with_prefix(
        self, spec: SessionSpec, request: ev.Verify, at: TargetReplica
    ) -> TargetReplica | None:
        other = super().other_with_prefix(spec, request, at)
        self.ledger.met["hedged request"] += other is not None
        return other

    def move_to(self, target: TargetReplica, reason: str) -> None:
        self.ledger.met[f"another target has {reason}"] += 1
        super().move_to(target, reason)
