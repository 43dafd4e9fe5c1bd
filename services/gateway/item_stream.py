"""Many items over one bidirectional stream: cheaper for each than a call (docs/decisions/007).

Items of all sessions share the stream to a pool. What comes while a message is being written goes into the
next one together. Giving up an item tells the pool; a stream that breaks fails what is open, and the next
item opens a new one.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import grpc

from services.common.pb.galley.v1 import galley_pb2 as pb
from services.core.errors import Unavailable

ItemT = TypeVar("ItemT", pb.VerifyItem, pb.ProposeItem)
AnswerT = TypeVar("AnswerT", pb.VerifyAnswer, pb.ProposeAnswer)

# Items are joined up to this, well below what any pool takes in one message; one alone may be larger.
MAX_JOINED_BYTES = 64 * 1024

MakeRequest: TypeAlias = Callable[[list[ItemT], list[pb.ItemRef]], object]


class OpenCall(Protocol):
    """Opens the stream: a grpc.aio multi-callable."""

    def __call__(self) -> grpc.aio.StreamStreamCall[Any, Any]:
        """A new stream."""


class ItemStream(Generic[ItemT, AnswerT]):
    """One pool's stream; opened when first needed."""

    def __init__(self, open_call: OpenCall, request: MakeRequest[ItemT]) -> None:
        """`request` makes a message of items and of references to those that are given up."""
        self._open_call = open_call
        self._request: MakeRequest[ItemT] = request
        self._ids = itertools.count(1)
        self._current: _Connection[ItemT, AnswerT] | None = None

    async def ask(self, item: ItemT) -> AnswerT:
        """The answer to `item`, whose `request_id` becomes one of the stream's own.

        Raises grpc.aio.AioRpcError or Unavailable if the stream breaks first; cancelling gives the item up.
        """
        item.slice.request_id = next(self._ids)
        connection = self._current
        if connection is None or connection.broken:
            connection = self._current = _Connection(self._open_call(), self._request)
        return await connection.ask(item)

    async def close(self) -> None:
        """End the stream."""
        if self._current is not None:
            await self._current.close()


class _Connection(Generic[ItemT, AnswerT]):
    """One life of the stream."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Any, Any],
        request: MakeRequest[ItemT],
    ) -> None:
        self.broken = False
        self._call = call
        self._request: MakeRequest[ItemT] = request
        self._open: dict[int, asyncio.Future[AnswerT]] = {}
        self._items: list[ItemT] = []
        self._given_up: list[pb.ItemRef] = []
        self._work = asyncio.Event()
        # Not in the context of the session that happened to come first: its span and log fields are its own.
        background = contextvars.Context()
        self._tasks = [
            asyncio.create_task(work, context=background.copy()) for work in (self._write(), self._read())
        ]

    async def ask(self, item: ItemT) -> AnswerT:
        request_id = item.slice.request_id
        future: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._open[request_id] = future
        self._items.append(item)
        self._work.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._given_up.append(pb.ItemRef(session_id=item.slice.session_id, request_id=request_id))
            self._work.set()
            raise
        finally:
            self._open.pop(request_id, None)

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
                while self._items or self._given_up:
                    given_up, self._given_up = self._given_up, []
                    await self._call.write(self._request(self._next_items(), given_up))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                self._call.cancel()  # if it is not over anyway, whose reason the reader learns
                return

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

    async def _read(self) -> None:
        try:
            async for response in self._call:
                for answer in response.answers:
                    future = self._open.get(answer.request_id)
                    if future is not None and not future.done():
                        future.set_result(answer)
        except grpc.aio.AioRpcError as error:
            self._break(error)
        finally:
            self._break(Unavailable("the stream to the pool has ended"))
            self._tasks[0].cancel()

    def _break(self, error: Exception) -> None:
        self.broken = True
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
