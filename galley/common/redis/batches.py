"""Send commands of the same moment to one server in one write.

A step of the target confirms tokens of many sessions at once, and each is then committed. One at a time, a
connection and a wait cost several times the work of the server; together they cost little more than one.

A batch owns a connection from its write until its last reply is read, even if callers are cancelled, so a
connection with an unread reply never returns to the pool. Replies come in the order of the commands: an error
reply concerns its caller only, a failed connection concerns all.
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
"""Most commands of a batch; further ones use another connection."""


@dataclass(frozen=True, slots=True)
class _Call:
    commands: Sequence[Command]
    replies: asyncio.Future[Replies]


class Batches:
    """Batch the commands for the server of `pool`; for one event loop."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._waiting: list[_Call] = []
        self._running: set[asyncio.Task[None]] = set()

    async def execute(self, commands: Sequence[Command]) -> Replies:
        """Return the replies to commands on one connection, in order, error replies included.

        Several commands form a batch of their own: one may be a WAIT, which would delay all after it. Raise
        redis-py's errors or OSError where the connection fails.
        """
        loop = asyncio.get_running_loop()
        call = _Call(commands, loop.create_future())
        if len(commands) > 1:
            self._start([call])
        else:
            if not self._waiting:
                loop.call_soon(self._begin)
            self._waiting.append(call)
        return await call.replies

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting, []
        for at in range(0, len(waiting), _MOST):
            self._start(waiting[at : at + _MOST])

    def _start(self, batch: Sequence[_Call]) -> None:
        task = asyncio.create_task(self._run(batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, batch: Sequence[_Call]) -> None:
        left = [call for call in batch if not call.replies.done()]
        try:
            replies = await self._replies([command for call in left for command in call.commands])
        except asyncio.CancelledError:
            for call in left:
                call.replies.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # each caller gets it; none may hang
            for call in left:
                if not call.replies.done():
                    call.replies.set_exception(error)
        else:
            at = 0
            for call in left:
                end = at + len(call.commands)
                if not call.replies.done():
                    call.replies.set_result(replies[at:end])
                at = end

    async def _replies(self, commands: Sequence[Command]) -> Replies:
        if not commands:
            return []
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]  # is untyped
        try:
            # Joining them is faster than writing them one by one.
            packed = b"".join([pack_command(cast("Any", command)) for command in commands])
            await connection.send_packed_command(packed, check_health=False)
            return [await _reply(connection) for _ in commands]
        except BaseException:
            # Replies may still arrive, and belong to nobody.
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)


async def _reply(connection: Any) -> object:  # redis-py's connections have no common public type
    try:
        return await connection.read_response()
    except redis_errors.ResponseError as error:
        return error
