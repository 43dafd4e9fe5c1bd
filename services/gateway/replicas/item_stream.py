"""Many items over one bidirectional stream: cheaper for each than a call (docs/decisions/007).

Items of all sessions share the stream to a pool. An item may have several answers, and be told more of
(extended) until the last of them. What comes while a message is being written goes into the next one
together. Giving up an item tells the pool; a stream that breaks fails what is open, and the next item opens a
new one. One that is outdated (its TLS files have changed) is left to the items that it has; the next go by a
new one.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import grpc

from galley.core.errors import Unavailable
from galley.pb.galley.v1 import galley_pb2 as pb

ItemT = TypeVar("ItemT", pb.VerifyItem, pb.ProposeItem)
AnswerT = TypeVar("AnswerT", pb.VerifyAnswer, pb.ProposeAnswer)

# Items are joined up to this, well below what any pool takes in one message; one alone may be larger.
MAX_JOINED_BYTES = 64 * 1024

MakeRequest: TypeAlias = Callable[[list[ItemT], list[pb.ItemRef], list[pb.Extension]], object]
More: TypeAlias = Callable[[AnswerT], bool]


class OpenCall(Protocol):
    """Opens the stream: a grpc.aio multi-callable."""

    def __call__(self) -> grpc.aio.StreamStreamCall[Any, Any]:
        """A new stream."""


class OpenItem(Generic[AnswerT]):
    """One item that has been sent, or will be as soon as the stream has room."""

    def __init__(self, connection: _Connection[Any, AnswerT], ref: pb.ItemRef) -> None:
        self._connection: _Connection[Any, AnswerT] = connection
        self._ref = ref
        self._answers: deque[AnswerT] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_answer(self) -> bool:
        """Whether one has come that is yet to be taken."""
        return bool(self._answers)

    async def next_answer(self) -> AnswerT:
        """Its next answer; not to be called after the last, nor twice at a time.

        Raises grpc.aio.AioRpcError or Unavailable if the stream breaks first.
        """
        while not self._answers:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._answers.popleft()

    def extend(self, extension: pb.Extension) -> None:
        """Tell the pool more of it, if it is still open. `extension` is named here."""
        extension.session_id, extension.request_id = self._ref.session_id, self._ref.request_id
        self._connection.extend(extension)

    def close(self) -> None:
        """Give it up, if it is still open."""
        self._connection.give_up(self._ref)

    def put(self, answer: AnswerT) -> None:
        """An answer has come."""
        self._answers.append(answer)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ItemStream(Generic[ItemT, AnswerT]):
    """One pool's stream; opened when first needed."""

    def __init__(
        self,
        open_call: OpenCall,
        request: MakeRequest[ItemT],
        more: More[AnswerT] = lambda _: False,
        generation: Callable[[], int] = lambda: 0,
    ) -> None:
        """`request` makes a message of items, references to those given up, and extensions.

        `more` tells whether an answer is not the last of its item; `generation` is another once a call would
        go by another connection.
        """
        self._open_call = open_call
        self._request: MakeRequest[ItemT] = request
        self._more: More[AnswerT] = more
        self._generation = generation
        self._generation_of_current = 0
        self._ids = itertools.count(1)
        self._current: _Connection[ItemT, AnswerT] | None = None
        self._left: list[_Connection[ItemT, AnswerT]] = []

    @property
    def broken(self) -> bool:
        """Whether it has ended since it was last opened, so that somebody else may answer the next item."""
        return self._current is not None and self._current.broken

    @property
    def outdated(self) -> bool:
        """Whether a new one would go by another connection."""
        return self._current is not None and self._generation() != self._generation_of_current

    def renew(self) -> None:
        """Have the next item open a new stream; this one ends when its items have."""
        left, self._current = self._current, None
        self._left = [connection for connection in self._left if not connection.broken]
        if left is not None and not left.broken:
            self._left.append(left)
            left.leave()

    def open(self, item: ItemT) -> OpenItem[AnswerT]:
        """Send `item`, whose `request_id` becomes one of the stream's own."""
        item.slice.request_id = next(self._ids)
        connection = self._current
        if connection is None or connection.broken:
            self._generation_of_current = self._generation()
            connection = self._current = _Connection(self._open_call(), self._request, self._more)
        return connection.open(item)

    async def ask(self, item: ItemT) -> AnswerT:
        """The one answer to `item`.

        Raises grpc.aio.AioRpcError or Unavailable if the stream breaks first; cancelling gives the item up.
        """
        opened = self.open(item)
        try:
            return await opened.next_answer()
        finally:
            opened.close()

    async def close(self) -> None:
        """End the stream."""
        connections = [*self._left, self._current]
        self._left = []
        for connection in connections:
            if connection is not None:
                await connection.close()


