"""The gRPC face of the gateway: requests in, streams out. Refusals happen before any work is done."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from opentelemetry import trace
from structlog.contextvars import bound_contextvars

from services.common.logs import get_logger
from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
from services.core import events as ev
from services.core.errors import Broken, GalleyError
from services.gateway import events_pb
from services.gateway.patience import SECOND
from services.gateway.principals import ANONYMOUS, session_id_for
from services.gateway.validation import check_model, parse_generate, parse_resume, parse_session_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from services.core.answer import Chunk, Ending, NumericsChanged
    from services.core.ports import Clock
    from services.gateway.model import ServedModel
    from services.gateway.runner import SessionRunner
    from services.gateway.streams import Streams

_log = get_logger(__name__)
_tracer = trace.get_tracer("galley.gateway")


@dataclass(frozen=True, slots=True)
class GenerationServicer(rpc.GenerationServicer):
    """`services.gateway.streams` does the work."""

    streams: Streams
    model: ServedModel
    clock: Clock
    id_secret: bytes

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Start a session, or join the one of the same idempotency key."""
        with self.streams.admit():
            # In a thread: a long prompt takes the tokenizer longer than other streams should wait.
            asked = await asyncio.to_thread(
                parse_generate,
                request,
                self.model.limits,
                self.model.tokenizer,
                self.model.request_model(),
                _draw_seed,
            )
            session_id = session_id_for(ANONYMOUS, asked.idempotency_key, self.id_secret)
            spec = self.model.spec(asked, session_id, time.time_ns())
            deadline_ns = self._deadline_ns(context)
            runner = await self.streams.create(spec, ANONYMOUS, asked.body_hash, deadline_ns)
            async for event in self._stream(runner, context, "generate"):
                yield pb.GenerateResponse(event=event)

    async def Resume(
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ResumeResponse]:
        """Take over a session and go on from the client's index."""
        with self.streams.admit():
            asked = parse_resume(request)
            runner = await self.streams.claim(
                asked.session_id, ANONYMOUS, asked.next_index, asked.seen_hash, self._deadline_ns(context)
            )
            async for event in self._stream(runner, context, "resume"):
                yield pb.ResumeResponse(event=event)

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AbortResponse:
        """End a session for good."""
        session_id = parse_session_id(request.session_id)
        await self.streams.abort(session_id, ANONYMOUS, self._deadline_ns(context))
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        """What is served."""
        check_model(request.model, self.model.request_model())
        return self.model.describe()

    def _deadline_ns(self, context: grpc.aio.ServicerContext[Any, Any]) -> int | None:
        remaining_s = cast("float | None", context.time_remaining())  # None where the call has no deadline
        return None if remaining_s is None else self.clock.now_ns() + int(remaining_s * SECOND)

    async def _stream(
        self, runner: SessionRunner, context: grpc.aio.ServicerContext[Any, Any], name: str
    ) -> AsyncIterator[pb.StreamEvent]:
        """The events of a session; its work ends with the call, whichever way the call ends."""
        session_id = runner.session.spec.session_id
        span = _tracer.start_span(name, attributes={"galley.session_id": session_id})
        # Current only where nothing is yielded: a generator may be closed in another context than its own.
        current = partial(trace.use_span, span)
        with bound_contextvars(session_id=session_id):
            with current():
                pump = _Pump(runner, self.streams)
            # The generator may be left without a word when the client goes; the call's end is always told.
            context.add_done_callback(pump.leave_with)  # type: ignore[arg-type]  # the stubs want a class
            try:
                yield events_pb.started(runner.session, self.model.name)
                while not isinstance(item := await pump.next(), ev.End):
                    yield events_pb.item(item)
                with current():
                    ending = _ending(item)
                yield events_pb.finished(runner.session, ending)
            finally:
                pump.leave()
                span.end()


def _ending(end: ev.End) -> Ending:
    """How the answer ended; raises what kept it from ending."""
    _log.info("stream ended", error=end.error and str(end.error))
    if end.ending is None:
        raise end.error or Broken("a stream ended without a reason")
    return end.ending


def _draw_seed() -> int:
    return secrets.randbits(64)


class _Pump:
    """Runs a session in a task of its own and hands over what it sends, one item at a time.

    Once its client has left, the session stops, or goes on to its end with nobody to hear it.
    """

    def __init__(self, runner: SessionRunner, streams: Streams) -> None:
        self._items: asyncio.Queue[Chunk | NumericsChanged | ev.End] = asyncio.Queue(maxsize=1)
        self._streams = streams
        self._goes_on = runner.session.spec.continue_without_client
        self._left = False
        self._task = asyncio.create_task(self._run(runner))

    async def next(self) -> Chunk | NumericsChanged | ev.End:
        return await self._items.get()

    def leave(self) -> None:
        """Nobody reads any more."""
        if self._left:
            return
        self._left = True
        if not self._goes_on:
            self._task.cancel()
        elif not self._task.done():
            self._streams.keep(self._task)
            while not self._items.empty():  # whoever waits for room drops what it has
                self._items.get_nowait()

    def leave_with(self, ctx: object, /) -> None:  # noqa: ARG002  # the shape that grpc calls
        self.leave()

    async def _put(self, item: Chunk | NumericsChanged | ev.End) -> None:
        if not self._left:
            await self._items.put(item)

    async def _run(self, runner: SessionRunner) -> None:
        with self._streams.running(runner):
            end = await self._ended(runner)
            if self._left:
                _log.info("session ended without its client", error=end.error and str(end.error))
            await self._put(end)

    async def _ended(self, runner: SessionRunner) -> ev.End:
        try:
            return await runner.run(self._put)
        except Exception as error:  # noqa: BLE001  # whatever it is, a client must not wait for ever
            _log.error("session failed", exc_info=error)
            fault = f"a session's shell raised {type(error).__name__}"
            return ev.End(error=error if isinstance(error, GalleyError) else Broken(fault))
