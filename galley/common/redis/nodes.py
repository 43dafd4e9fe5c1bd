"""Find the server of a key: the only one, the master that Sentinel names, or a node of a cluster.

redis-py's own clients choose a connection for each command, but ASKING and WAIT must use the connection of
the command they belong to (docs/decisions/026). Connections are redis-py's.

A location is kept until a call fails (`lost`) or a node redirects (`moved`). Callers that arrive during a
lookup share it and its failure: one lookup a caller would make the last wait for all of them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from redis import asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot

from galley.common.redis.batches import Batches
from galley.common.redis.connections import Connections
from galley.common.redis.url import RedisUrl

Address = tuple[str, int]
T = TypeVar("T")

SLOTS = 16384
_ONCE: dict[str, Any] = {
    "retry": Retry(NoBackoff(), 0),
    "protocol": 2,
    "driver_info": None,  # CLIENT SETINFO is not in 7.0
}


class Node:
    """A server and the connections to it."""

    def __init__(self, address: Address, client: redis_asyncio.Redis) -> None:
        self.address = address
        self.client = client
        self.batches = Batches(client.connection_pool)
        self.busy = 0

    @contextmanager
    def in_use(self) -> Iterator[redis_asyncio.Redis]:
        """Keep its connections open within the block."""
        self.busy += 1
        try:
            yield self.client
        finally:
            self.busy -= 1


class Connector:
    """Open nodes as the URL says."""

    def __init__(
        self,
        url: RedisUrl,
        *,
        call_timeout_s: float,
        reply_timeout_s: float,
        max_connections: int,
    ) -> None:
        """`call_timeout_s` bounds connecting, and waiting for a free connection; `max_connections` a node.

        Raises BadFile.
        """
        self.url = url
        self._connections = Connections(url)
        self._limits: dict[str, Any] = {
            "socket_timeout": reply_timeout_s,
            "socket_connect_timeout": call_timeout_s,
        }
        self._pool: dict[str, Any] = {"timeout": call_timeout_s, "max_connections": max_connections}

    def node(self, host: str, port: int) -> Node:
        """Return a node; nothing is connected yet."""
        return Node((host, port), self._client(*self._connections.to_server(host, port)))

    def sentinel(self) -> Sentinel:
        """Return the sentinels of the URL."""
        sentinel = Sentinel([])  # type: ignore[no-untyped-call]  # is untyped
        sentinel.sentinels = [
            self._client(*self._connections.to_sentinel(host, port)) for host, port in self.url.hosts
        ]
        return sentinel

    def _client(self, kind: type[Connection], arguments: dict[str, Any]) -> redis_asyncio.Redis:
        pool = redis_asyncio.BlockingConnectionPool(
            connection_class=kind, **self._pool, **self._limits, **_ONCE, **arguments
        )
        return redis_asyncio.Redis.from_pool(pool)


class _Shared(Generic[T]):
    """Run work once for all callers that arrive meanwhile; all get its result or error."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._under_way: asyncio.Future[T] | None = None

    async def done(self) -> T:
        """Return the result of the work. Cancelling one caller does not affect the others."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(self._work())
        return await asyncio.shield(self._under_way)


class Nodes(ABC):
    """Find the node of a key. Raises redis-py's errors or OSError if it cannot be found."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._open: dict[Address, Node] = {}
        self._leaving: list[Node] = []

    @abstractmethod
    async def of(self, key: str | None) -> Node:
        """Return the node of `key`; without a key, any node."""

    @abstractmethod
    def lost(self, node: Node) -> None:
        """Look the node up again before the next call, because a call to it failed."""

    @abstractmethod
    def moved(self, slot: int, node: Node) -> None:
        """Record that the slot is now at `node`."""

    def at(self, host: str, port: int) -> Node:
        """Return the node at this address."""
        if (host, port) not in self._open:
            self._open[host, port] = self._connector.node(host, port)
        return self._open[host, port]

    async def close(self) -> None:
        """Close all connections."""
        await self._keep_only(())
        for node in self._leaving:
            await _close(node)

    async def _keep_only(self, addresses: Sequence[Address]) -> None:
        """Close the connections to all other nodes, those in use once they are free."""
        for address in self._open.keys() - set(addresses):
            self._leaving.append(self._open.pop(address))
        idle = [node for node in self._leaving if not node.busy]
        self._leaving = [node for node in self._leaving if node.busy]
        for node in idle:
            await _close(node)


