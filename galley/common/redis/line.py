"""One connection to a Redis server on which the commands of all callers follow each other.

A step of the target confirms tokens of many sessions at once, and each is then committed. The commands of one
turn of the event loop go to the server in one write, and further turns do not wait for the replies. A reply
costs a callback: no task, timer or connection of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeAlias, cast

import hiredis
from redis import exceptions as redis_errors
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import DefaultParser

Command: TypeAlias = tuple[bytes | str | int, ...]
Done: TypeAlias = Callable[[object], None]
"""Takes the reply to a command, or the exception in its place; must not raise."""

_INCOMPLETE: Final = object()


class Line(asyncio.Protocol):
    """A connection that opens at the first command, and again after a loss; for one event loop.

    It has the class and arguments of the connections of `pool`, and is not one of them. It is lost if the
    server sends nothing for their `socket_timeout` while a command has no reply.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]  # is untyped
        self._silence_s: float = pool.connection_kwargs["socket_timeout"]
        self._opening: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._replies = _reader()
        self._waiting: list[tuple[bytes, Done]] = []
        self._unanswered: deque[Done] = deque()
        self._heard_s = 0.0
        """The loop's time of the last reply, or of the command that ended a silence."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._unanswered)

    def send(self, command: Command, done: Done) -> None:
        """Send a command with the others of this turn; call `done` in a later one.

        The exception in place of a reply is redis-py's, or an OSError if the connection fails.
        """
        packed = hiredis.pack_command(cast("Any", command))
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((packed, done))

    def reply(self, command: Command) -> asyncio.Future[object]:
        """Send a command and return its reply; it may be cancelled."""
        reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.send(command, partial(_settle, reply))
        return reply

    async def close(self) -> None:
        """Close the connection once all commands have their replies."""
        self._closed = asyncio.get_running_loop().create_future()
        self._close_if_idle()
        await self._closed
        await self._connection.disconnect(nowait=True)

    # --------------------------------------------------------------------------- connecting --

    async def _open(self) -> None:
        try:
            await self._connection.disconnect(nowait=True)  # redis-py has not seen that it was lost
            await self._connection.connect()
            transport = self._connection._writer.transport  # noqa: SLF001
            # redis-py's stream hears of a loss before this object reads. Nothing is to be read but an end.
            if transport.is_closing() or await self._connection.can_read():
                raise redis_errors.ConnectionError("the connection ended at once")  # noqa: TRY301
        except asyncio.CancelledError:
            self._fail(self._take_waiting(), redis_errors.ConnectionError("connecting was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001  # each caller gets it; none may hang
            self._fail(self._take_waiting(), error)
        else:
            # The server has accepted the credentials. From here on, this object reads instead of redis-py.
            self._replies, self._transport = _reader(), transport
            transport.set_protocol(self)
        finally:
            self._opening = None
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(self._take_unanswered(), redis_errors.ConnectionError(f"the connection ended: {exc}"))
        self._flush()

    def _lose(self, error: Exception) -> None:
        """Give up the connection: a later reply would be taken for that of another command."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(self._take_unanswered(), error)

    def _fail(self, commands: Iterable[Done], error: Exception) -> None:
        for done in commands:
            done(error)
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closed is None or self._closed.done() or not self.is_idle:
            return
        if self._transport is not None:
            self._transport.abort()
            return  # to be continued in connection_lost
        if self._timer is not None:
            self._timer.cancel()
        self._closed.set_result(None)

    # ------------------------------------------------------------------ commands and replies --

    def _flush(self) -> None:
        if not self._waiting or self._opening is not None:
            return
        if self._transport is None:
            self._opening = asyncio.create_task(self._open())
        elif not self._transport.is_closing():  # else connection_lost follows
            if not self._unanswered:
                self._watch()
            packed = b"".join([packed for packed, _ in self._waiting])
            self._unanswered.extend(self._take_waiting())
            self._transport.write(packed)

    def data_received(self, data: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        self._replies.feed(data)
        try:
            while (reply := self._replies.gets()) is not _INCOMPLETE:
                self._unanswered.popleft()(reply)
        except (redis_errors.InvalidResponse, IndexError) as error:
            self._lose(redis_errors.ConnectionError(f"the server sent what is no reply: {error}"))
        self._close_if_idle()

    def _take_waiting(self) -> list[Done]:
        taken, self._waiting = self._waiting, []
        return [done for _, done in taken]

    def _take_unanswered(self) -> Iterable[Done]:
        taken, self._unanswered = self._unanswered, deque()
        return taken

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._silence_s, self._check)

    def _check(self) -> None:
        """Lose the connection after a silence; one timer serves all commands meanwhile."""
        loop, self._timer = asyncio.get_running_loop(), None
        if not self._unanswered:
            return
        left_s = self._heard_s + self._silence_s - loop.time()
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._check)
        else:
            self._lose(redis_errors.TimeoutError("the server does not reply"))


def _settle(future: asyncio.Future[object], reply: object) -> None:
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


def _reader() -> hiredis.Reader:
    return hiredis.Reader(
        protocolError=redis_errors.InvalidResponse,
        replyError=DefaultParser.parse_error,
        notEnoughData=_INCOMPLETE,
    )
