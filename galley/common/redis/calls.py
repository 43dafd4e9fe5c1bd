"""Call Redis 7.0 or Valkey, and run server-side scripts by their hash.

Calls of the same moment are sent together (`Line`). A cancelled caller never leaves a connection with an
unread reply: the line takes it, and a connection of the pool is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha1
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from redis import exceptions as redis_errors

from galley.common.redis.connections import Connector
from galley.common.redis.line import Command, Done
from galley.common.redis.nodes import Node, nodes_of
from galley.common.redis.url import parse_redis_url
from galley.core.errors import Broken, GalleyError, StoreUnavailable

T = TypeVar("T")
Argument: TypeAlias = bytes | str | int

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
# Replies to a script that the server does not have, or whose keys another node has: nothing was executed.
_NOT_EXECUTED = (redis_errors.NoScriptError, redis_errors.AskError)


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its hash, by which the server finds it once it has run."""

    text: str
    sha: str


def script_of(text: str) -> Script:
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class _Uncopied:
    """The reply to a change that too few replicas have."""

    reply: object


class _Evaluation(NamedTuple, Generic[T]):
    """A call of a script; `decode` returns what its caller gets for the reply."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Argument]
    decode: Callable[[object], T]

    def result(self, reply: object) -> T:
        """Return what the caller gets. Raise StoreUnavailable for a change that was not copied in time."""
        if not isinstance(reply, _Uncopied):
            return self.decode(reply)
        self.decode(reply.reply)  # a refusal has changed nothing
        raise StoreUnavailable("the session store's replicas do not have the change yet")

    @property
    def by_hash(self) -> Command:
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)

    @property
    def by_text(self) -> Command:
        return ("EVAL", self.script.text, len(self.keys), *self.keys, *self.args)


@dataclass(frozen=True, slots=True)
class Copies:
    """The number of replicas that must have a change, and the longest wait for them."""

    replicas: int
    timeout_s: float = 1.0

    @property
    def wait(self) -> Command:
        return ("WAIT", self.replicas, max(1, int(self.timeout_s * 1000)))

    def checked(self, reply: object, have: object) -> object:
        """Return the reply to a change, or _Uncopied unless `have`, the reply to `wait`, is enough."""
        is_copied = isinstance(have, int) and have >= self.replicas
        return reply if is_copied or isinstance(reply, Exception) else _Uncopied(reply)


class RedisCalls:
    """Calls of the Redis at `url` (`galley.common.redis.url`).

    Every call is one attempt, bounded by about twice `call_timeout_s` (connecting, then the reply) for each
    server that is called: one, except for sentinels and clusters after a failure. Single commands share one
    connection for each server. `max_connections` bounds those for commands that belong together; more queue.
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
        self._turns: dict[Node, list[tuple[Command, Done]]] = {}

    async def command(self, *command: Argument, key: str | None = None) -> object:
        """Return the reply of `key`'s node, or any. Raise Broken, or StoreUnavailable if a retry may help."""
        attempt = self._attempt(key, [command])
        # A look-up of the server goes on without its caller, and `close` waits for it.
        [reply] = await (self._start(attempt) if self._nodes.known(key) is None else attempt)
        return reply

    async def now_ms(self, key: str) -> int:
        """Return the time of `key`'s node, in ms. Raise as `command` does."""
        seconds, microseconds = cast("tuple[bytes, bytes]", await self.command("TIME", key=key))
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def run(self, script: Script, keys: Sequence[str], *args: Argument) -> object:
        """Run `script` on the node of its first key; return its reply. Raise as `command` does."""
        return await self._run(_Evaluation(script, keys, args, _as_it_is))

    def change(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument], decode: Callable[[object], T]
    ) -> asyncio.Future[T]:
        """Run a script that writes; the future gets `decode(reply)`, or what that or the call raises.

        With `copies`, it raises StoreUnavailable unless enough replicas have this and earlier changes.
        """
        return self._run(_Evaluation(script, keys, args, decode), self._copies)

    async def close(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
        await self._nodes.close()

    def _run(self, evaluation: _Evaluation[T], copies: Copies | None = None) -> asyncio.Future[T]:
        """Run a script without a task, unless the server is to be found or does not have the script."""
        node = self._nodes.known(evaluation.keys[0])
        if node is None:
            return self._start(self._searched(evaluation, copies))
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(reply: object) -> None:
            if result.done():
                return
            if isinstance(reply, _NOT_EXECUTED):
                again = self._start(self._searched(evaluation, copies))
                again.add_done_callback(partial(_pass_on, result))
            elif isinstance(reply, Exception):
                result.set_exception(self._failure(node, reply))
            else:
                _decode(evaluation, reply, result)

        if copies is None:
            node.line.send(evaluation.by_hash, done)
        else:
            self._send_copied(node, copies, evaluation.by_hash, done)
        return result

    async def _searched(self, evaluation: _Evaluation[T], copies: Copies | None) -> T:
        if copies is None:
            [reply] = await self._evaluate(evaluation)
        else:
            reply = copies.checked(*await self._evaluate(evaluation, copies.wait))
        return evaluation.result(reply)

    def _send_copied(self, node: Node, copies: Copies, command: Command, done: Done) -> None:
        """Send a change with the others of this turn of the event loop, followed by one WAIT for all."""
        if node not in self._turns:
            self._turns[node] = []
            self._start(self._send_turn(node, copies))
        self._turns[node].append((command, done))

    async def _send_turn(self, node: Node, copies: Copies) -> None:
        turn = self._turns.pop(node)
        try:
            commands = [command for command, _ in turn]
            *replies, have = await node.execute([*commands, copies.wait])
        except Exception as error:  # noqa: BLE001  # each caller gets it; none may hang
            replies, have = [error] * len(turn), copies.replicas
        for (_, done), reply in zip(turn, replies, strict=True):
            done(copies.checked(reply, have))

    async def _evaluate(self, evaluation: _Evaluation[T], *then: Command) -> list[object]:
        try:
            return await self._attempt(evaluation.keys[0], [evaluation.by_hash, *then])
        except redis_errors.NoScriptError:
            return await self._attempt(evaluation.keys[0], [evaluation.by_text, *then])

    async def _attempt(self, key: str | None, commands: Sequence[Command]) -> list[object]:
        node: Node | None = None
        try:
            node = await self._nodes.of(key)
            return await self._redirected(node, commands)
        except redis_errors.NoScriptError:
            raise
        except (redis_errors.RedisError, OSError) as error:
            raise self._failure(node, error) from error

    def _failure(self, node: Node | None, error: Exception) -> GalleyError:
        if not _is_passing(error):
            return Broken(f"the session store refused a command: {error}")
        if node is not None:
            self._nodes.lost(node)
        return StoreUnavailable("the session store is unavailable", str(error))

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

    def _start(self, attempt: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Return the result of an attempt that goes on to its end even if the result is cancelled."""
        task = asyncio.create_task(attempt)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return asyncio.shield(task)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(cast("asyncio.Task[Any]", task))
        if not task.cancelled():
            task.exception()  # retrieved, as its caller may have gone away


async def _send(node: Node, commands: Sequence[Command], *, asking: bool) -> list[object]:
    """Return the replies; raise the first that is an error."""
    replies = await node.execute([("ASKING",), *commands] if asking else commands)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies[1:] if asking else replies


def _as_it_is(reply: object) -> object:
    return reply


def _decode(evaluation: _Evaluation[T], reply: object, result: asyncio.Future[T]) -> None:
    try:
        result.set_result(evaluation.result(reply))
    except Exception as error:  # noqa: BLE001  # the caller gets it
        result.set_exception(error)


def _pass_on(result: asyncio.Future[T], source: asyncio.Future[T]) -> None:
    error = None if source.cancelled() else source.exception()  # retrieved even if the caller has gone away
    if result.done():
        return
    if source.cancelled():
        result.cancel()
    elif error is not None:
        result.set_exception(error)
    else:
        result.set_result(source.result())


def _is_passing(error: Exception) -> bool:
    return isinstance(error, _PASSING_ERRORS) or str(error).partition(" ")[0] in _PASSING_REPLIES