async def _close(node: Node) -> None:
    await node.client.aclose(close_connection_pool=True)


class _Whole(Nodes):
    """Nodes of a store whose keys are all in one place."""

    def moved(self, slot: int, node: Node) -> None:
        """Ignore a redirect of a cluster that was configured as a single server."""


class OneServer(_Whole):
    """The only server of the URL."""

    async def of(self, key: str | None) -> Node:  # noqa: ARG002  # all are there
        """Return the server of the URL."""
        hosts = self._connector.url.hosts
        return self.at(*(hosts[0] if hosts else ("", 0)))

    def lost(self, node: Node) -> None:
        """Do nothing."""


class SentinelMaster(_Whole):
    """The master that the first answering sentinel names."""

    def __init__(self, connector: Connector) -> None:
        super().__init__(connector)
        self._sentinel = connector.sentinel()
        self._master: Node | None = None
        self._look = _Shared(self._discover)

    async def of(self, key: str | None) -> Node:  # noqa: ARG002  # all are there
        """Return the current master."""
        return self._master or await self._look.done()

    async def _discover(self) -> Node:
        host, port = await self._sentinel.discover_master(self._connector.url.service)
        await self._keep_only([(host, port)])
        self._master = self.at(host, port)
        return self._master

    def lost(self, node: Node) -> None:
        """Look the master up again if it was this node."""
        if node is self._master:
            self._master = None

    async def close(self) -> None:
        """Close the connections to the master and to the sentinels."""
        await super().close()
        for sentinel in self._sentinel.sentinels:
            await sentinel.aclose(close_connection_pool=True)


class ClusterNodes(Nodes):
    """The masters of a cluster and their slots, as the first answering node reports them."""

    def __init__(self, connector: Connector) -> None:
        super().__init__(connector)
        self._owners: list[Node | None] = [None] * SLOTS
        self._known: list[Address] = list(connector.url.hosts)
        self._stale = True
        self._look = _Shared(self._refresh)

    async def of(self, key: str | None) -> Node:
        """Return the node that owns the slot of `key`."""
        if self._stale:
            await self._look.done()
        slot = 0 if key is None else key_slot(key.encode())
        node = self._owners[slot]
        if node is None:
            self._stale = True
            raise redis_errors.ConnectionError(f"no node of the cluster serves slot {slot}")
        return node

    def moved(self, slot: int, node: Node) -> None:
        """Note the new owner of a slot and refresh the table soon."""
        self._owners[slot] = node
        self._stale = True

    def lost(self, node: Node) -> None:
        """Refresh before the next call, and ask this node last."""
        self._stale = True
        self._known.sort(key=lambda address: address == node.address)

    async def _refresh(self) -> None:
        slots = await self._read_slots()
        owners: list[Node | None] = [None] * SLOTS
        for first, last, node in slots.masters:
            owners[first : last + 1] = [node] * (last + 1 - first)
        # The hosts of the URL come last: their names may resolve to other nodes by now.
        self._known = list(dict.fromkeys([slots.by, *slots.addresses, *self._connector.url.hosts]))
        self._owners, self._stale = owners, False
        await self._keep_only(self._known)

    async def _read_slots(self) -> _Slots:
        problem: Exception | None = None
        for address in self._known:
            try:
                with self.at(*address).in_use() as client:
                    slots = await client.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
            except (redis_errors.RedisError, OSError) as error:
                if isinstance(error, redis_errors.NoPermissionError):
                    raise
                problem = error
            else:
                return _Slots(self, address, slots)
        raise redis_errors.ConnectionError(f"no node of the cluster answers: {problem}")


class _Slots:
    """The reply of a node to CLUSTER SLOTS."""

    def __init__(self, nodes: Nodes, by: Address, slots: Sequence[Any]) -> None:
        self.by = by
        self.addresses: list[Address] = []
        self.masters: list[tuple[int, int, Node]] = []
        for first, last, *servers in slots:
            # A node that does not know its own host leaves it out: it is the node that replied.
            found = [((host or b"").decode() or by[0], port) for host, port, *_ in servers if host != b"?"]
            self.addresses += found
            if servers[0][0] != b"?":
                self.masters.append((first, last, nodes.at(*found[0])))


def nodes_of(connector: Connector) -> Nodes:
    """Return the nodes for the kind of the URL."""
    match connector.url.kind:
        case "server":
            return OneServer(connector)
        case "sentinel":
            return SentinelMaster(connector)
        case "cluster":
            return ClusterNodes(connector)
