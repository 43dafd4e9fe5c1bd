"""What callers ask of one server at the same moment goes there in one write, and comes back in one read.

A pass of the target confirms tokens of many sessions at once, and each of them is then logged. One at a time,
taking a connection and waiting for it cost several times what the server does for a commit; together they
cost little more than one.

A batch has a connection of its own from the pool, from its writing until its last reply is read, whoever of
its callers has left by then: a connection with an unread reply is never given back. The replies are in the
order of the commands, so an error reply is its own caller's alone; a connection that fails fails them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from hiredis import pack_command
from redis import exceptions as redis_errors
from redis.asyncio import ConnectionPool

Command = tuple[bytes | str | int, ...]
Replies = list[object]

_MOST = 64
"""Commands of a batch: what more there is goes over another connection."""


@dataclass(frozen=True, slots=True)
class _Asked:
    commands: Sequence[Command]
    replies: asyncio.Future[Replies]


class Batches:
    """Of the server that the connections of `pool` lead to; for one event loop."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._waiting: list[_Asked] = []
        self._running: set[asyncio.Task[None]] = set()

    async def ask(self, commands: Sequence[Command]) -> Replies:
        """The replies to commands that go over one connection, in order; error replies among them.

        Several go by themselves: one of them may be a WAIT, and all that came after it would wait too.

        Raises redis-py's errors or OSError where the connection fails. A caller that is cancelled leaves the
        others theirs.
        """
        loop = asyncio.get_running_loop()
        asked = _Asked(commands, loop.create_future())
        if len(commands) > 1:
            self._start([asked])
        else:
            if not self._waiting:
                loop.call_soon(self._begin)
            self._waiting.append(asked)
        return await asked.replies

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting, []
        for at in range(0, len(waiting), _MOST):
            self._start(waiting[at : at + _MOST])

    def _start(self, batch: Sequence[_Asked]) -> None:
        task = asyncio.create_task(self._run(batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, batch: Sequence[_Asked]) -> None:
        left = [asked for asked in batch if not asked.replies.done()]
        try:
            replies = await self._replies([command for asked in left for command in asked.commands])
        except asyncio.CancelledError:
            for asked in left:
                asked.replies.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, it is theirs, and nobody may hang
            for asked in left:
                if not asked.replies.done():
                    asked.replies.set_exception(error)
        else:
            at = 0
            for asked in left:
                end = at + len(asked.commands)
                if not asked.replies.done():
                    asked.replies.set_result(replies[at:end])
                at = end

    async def _replies(self, commands: Sequence[Command]) -> Replies:
        if not commands:
            return []
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]  # is untyped
        try:
            # One piece: to write many of them one by one takes longer than to join them.
            packed = b"".join([pack_command(cast("Any", command)) for command in commands])
            await connection.send_packed_command(packed, check_health=False)
            return [await _reply(connection) for _ in commands]
        except BaseException:
            # Replies may be on their way: they are nobody's any more.
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)


async def _reply(connection: Any) -> object:  # redis-py's connections have no common public type
    try:
        return await connection.read_response()
    except redis_errors.ResponseError as error:
        return error
