"""One call over the simulated network, seen from both ends; `wire.py` states its rules."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc

from galley.common.wire.status import code_of, message_of
from galley.core.admission.attempts import ATTEMPT_KEY
from tests.simulation.system.loop import Process
from tests.simulation.system.network import Connection, Network

_REFUSED = "failed to connect to all addresses"
_ROOM = 2
"""Responses of a server stream that the transport takes before the client has read them."""


class Kind(enum.Enum):
    UNARY = "one request, one response"
    STREAM = "one request, many responses"
    BOTH = "many of both"
    HTTP = "one request, and a response in parts"


_IN_TURN = (Kind.STREAM, Kind.HTTP)  # a tuple, because the hash of an enum's member is slow


class Server:
    def __init__(self, process: Process, servicer: Any) -> None:
        self.process = process
        self.servicer = servicer


def error_of(
    code: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, Any]] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


class SimContext:
    """The parts of `grpc.aio.ServicerContext` in use; `finish` returns True if it sent a status."""

    def __init__(self, metadata: tuple[tuple[str, str], ...], timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self.finish: Callable[[BaseException], bool] = lambda _: False
        self.on_abort: Callable[[grpc.StatusCode, str], None] = lambda _, __: None
        self.hang_up: Callable[[], None] = lambda: None
        self._metadata = metadata
        self.attempt = dict(metadata).get(ATTEMPT_KEY, "")
        self._until_s = None if timeout_s is None else loop.time() + timeout_s
        self._callbacks: list[Callable[[object], None]] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        if self._until_s is None:
            return None
        return max(0.0, self._until_s - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._callbacks.append(callback)

    def ended(self, _handler: object) -> None:
        for callback in self._callbacks:
            callback(self)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, Any]] = ()
    ) -> NoReturn:
        """End the call with this status and raise AbortError, or UsageError if it has a status already."""
        cancelled = code is grpc.StatusCode.CANCELLED
        end = asyncio.CancelledError() if cancelled else error_of(code, details, trailing_metadata)
        if not self.finish(end):
            raise grpc.aio.UsageError("the call has ended already")
        self.on_abort(code, details)
        raise grpc.aio.AbortError


class Call(Connection):
    """One call on a connection of its own, seen from both ends."""

    def __init__(
        self,
        network: Network,
        servers: Mapping[str, Server],
        client: Process,
        address: str,
        method: str,
        kind: Kind,
        context: SimContext,
    ) -> None:
        super().__init__(network, client, address)
        self._servers = servers
        self._method = method
        self._kind = kind
        self._context = context
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._responses: deque[Any] = deque()
        self._there = asyncio.Event()
        self._end: BaseException | None = None
        self._handler: asyncio.Task[None] | None = None
        self._given_up = False
        self._room = _ROOM
        self._unsent: deque[tuple[Any, asyncio.Future[None]]] = deque()
        self._status: BaseException | None = None
        self._status_sent = False
        self.began_s = asyncio.get_running_loop().time()
        self.ended_s: float | None = None
        """When it ended for its client."""
        self.looks_newer = False
        """Whether it waited at a frozen server, which takes it for newer than it is."""
        self.stream = context.attempt.partition("-")[0]
        """The stream that it is an attempt of, if its client told it."""
        self.came_late = False
        """Whether its client had given it up before it came."""
        self.has_changed = False
        """Whether the store has a new owner by it."""
        context.finish = self._finish
        context.hang_up = self._hang_up

    @property
    def waits(self) -> bool:
        """Return True if its client still waits for what it brings."""
        return self.ended_s is None and self.near.alive

    def begin(self) -> None:
        if self._network.is_down(self.near.name, self.far):
            wait_s = self._network.keepalive_s
            self._gone[True] = True
            refused = error_of(grpc.StatusCode.UNAVAILABLE, _REFUSED)
            asyncio.get_running_loop().call_later(wait_s, self._end_with, refused)
            self.close()
        self.send(self._accept, forth=True)

    async def write(self, request: object) -> None:
        if self._end is not None:
            raise asyncio.InvalidStateError("the call is over")
        self.send_request(request)

    def send_request(self, request: object) -> None:
        self.send(lambda: self._requests.put_nowait(request), forth=True)

    def expire(self) -> None:
        if self._end is None:
            self.send(self._cancel_handler, forth=True)
            self._end_with(error_of(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def cancel(self) -> bool:
        if self._end is not None:
            return False
        self.send(self._cancel_handler, forth=True)
        self._end_with(asyncio.CancelledError())
        return True

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        while not self._responses:
            if self._end is not None:
                raise self._end
            self._there.clear()
            await self._there.wait()
        if self._kind in _IN_TURN:
            self.send(self._make_room, forth=True)
        return self._responses.popleft()

    def _take(self, response: object) -> None:
        if self._end is None:
            self._responses.append(response)
            self._there.set()

    def _end_with(self, end: BaseException) -> None:
        if self._end is None:
            self._end = end
            self.ended_s = asyncio.get_running_loop().time()
            self._there.set()

    def near_broke(self, reason: str) -> None:
        self._end_with(error_of(grpc.StatusCode.UNAVAILABLE, reason))

    def far_broke(self) -> None:
        self._cancel_handler()

    def _accept(self) -> None:
        server = self._servers.get(self.far)
        if server is None or not server.process.alive:
            self._gone[False] = True
            self.give_up(_REFUSED, near=True)
            return
        self.server = server.process
        self.looks_newer = server.process.frozen_until > self.began_s
        self.came_late = self.ended_s is not None
        self._handler = server.process.spawn(self._handle(getattr(server.servicer, self._method)))
        # What follows the end of a call is the server's work, though the client's message started the call.
        server.process.call(self._handler.add_done_callback, self._context.ended)

    def _cancel_handler(self) -> None:
        self._given_up = True
        if self._handler is not None:
            self._handler.cancel()

    async def _handle(self, serve: Any) -> None:
        _CALL.set(self)
        try:
            await self._serve(serve)
        except asyncio.CancelledError:
            if self.server is not None and self.server.alive:
                self._was_cancelled()
            raise
        except grpc.aio.AbortError:
            return
        except Exception as error:  # noqa: BLE001  # the outermost guard of a call
            self._finish(error_of(code_of(error), message_of(error)))
        else:
            self._finish(StopAsyncIteration())

    async def _serve(self, serve: Any) -> None:
        match self._kind:
            case Kind.UNARY:
                self._respond(await serve(await self._requests.get(), self._context))
            case Kind.STREAM:  # cancelling the handler does not close the iterator
                async for response in serve(await self._requests.get(), self._context):
                    await self._respond_in_turn(response)
            case Kind.HTTP:
                await serve(await self._requests.get(), self._context, self._respond_in_turn)
            case Kind.BOTH:
                async with aclosing(serve(self._iterate(), self._context)) as responses:
                    async for response in responses:
                        self._respond(response)

    def _was_cancelled(self) -> None:
        if self._given_up:
            self._gone[False] = True
            if self._gone[True] or self._end is not None:
                self.close()
        else:  # by the servicer; a status that it sent before counts
            self._finish(asyncio.CancelledError())

    async def _iterate(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()

    def _respond(self, response: object) -> None:
        self.send(lambda: self._take(response), forth=False)

    async def _respond_in_turn(self, response: object) -> None:
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsent.append((response, taken))
        self._flow()
        await taken

    def _make_room(self) -> None:
        self._room += 1
        self._flow()

    def _flow(self) -> None:
        while self._unsent and self._room:
            response, taken = self._unsent.popleft()
            self._room -= 1
            self._respond(response)
            if not taken.done():
                taken.set_result(None)
        status = self._status
        if status is not None and not (self._unsent or self._status_sent):
            self._status_sent = True
            self.send(lambda: self._ended(status), forth=False)

    def _hang_up(self) -> None:
        """End the connection: what was not sent is lost."""
        self._unsent.clear()
        self._finish(error_of(grpc.StatusCode.UNAVAILABLE, "the server ended the connection"))

    def _finish(self, status: BaseException) -> bool:
        """Send the status unless one was sent before; return True if it is this one."""
        if self._status is not None:
            return False
        self._status = status
        self._flow()
        return True

    def _ended(self, status: BaseException) -> None:
        self._end_with(status)
        self.close()


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


def current_call() -> Call | None:
    """Return the call whose handler, or what it has left running, is running."""
    return _CALL.get()
