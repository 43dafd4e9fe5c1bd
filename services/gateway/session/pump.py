"""Between a session and the client that hears it: runs the one, hands over to the other."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from galley.common.logs import get_logger, level_of, log_internal
from galley.common.wire import status
from galley.core.admission.admission import AdmissionSlot
from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.errors import Broken, ClientStalled, GalleyError
from galley.core.session import events as ev
from services.gateway.session.runner import SessionRunner
from services.gateway.session.streams import Streams
from services.gateway.telemetry.observer import request_observer

_log = get_logger(__name__)


class Pump:
    """Runs a session in a task of its own and hands over what it sends, one item at a time.

    gRPC takes no item while what it has is unread. Where that lasts for `client_s`, the session is worked on
    no further and the call is ended: its handler, and with it its place; its status waits in gRPC for the
    client to read on. Once its client has left, the session stops, or goes on to its end with nobody to
    hear it.
    """

    def __init__(
        self,
        runner: SessionRunner,
        context: grpc.aio.ServicerContext[Any, Any],
        streams: Streams,
        place: AdmissionSlot,
        client_s: float,
    ) -> None:
        self._items: asyncio.Queue[Chunk | NumericsChanged | ev.End] = asyncio.Queue(maxsize=1)
        self._runner = runner
        self._context = context
        self._streams = streams
        self._place = place
        self._client_s = client_s
        self._before = runner.session.answer.output_len
        self._handed = asyncio.Event()
        self._left = False
        self._handler = asyncio.current_task()
        self._observer = request_observer()
        self._observer.trace.hold()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._observer.trace.release())
        self._last_word: asyncio.Task[None] | None = None
        # The generator may be left without a word when the client goes; the call's end is always told.
        context.add_done_callback(self._call_ended)  # type: ignore[arg-type]  # the stubs want a class

    async def next(self) -> Chunk | NumericsChanged | ev.End:
        """What is sent next, to be called once what came before is taken; End is the last."""
        item = await self._items.get()
        self._handed.set()
        return item

    def leave(self) -> None:
        """Nobody reads any more. The place is the session's until that has stopped, or is done."""
        if self._left:
            return
        self._left = True
        self._place.used = self._used()
        if self._task.done():
            return
        self._streams.keep(self._task, self._place, self._used)
        if not self._runner.session.spec.continue_without_client:
            self._task.cancel()
            return
        while not self._items.empty():  # whoever waits for room drops what it has
            self._items.get_nowait()

    def _used(self) -> int:
        """Output tokens of this call."""
        return self._runner.session.answer.output_len - self._before

    def _call_ended(self, ctx: object, /) -> None:  # noqa: ARG002  # the shape that grpc calls
        self.leave()
        if self._last_word is not None:
            self._last_word.cancel()

    async def _run(self) -> None:
        with self._streams.running(self._runner):
            end = await self._ended()
            if self._left:
                level, error = level_of(end.error), end.error and str(end.error)
                _log.log(level, "session finished after its client left", error=error)
                return
            self._last_word = asyncio.create_task(self._end_unless_read(end))
            await self._items.put(end)

    async def _ended(self) -> ev.End:
        try:
            return await self._runner.run(self._send)
        except Exception as error:  # noqa: BLE001  # whatever it is, a client must not wait for ever
            _log.error("session failed", exc_info=error)
            fault = f"a session's shell raised {type(error).__name__}"
            return ev.End(error=error if isinstance(error, GalleyError) else Broken(fault))

    async def _send(self, item: Chunk | NumericsChanged) -> None:
        if self._left:
            return
        if self._items.empty():
            self._items.put_nowait(item)
            return
        try:
            async with asyncio.timeout(self._client_s):
                await self._items.put(item)
        except TimeoutError:
            raise self._unread() from None

    def _unread(self) -> ClientStalled:
        return ClientStalled(f"the stream was left unread for {self._client_s:g} s; resume to go on")

    async def _left_unread(self) -> None:
        """Return once nothing has been read for as long as a client may take."""
        with suppress(TimeoutError):
            while True:
                self._handed.clear()
                async with asyncio.timeout(self._client_s):
                    await self._handed.wait()

    async def _end_unless_read(self, end: ev.End) -> None:
        """The session needs nobody any more, and its call must not wait for ever to say so.

        It says why the session ended, if not well: a client that was fenced is not told to resume.
        """
        if not isinstance(end.error, ClientStalled):
            await self._left_unread()
        error = end.error or self._unread()
        log_internal(error)
        self._observer.failed(error)
        if self._handler is not None:
            self._handler.cancel()
        with suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            await status.abort(self._context, error)
