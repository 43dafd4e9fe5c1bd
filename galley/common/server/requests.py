"""Answering batches of items, by unary call and by stream alike: each by itself, none harmed by another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence, Sized
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from opentelemetry.trace import use_span

from galley.common.logs import log_internal
from galley.common.tracing.item_spans import ItemSpan
from galley.common.wire.status import item_status
from galley.core.errors import InvalidField, Unavailable
from galley.pb.galley.v1 import galley_pb2 as pb

I = TypeVar("I")  # noqa: E741  # item
A = TypeVar("A")

# Items of one stream that are not answered, or answered and not fetched: beyond, the stream is not read on.
# A message may have no more, either; those of a gateway are of 64 KiB.
MAX_OPEN_ITEMS = 1024
# Extensions, and items given up, in one message: nothing else is done while they are read.
_MAX_TOLD = 1 << 14


async def answer_or_status(
    answer: Coroutine[Any, Any, A],
    refuse: Callable[[pb.ItemStatus], A],
    session_id: str,
    span: ItemSpan,
) -> A:
    """The answer; or the status of what it raised, given to `refuse`, which the item's span tells too.

    Cancellation passes.
    """
    try:
        return await answer
    except Exception as error:  # noqa: BLE001  # one item must not fail its batch
        span.failed(error)
        with use_span(span.named):
            log_internal(error, session_id=session_id)
        return refuse(item_status(error))


async def answer_all(items: Sequence[I], answer: Callable[[I], Coroutine[Any, Any, A]]) -> list[A]:
    """The answer to each item, in order; begun in order. Cancelling cancels all. Raises InvalidField."""
    _check_count("items", items, MAX_OPEN_ITEMS)
    return list(await asyncio.gather(*(answer(item) for item in items)))


async def answer_stream(
    requests: AsyncIterator[Any],
    answer: Callable[[Any], Coroutine[Any, Any, A]],
    draining: asyncio.Event,
) -> AsyncGenerator[list[A]]:
    """`answers_stream` where every item has one answer."""

    async def only(item: Any) -> AsyncGenerator[A]:
        yield await answer(item)

    async with aclosing(answers_stream(requests, only, draining)) as batches:
        async for batch in batches:
            yield batch


async def answers_stream(
    requests: AsyncIterator[Any],
    answers: Callable[[Any], AsyncGenerator[A]],
    draining: asyncio.Event,
    extend: Callable[[Any], None] | None = None,
) -> AsyncGenerator[list[A]]:
    """Answers to the `items` of `requests` as they come, several at a time if several are there.

    An item may have any number of answers. `extend` takes the `extensions` of `requests`, after the items
    that came before them have begun. Ends with the requests. Once `draining`, it reads no further, gives the
    answers that are due, and raises Unavailable. What reading raises is raised after the answers due. Closing
    it cancels what is under way.
    """
    stream = _Stream(answers, extend)
    reader = asyncio.ensure_future(stream.read(requests))
    reader.add_done_callback(stream.wake)
    drain = asyncio.ensure_future(draining.wait())
    drain.add_done_callback(lambda _: reader.cancel())
    try:
        while batch := await stream.next_answers(reader):
            yield batch
        if draining.is_set():
            raise Unavailable("the replica is draining")
        reader.result()
    finally:
        drain.cancel()
        reader.cancel()
        await asyncio.gather(drain, reader, *stream.cancel(), return_exceptions=True)


class _Stream(Generic[I, A]):
    """The open items of one stream; an item has its place until its last answer is fetched."""

    def __init__(
        self, answers: Callable[[I], AsyncGenerator[A]], extend: Callable[[Any], None] | None
    ) -> None:
        self._answers = answers
        self._extend = extend
        self._room = asyncio.Semaphore(MAX_OPEN_ITEMS)
        self._open: set[asyncio.Task[None]] = set()
        # The newest item of a name is the one that giving up means.
        self._named: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._ready: list[A] = []
        self._ended_since = 0
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def read(self, requests: AsyncIterator[Any]) -> None:
        """Begin the items of all requests, as far as there is room, extend them, end those given up.

        Raises InvalidField.
        """
        async for request in requests:
            self._check(request)
            for item in request.items:
                await self._room.acquire()
                self._begin(item, (item.slice.session_id, item.slice.request_id))
            if request.items:
                await asyncio.sleep(0)  # their tasks have taken their first step then
            if self._extend is not None:
                for extension in request.extensions:
                    self._extend(extension)
            for given_up in request.cancelled:
                task = self._named.get((given_up.session_id, given_up.request_id))
                if task is not None:
                    task.cancel()

    def _check(self, request: Any) -> None:
        _check_count("items", request.items, MAX_OPEN_ITEMS)
        _check_count("cancelled", request.cancelled, _MAX_TOLD)
        if self._extend is not None:
            _check_count("extensions", request.extensions, _MAX_TOLD)

    def _begin(self, item: I, key: tuple[str, int]) -> None:
        task = asyncio.ensure_future(self._run(item))
        self._open.add(task)
        self._named[key] = task
        task.add_done_callback(lambda done: self._end(key, done))

    async def _run(self, item: I) -> None:
        async with aclosing(self._answers(item)) as answers:
            async for answer in answers:
                self._ready.append(answer)
                self._changed.set()

    async def next_answers(self, reader: asyncio.Task[None]) -> list[A]:
        """All that are there, at least one; none once the reader has ended and all are answered."""
        while not self._ready and self._failure is None and (self._open or not reader.done()):
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        ready, self._ready = self._ready, []
        self._free_places()
        return ready

    def wake(self, _: object) -> None:
        """Look again."""
        self._changed.set()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel what is open; the tasks, to be waited for."""
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        return tasks

    def _end(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if self._named.get(key) is task:
            del self._named[key]
        if not task.cancelled():
            self._failure = self._failure or task.exception()
        self._ended_since += 1
        if not self._ready:
            self._free_places()
        self._changed.set()

    def _free_places(self) -> None:
        """Those of the items that had ended when all answers were last fetched."""
        for _ in range(self._ended_since):
            self._room.release()
        self._ended_since = 0


def _check_count(field: str, entries: Sized, most: int) -> None:
    if len(entries) > most:
        raise InvalidField(field, f"must be at most {most}, got {len(entries)}")
