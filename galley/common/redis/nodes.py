"""Which server a key is at: the one there is, the master that sentinels name, or a node of a cluster.

redis-py has clients for sentinels and clusters of its own. They choose a connection for each command; what
must be said on one connection (ASKING before what it is for, WAIT after what it is about) cannot be said
through them, so where a key is is found here, and its connections are redis-py's.

What is found is kept until a call fails (`lost`) or a node says better (`moved`). Whoever comes while it is
being looked for waits for that look, and shares its failure: looks that followed one another, one a caller,
would have the last wait for all of them.
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
    """One server, and the connections to it."""

    def __init__(self, address: Address, client: redis_asyncio.Redis) -> None:
        self.address = address
        self.client = client
        self.batches = Batches(client.connection_pool)
        self.busy = 0

    @contextmanager
    def in_use(self) -> Iterator[redis_asyncio.Redis]:
        """Within, its connections are not closed."""
        self.busy += 1
        try:
            yield self.client
        finally:
            self.busy -= 1


class Connector:
    """Opens nodes as the URL says."""

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
        """A node there; nothing is connected yet."""
        return Node((host, port), self._client(*self._connections.to_server(host, port)))

    def sentinel(self) -> Sentinel:
        """The sentinels that the URL names."""
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
    """Work of which there is one at a time, for all who ask meanwhile; how it ends is the same for all."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._under_way: asyncio.Future[T] | None = None

    async def done(self) -> T:
        """What it returns or raises. A caller that is cancelled leaves the others theirs."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(self._work())
        return await asyncio.shield(self._under_way)


class Nodes(ABC):
    """See the module. Raises redis-py's errors, or OSError, where nobody can say where a key is."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._open: dict[Address, Node] = {}
        self._leaving: list[Node] = []

    @abstractmethod
    async def of(self, key: str | None) -> Node:
        """Where `key` is; without one, any that says how the store is."""

    @abstractmethod
    def lost(self, node: Node) -> None:
        """A call there failed: look anew before the next."""

    @abstractmethod
    def moved(self, slot: int, node: Node) -> None:
        """A node says that the slot is at this one."""

    def at(self, host: str, port: int) -> Node:
        """The node there."""
        if (host, port) not in self._open:
            self._open[host, port] = self._connector.node(host, port)
        return self._open[host, port]

    async def close(self) -> None:
        """Let go of all connections."""
        await self._keep_only(())
        for node in self._leaving:
            await _close(node)

    async def _keep_only(self, addresses: Sequence[Address]) -> None:
        """Close the connections to all others, those in use when they are free."""
        for address in self._open.keys() - set(addresses):
            self._leaving.append(self._open.pop(address))
        idle = [node for node in self._leaving if not node.busy]
        self._leaving = [node for node in self._leaving if node.busy]
        for node in idle:
            await _close(node)


async def _close(node: Node) -> None:
    await node.client.aclose(close_connection_pool=True)


class _Whole(Nodes):
    """All keys are at one place."""

    def moved(self, slot: int, node: Node) -> None:
        """See `Nodes`; a node of a cluster says so to who takes it for a server."""


class OneServer(_Whole):
    """There is no other to go to."""

    async def of(self, key: str | None) -> Node:  # noqa: ARG002  # all are there
        """See `Nodes`."""
        hosts = self._connector.url.hosts
        return self.at(*(hosts[0] if hosts else ("", 0)))

    def lost(self, node: Node) -> None:
        """See `Nodes`."""


class SentinelMaster(_Whole):
    """The master that the first of the sentinels to answer names."""

    def __init__(self, connector: Connector) -> None:
        super().__init__(connector)
        self._sentinel = connector.sentinel()
        self._master: Node | None = None
        self._look = _Shared(self._discover)

    async def of(self, key: str | None) -> Node:  # noqa: ARG002  # all are there
        """See `Nodes`."""
        return self._master or await self._look.done()

    async def _discover(self) -> Node:
        host, port = await self._sentinel.discover_master(self._connector.url.service)
        await self._keep_only([(host, port)])
        self._master = self.at(host, port)
        return self._master

    def lost(self, node: Node) -> None:
        """See `Nodes`."""
        if node is self._master:
            self._master = None

    async def close(self) -> None:
        """See `Nodes`."""
        await super().close()
        for sentinel in self._sentinel.sentinels:
            await sentinel.aclose(close_connection_pool=True)


class ClusterNodes(Nodes):
    """The masters of a cluster, each with its slots, as the first node to answer tells them."""

    def __init__(self, connector: Connector) -> None:
        super().__init__(connector)
        self._owners: list[Node | None] = [None] * SLOTS
        self._known: list[Address] = list(connector.url.hosts)
        self._stale = True
        self._look = _Shared(self._refresh)

    async def of(self, key: str | None) -> Node:
        """See `Nodes`."""
        if self._stale:
            await self._look.done()
        slot = 0 if key is None else key_slot(key.encode())
        node = self._owners[slot]
        if node is None:
            self._stale = True
            raise redis_errors.ConnectionError(f"no node of the cluster serves slot {slot}")
        return node

    def moved(self, slot: int, node: Node) -> None:
        """See `Nodes`."""
        self._owners[slot] = node
        self._stale = True

    def lost(self, node: Node) -> None:
        """See `Nodes`. It is the last to be asked where everything is."""
        self._stale = True
        self._known.sort(key=lambda address: address == node.address)

    async def _refresh(self) -> None:
        told = await self._ask()
        owners: list[Node | None] = [None] * SLOTS
        for first, last, node in told.masters:
            owners[first : last + 1] = [node] * (last + 1 - first)
        # Seeds come last: where all known ones are gone, their names may lead to others by now.
        self._known = list(dict.fromkeys([told.by, *told.addresses, *self._connector.url.hosts]))
        self._owners, self._stale = owners, False
        await self._keep_only(self._known)

    async def _ask(self) -> _Told:
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
                return _Told(self, address, slots)
        raise redis_errors.ConnectionError(f"no node of the cluster answers: {problem}")


class _Told:
    """What a node says of the cluster: CLUSTER SLOTS."""

    def __init__(self, nodes: Nodes, by: Address, slots: Sequence[Any]) -> None:
        self.by = by
        self.addresses: list[Address] = []
        self.masters: list[tuple[int, int, Node]] = []
        for first, last, *servers in slots:
            # A node that does not know how it is reached leaves its host out: it is the one that was asked.
            found = [((host or b"").decode() or by[0], port) for host, port, *_ in servers if host != b"?"]
            self.addresses += found
            if servers[0][0] != b"?":
                self.masters.append((first, last, nodes.at(*found[0])))


def nodes_of(connector: Connector) -> Nodes:
    """The way to find nodes that the URL's form asks for."""
    match connector.url.kind:
        case "server":
            return OneServer(connector)
        case "sentinel":
            return SentinelMaster(connector)
        case "cluster":
            return ClusterNodes(connector)
