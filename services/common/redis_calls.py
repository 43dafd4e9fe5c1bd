"""Calls to Redis (7.0's command set; Valkey too), and server-side scripts kept by their hash.

A cancelled caller never leaves a connection with an unread reply: each command runs in a task of its own
that is shielded from its caller and ends when the reply is read or the socket times out.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from hashlib import sha1
from typing import TYPE_CHECKING, Any, TypeVar, cast

from redis import asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.core.errors import Broken, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

T = TypeVar("T")

DEFAULT_CALL_TIMEOUT_S = 2.0

# Error replies that pass: the server is loading, is no master, is short of memory or disk, is busy, ...
_PASSING_REPLIES = frozenset(
    {"LOADING", "READONLY", "CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN", "MASTERDOWN"}
    | {"OOM", "MISCONF", "NOREPLICAS", "BUSY", "UNBLOCKED"}
)
_PASSING_ERRORS = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    redis_errors.ClusterError,
    redis_errors.AskError,
    redis_errors.TryAgainError,
    redis_errors.OutOfMemoryError,
    OSError,
)


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the hash by which the server knows it once it has run."""

    text: str
    sha: str


def script_of(text: str) -> Script:
    """`text` with its hash."""
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class RedisCalls:
    """A server at `url` (redis://, rediss:// for TLS, unix://; user, password and database as in redis-py).

    Every call is one attempt, bounded by about twice `call_timeout_s` (connecting, then the reply).
    """

    def __init__(self, url: str, *, call_timeout_s: float, max_connections: int) -> None:
        pool = redis_asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=call_timeout_s,
            socket_timeout=call_timeout_s,
            socket_connect_timeout=call_timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,  # CLIENT SETINFO is not in 7.0
        )
        self.client = redis_asyncio.Redis.from_pool(pool)
        self._running: set[asyncio.Task[Any]] = set()

    async def command(self, *command: bytes | str | int) -> object:
        """The reply. Raises StoreUnavailable if it may come another time, else Broken."""
        return await self._shielded(self._attempt(*command))

    async def run(self, script: Script, keys: Sequence[str], *args: bytes | str | int) -> object:
        """What the script answers; raises as `command` does."""
        return await self._shielded(self._evaluate(script, len(keys), *keys, *args))

    async def close(self) -> None:
        """Let go of connections, after the calls under way."""
        while self._running:
            await asyncio.wait(self._running)
        await self.client.aclose(close_connection_pool=True)

    async def _evaluate(self, script: Script, *args: bytes | str | int) -> object:
        try:
            return await self._attempt("EVALSHA", script.sha, *args)
        except redis_errors.NoScriptError:
            return await self._attempt("EVAL", script.text, *args)

    async def _attempt(self, *command: bytes | str | int) -> object:
        try:
            return await self.client.execute_command(*command)  # type: ignore[no-untyped-call]  # is untyped
        except redis_errors.NoScriptError:
            raise
        except (redis_errors.RedisError, OSError) as error:
            if _passes(error):
                raise StoreUnavailable(f"the session store does not answer: {error}") from error
            raise Broken(f"the session store refused a command: {error}") from error

    async def _shielded(self, attempt: Awaitable[T]) -> T:
        task = asyncio.ensure_future(attempt)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(cast("asyncio.Task[Any]", task))
        if not task.cancelled():
            task.exception()  # seen: its caller may have gone away


def _passes(error: Exception) -> bool:
    return isinstance(error, _PASSING_ERRORS) or str(error).partition(" ")[0] in _PASSING_REPLIES
