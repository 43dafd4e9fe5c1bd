"""Call Redis 7.0 or Valkey, and run server-side scripts by their hash.

Calls of the same moment are sent together (`Batches`). A cancelled caller never leaves a connection with
an unread reply: each command runs in a shielded task that ends when the reply is read or times out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Any, TypeVar, cast

from redis import exceptions as redis_errors

from galley.common.redis.connections import Connector
from galley.common.redis.nodes import Command, Node, nodes_of
from galley.common.redis.url import parse_redis_url
from galley.core.errors import Broken, StoreUnavailable

T = TypeVar("T")

DEFAULT_CALL_TIMEOUT_S = 2.0

# In a cluster: a slot that has moved, and one that is moving.
_MAX_REDIRECTIONS = 5

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
# What uvloop says, as RuntimeError, where the connection ended after it was taken from the pool.
_CLOSED = "the handler is closed"


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its hash, by which the server finds it once it has run."""

    text: str
    sha: str


def script_of(text: str) -> Script:
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Copies:
    """The number of replicas that must have a change, and the longest wait for them."""

    replicas: int
    timeout_s: float = 1.0


class RedisCalls:
    """Calls of the Redis at `url` (`galley.common.redis.url`).

    Every call is one attempt, bounded by about twice `call_timeout_s` (connecting, then the reply) for each
    server that is called: one, except for sentinels and clusters after a failure. `max_connections` is
    for each server; more callers queue.
    """

    def __init__(
        self,
        url: str,
        *,
        call_timeout_s: float,
        max_connections: int,
        copies: Copies | None = None,
    ) -> None:
        self._copies = copies
        self._nodes = nodes_of(
            Connector(
                parse_redis_url(url),
                call_timeout_s=call_timeout_s,
                reply_timeout_s=call_timeout_s + (copies.timeout_s if copies else 0.0),
                max_connections=max_connections,
            )
        )
        self._running: set[asyncio.Task[Any]] = set()

    async def command(self, *command: bytes | str | int, key: str | None = None) -> object:
        """Return the reply of `key`'s node, or any. Raise Broken, or StoreUnavailable if a retry may help."""
        [reply] = await self._shielded(self._attempt(key, [command]))
        return reply

    async def run(self, script: Script, keys: Sequence[str], *args: bytes | str | int) -> object:
        """Run `script` on the node of its first key; return its reply. Raise as `command` does."""
        [reply] = await self._shielded(self._evaluate(script, keys, args))
        return reply

    async def run_copied(
        self, script: Script, keys: Sequence[str], *args: bytes | str | int
    ) -> tuple[object, bool]:
        """Return the reply, and whether enough replicas have what the script and earlier calls wrote."""
        if self._copies is None:
            return await self.run(script, keys, *args), True
        wait = ("WAIT", self._copies.replicas, max(1, int(self._copies.timeout_s * 1000)))
        reply, have = await self._shielded(self._evaluate(script, keys, args, wait))
        return reply, cast("int", have) >= self._copies.replicas

    async def close(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
        await self._nodes.close()

    async def _evaluate(
        self, script: Script, keys: Sequence[str], args: Sequence[bytes | str | int], *then: Command
    ) -> list[object]:
        rest = (len(keys), *keys, *args)
        try:
            return await self._attempt(keys[0], [("EVALSHA", script.sha, *rest), *then])
        except redis_errors.NoScriptError:
            return await self._attempt(keys[0], [("EVAL", script.text, *rest), *then])

    async def _attempt(self, key: str | None, commands: Sequence[Command]) -> list[object]:
        node: Node | None = None
        try:
            node = await self._nodes.of(key)
            return await self._redirected(node, commands)
        except redis_errors.NoScriptError:
            raise
        except (redis_errors.RedisError, OSError) as error:
            if not _is_passing(error):
                raise Broken(f"the session store refused a command: {error}") from error
            if node is not None:
                self._nodes.lost(node)
            raise StoreUnavailable("the session store is unavailable", str(error)) from error

    async def _redirected(self, node: Node, commands: Sequence[Command]) -> list[object]:
        asking = False
        for _ in range(_MAX_REDIRECTIONS):
            try:
                return await _send(node, commands, asking=asking)
            except redis_errors.AskError as error:
                asking = not isinstance(error, redis_errors.MovedError)
                # An empty host means the node that replied.
                node = self._nodes.at(error.host or node.address[0], error.port)
                if not asking:
                    self._nodes.moved(error.slot_id, node)
        raise redis_errors.ClusterError("the nodes of the cluster redirect in a circle")

    async def _shielded(self, attempt: Awaitable[T]) -> T:
        task = asyncio.ensure_future(attempt)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(cast("asyncio.Task[Any]", task))
        if not task.cancelled():
            task.exception()  # retrieved, as its caller may have gone away


async def _send(node: Node, commands: Sequence[Command], *, asking: bool) -> list[object]:
    """Return the replies; a connection that is closed when written to raises ConnectionError."""
    whole = [("ASKING",), *commands] if asking else commands
    node.busy += 1
    try:
        replies = await node.batches.execute(whole)
    except RuntimeError as error:
        if _CLOSED not in str(error):
            raise
        raise redis_errors.ConnectionError("the connection ended before it was written to") from error
    finally:
        node.busy -= 1
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies[1:] if asking else replies


def _is_passing(error: Exception) -> bool:
    return isinstance(error, _PASSING_ERRORS) or str(error).partition(" ")[0] in _PASSING_REPLIES
