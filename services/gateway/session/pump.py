"""Run a session beside the call that streams it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from galley.common.logs import get_logger, level_of, log_internal
from galley.common.wire import status
from galley.core.admission.admission import AdmissionSlot
from galley.core.errors import Broken, ClientStalled, GalleyError
from galley.core.session import events as ev
from services.gateway.session.runner import SessionRunner
from services.gateway.session.streams import Streams
from services.gateway.telemetry.observer import request_observer

_log = get_logger(__name__)


class Pump:
    """Run a session in a task of its own, while the call's handler reads its outbox.

    gRPC takes no item while what it has is unread. If that lasts for as long as a client may take, the
    session stops and the call ends, and with it its place; its status waits in gRPC for the client. Once the
    client has left, the session stops, or continues to its end without a reader.
    """

    def __init__(
        self,
        runner: SessionRunner,
        context: grpc.aio.ServicerContext[Any, Any],
        streams: Streams,
        place: AdmissionSlot,
    ) -> None:
        self._runner = runner
        self._context = context
        self._streams = streams
        self._place = place
        self._output_before = runner.session.answer.output_len
        self._has_left = False
        self._handler = asyncio.current_task()
        self._observer = request_observer()
        self._observer.hold()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._observer.release())
        self._unread_end: asyncio.Task[None] | None = None
        # gRPC may drop the generator when the client leaves, but it always reports the end of the call.
        context.add_done_callback(self._call_ended)  # type: ignore[arg-type]  # the stubs want a class

    def leave(self) -> None:
        """Note that nobody reads any more. The session keeps the place until it has stopped or is done."""
        if self._has_left:
            return
        self._has_left = True
        self._place.used = self._used()
        if self._task.done():
            return
        self._streams.keep(self._task, self._place, self._used)
        if self._runner.session.spec.continue_without_client:
            self._runner.outbox.discard()
        else:
            self._task.cancel()

    def _used(self) -> int:
        return self._runner.session.answer.output_len - self._output_before

    def _call_ended(self, ctx: object, /) -> None:  # noqa: ARG002  # the signature that grpc calls
        self.leave()
        if self._unread_end is not None:
            self._unread_end.cancel()

    async def _run(self) -> None:
        with self._streams.running(self._runner):
            try:
                end = await self._runner.run()
            except Exception as raised:  # noqa: BLE001  # whatever it is, the client must not wait for ever
                _log.error("session failed", exc_info=raised)
                fault = Broken(f"the session runner raised {type(raised).__name__}")
                end = ev.End(error=raised if isinstance(raised, GalleyError) else fault)
        if self._has_left:
            level, error = level_of(end.error), end.error and str(end.error)
            _log.log(level, "session finished after its client left", error=error)
            return
        self._runner.outbox.end(end)
        self._unread_end = asyncio.create_task(self._end_if_unread(end))

    async def _end_if_unread(self, end: ev.End) -> None:
        """End the call if its client does not read the end, with the status that the end would have had."""
        if not isinstance(end.error, ClientStalled):
            await self._runner.outbox.left_unread()
        error = end.error or self._runner.outbox.stalled_error()
        log_internal(error)
        self._observer.failed(error)
        if self._handler is not None:
            self._handler.cancel()
        with suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            await status.abort(self._context, error)
