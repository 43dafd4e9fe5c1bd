"""Respond to batches of requests, by unary call and by stream: a request that fails harms no other.

A service gives one generator of responses for each request. It validates, submits and awaits, and yields a
status instead of raising.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from opentelemetry.trace import use_span

from galley.common.logs import log_internal
from galley.common.tracing.item_spans import ItemSpan
from galley.common.wire.status import item_status
from galley.core.content import Miss
from galley.core.errors import GalleyError, Unavailable, check_length
from galley.core.scheduler.messages import Superseded
from galley.pb.galley.v1 import galley_pb2 as pb

I = TypeVar("I")  # noqa: E741  # the message of one request
A = TypeVar("A")  # the message of one response
R = TypeVar("R")  # the outcome of a request that was served

# Most requests of a stream whose responses are not all sent; at this number the stream is not read. Also the
# most requests of a message.
MAX_OPEN_REQUESTS = 1024
# Most extensions, and most cancellations, of a message: nothing else is done while they are read.
_MAX_NOTICES = 1 << 14


def answer_of(
    kind: Callable[..., A],
    request: pb.SessionSlice,
    outcome: R | Miss | Superseded | GalleyError,
    result_of: Callable[[R], Message],
) -> A:
    """Return the answer to `request` with its outcome; raise the outcome if it is an error."""
    if isinstance(outcome, GalleyError):
        raise outcome
    if isinstance(outcome, Miss):
        fields: dict[str, Message] = {
            "cache_miss": pb.CacheMiss(have=outcome.have, prefix_hash=outcome.prefix_hash)
        }
    elif isinstance(outcome, Superseded):
        fields = {"superseded": pb.Superseded(position=outcome.position, prefix_hash=outcome.prefix_hash)}
    else:
        fields = {"result": result_of(outcome)}
    return kind(session_id=request.session_id, request_id=request.request_id, **fields)


def failure_status(error: Exception, session_id: str, span: ItemSpan) -> pb.ItemStatus:
    """Return the status of a request that failed; record it in its span and log an internal error."""
    span.failed(error)
    with use_span(span.log_span):
        log_internal(error, session_id=session_id)
    return item_status(error)


async def respond_all(items: Sequence[I], respond: Callable[[I], AsyncGenerator[A]]) -> list[A]:
    """Return the first response to each item, in order. Raise InvalidField if there are too many items."""
    check_length("items", items, MAX_OPEN_REQUESTS)
    return list(await asyncio.gather(*(_first(respond(item)) for item in items)))


async def _first(responses: AsyncGenerator[A]) -> A:
    async with aclosing(responses):
        return await anext(responses)


async def respond_stream(
    requests: AsyncIterator[Any],
    respond: Callable[[Any], AsyncGenerator[A]],
    draining: asyncio.Event,
    extend: Callable[[Any], None] | None = None,
) -> AsyncGenerator[list[A]]:
    """Yield the responses to the `items` of `requests` as they come, all that are ready at a time.

    `extend` takes the `extensions` of `requests`, after the items before them have started. Once `draining`,
    it reads no further, yields the responses that are due, and raises Unavailable. An error of reading is
    raised after the responses due. Closing the stream cancels its items.
    """
    stream = _Stream(respond, extend)
    reader = asyncio.ensure_future(stream.read(requests))
    reader.add_done_callback(stream.wake)
    drain = asyncio.ensure_future(draining.wait())
    drain.add_done_callback(lambda _: reader.cancel())
    try:
        while batch := await stream.next_responses(reader):
            yield batch
        if draining.is_set():
            raise Unavailable("the replica is draining")
        reader.result()
    finally:
        drain.cancel()
        reader.cancel()
        await asyncio.gather(drain, reader, *stream.cancel(), return_exceptions=True)


class _Stream(Generic[I, A]):
    """The open requests of one stream; each counts until its last response is taken."""

    def __init__(
        self, respond: Callable[[I], AsyncGenerator[A]], extend: Callable[[Any], None] | None
    ) -> None:
        self._respond = respond
        self._extend = extend
        self._room = asyncio.Semaphore(MAX_OPEN_REQUESTS)
        self._open: set[asyncio.Task[None]] = set()
        # A cancellation means the newest request of its id.
        self._by_id: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._ready: list[A] = []
        self._ended_count = 0
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def read(self, requests: AsyncIterator[Any]) -> None:
        """Start, extend and cancel items as the requests say, while there is room. Raise InvalidField."""
        async for request in requests:
            self._check(request)
            for item in request.items:
                await self._room.acquire()
                self._start(item, (item.slice.session_id, item.slice.request_id))
            if request.items:
                await asyncio.sleep(0)  # lets their tasks take the first step
            if self._extend is not None:
                for extension in request.extensions:
                    self._extend(extension)
            for cancelled in request.cancelled:
                task = self._by_id.get((cancelled.session_id, cancelled.request_id))
                if task is not None:
                    task.cancel()

    def _check(self, request: Any) -> None:
        check_length("items", request.items, MAX_OPEN_REQUESTS)
        check_length("cancelled", request.cancelled, _MAX_NOTICES)
        if self._extend is not None:
            check_length("extensions", request.extensions, _MAX_NOTICES)

    def _start(self, item: I, key: tuple[str, int]) -> None:
        task = asyncio.ensure_future(self._run(item))
        self._open.add(task)
        self._by_id[key] = task
        task.add_done_callback(lambda done: self._end(key, done))

    async def _run(self, item: I) -> None:
        async with aclosing(self._respond(item)) as responses:
            async for response in responses:
                self._ready.append(response)
                self._changed.set()

    async def next_responses(self, reader: asyncio.Task[None]) -> list[A]:
        """Return all that are ready, at least one; none once the reader and all requests have ended."""
        while not self._ready and self._failure is None and (self._open or not reader.done()):
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        ready, self._ready = self._ready, []
        self._free_room()
        return ready

    def wake(self, _: object) -> None:
        self._changed.set()

    def cancel(self) -> list[asyncio.Task[None]]:
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        return tasks

    def _end(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if self._by_id.get(key) is task:
            del self._by_id[key]
        if not task.cancelled():
            self._failure = self._failure or task.exception()
        self._ended_count += 1
        if not self._ready:
            self._free_room()
        self._changed.set()

    def _free_room(self) -> None:
        for _ in range(self._ended_count):
            self._room.release()
        self._ended_count = 0