class _Connection(Generic[ItemT, AnswerT]):
    """One life of the stream."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Any, Any],
        request: MakeRequest[ItemT],
        more: More[AnswerT],
    ) -> None:
        self.broken = False
        self._is_left = False
        self._call = call
        self._request: MakeRequest[ItemT] = request
        self._more: More[AnswerT] = more
        self._open: dict[int, OpenItem[AnswerT]] = {}
        self._items: list[ItemT] = []
        self._given_up: list[pb.ItemRef] = []
        self._extensions: list[pb.Extension] = []
        self._work = asyncio.Event()
        # Not in the context of the session that happened to come first: its span and log fields are its own.
        background = contextvars.Context()
        self._tasks = [
            asyncio.create_task(work, context=background.copy()) for work in (self._write(), self._read())
        ]

    def open(self, item: ItemT) -> OpenItem[AnswerT]:
        request_id = item.slice.request_id
        opened = OpenItem(self, pb.ItemRef(session_id=item.slice.session_id, request_id=request_id))
        self._open[request_id] = opened
        self._items.append(item)
        self._work.set()
        return opened

    def extend(self, extension: pb.Extension) -> None:
        if extension.request_id in self._open:
            self._extensions.append(extension)
            self._work.set()

    def give_up(self, ref: pb.ItemRef) -> None:
        if self._open.pop(ref.request_id, None) is not None:
            self._given_up.append(ref)
            self._work.set()

    def leave(self) -> None:
        """End it in good order once all its items have their answers."""
        self._is_left = True
        self._work.set()

    async def close(self) -> None:
        self._break(Unavailable("the gateway is closing"))
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                while self._items or self._given_up or self._extensions:
                    await self._call.write(self._next_message())
                if self._is_left and not self._open:
                    await self._call.done_writing()
                    return
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                self._call.cancel()  # if it is not over anyway, whose reason the reader learns
                return

    def _next_message(self) -> object:
        items = self._next_items()
        given_up, self._given_up = self._given_up, []
        return self._request(items, given_up, self._next_extensions())

    def _next_items(self) -> list[ItemT]:
        """What goes into the next message: the items still wanted, and no more than a pool takes."""
        self._items = [item for item in self._items if item.slice.request_id in self._open]
        size, count = 0, 0
        for item in self._items:
            size += item.ByteSize()
            if count and size > MAX_JOINED_BYTES:
                break
            count += 1
        items, self._items = self._items[:count], self._items[count:]
        return items

    def _next_extensions(self) -> list[pb.Extension]:
        """Those of items that are open and have been sent, or go with them."""
        unsent = {item.slice.request_id for item in self._items}
        due = [extension for extension in self._extensions if extension.request_id in self._open]
        self._extensions = [extension for extension in due if extension.request_id in unsent]
        return [extension for extension in due if extension.request_id not in unsent]

    async def _read(self) -> None:
        try:
            async for response in self._call:
                for answer in response.answers:
                    self._put(answer)
        except grpc.aio.AioRpcError as error:
            self._break(error)
        finally:
            self._break(Unavailable("the stream to the pool has ended"))
            self._tasks[0].cancel()

    def _put(self, answer: AnswerT) -> None:
        """Answers to what has been given up or answered already are dropped."""
        opened = self._open.get(answer.request_id)
        if opened is None:
            return
        if not self._more(answer):
            del self._open[answer.request_id]
            if self._is_left:
                self._work.set()
        opened.put(answer)

    def _break(self, error: Exception) -> None:
        self.broken = True
        failed, self._open = self._open, {}
        for opened in failed.values():
            opened.fail(error)
