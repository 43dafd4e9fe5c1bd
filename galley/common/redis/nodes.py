"""Find the server of a key: the only one, the master that Sentinel names, or a node of a cluster.

redis-py's own clients choose a connection for each command, but ASKING and WAIT must use the connection of
the command they belong to (docs/decisions/026). Connections are redis-py's.

A location is kept until a call fails (`lost`) or a node redirects (`moved`). Callers that arrive during a
lookup share it and its failure: one lookup a caller would make the last wait for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hiredis import pack_command
from redis import exceptions as redis_errors
from redis.asyncio import ConnectionPool, Redis
from redis.crc import key_slot

from galley.common.redis.connections import Connector
from galley.common.redis.line import Command, Line
from galley.common.shared_work import SharedWork

Address = tuple[str, int]

SLOTS = 16384

Replies = list[object]

# What uvloop says, as RuntimeError, where the connection ended after it was taken from the pool.
_CLOSED = "the handler is closed"


class Node:
    """A server and its connections, which stay open while calls are in progress.

    Single commands share a line. Commands that belong together take a connection of the pool: one may be a
    WAIT, which would delay all after it.
    """

    def __init__(self, address: Address, client: Redis) -> None:
        self.address = address
        self.client = client
        self.line = Line(client.connection_pool)
        self.busy = 0
        """How many calls are in progress beside the line's."""

    @property
    def is_busy(self) -> bool:
        return self.busy > 0 or not self.line.is_idle

    async def execute(self, commands: Sequence[Command]) -> Replies:
        """Return the replies to commands on one connection, in order, error replies included.

        Raise redis-py's errors or OSError where the connection fails. Cancelled, it leaves no connection with
        an unread reply in the pool.
        """
        if len(commands) == 1:
            return [await self.line.reply(commands[0])]
        self.busy += 1
        try:
            return await _exchange(self.client.connection_pool, commands)
        finally:
            self.busy -= 1

    async def close(self) -> None:
        await self.line.close()
        await self.client.aclose(close_connection_pool=True)


async def _exchange(pool: ConnectionPool, commands: Sequence[Command]) -> Replies:
    connection = await pool.get_connection()  # type: ignore[no-untyped-call]  # is untyped
    try:
        # Joining them is faster than writing them one by one.
        packed = b"".join([pack_command(cast("Any", command)) for command in commands])
        await connection.send_packed_command(packed, check_health=False)
        return [await _read_reply(connection) for _ in commands]
    except BaseException as error:
        # Replies may still arrive, and belong to nobody.
        await connection.disconnect(nowait=True)
        if _CLOSED in str(error):
            raise redis_errors.ConnectionError("the connection ended before it was written to") from error
        raise
    finally:
        await pool.release(connection)


async def _read_reply(connection: Any) -> object:  # redis-py's connections have no common public type
    try:
        return await connection.read_response()
    except redis_errors.ResponseError as error:
        return error


class Nodes:
    """The nodes of a URL: here one server. Subclasses find the master, or the node of a key in a cluster.

    `of` raises redis-py's errors or OSError if the node cannot be found.
    """

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._open: dict[Address, Node] = {}
        self._leaving: list[Node] = []

    def known(self, key: str | None) -> Node | None:  # noqa: ARG002  # all are there
        """Return the node of `key`, or any without a key; None where it has to be looked up."""
        hosts = self._connector.url.hosts
        return self.at(*(hosts[0] if hosts else ("", 0)))

    async def of(self, key: str | None) -> Node:
        """Return the node of `key`; without a key, any node."""
        return self.known(key) or await self._find(key)

    async def _find(self, key: str | None) -> Node:
        raise NotImplementedError

    def lost(self, node: Node) -> None:
        """Look the node up again before the next call, because a call to it failed."""

    def moved(self, slot: int, node: Node) -> None:
        """Record that the slot is now at `node`; ignored where all keys are in one place."""

    def at(self, host: str, port: int) -> Node:
        if (host, port) not in self._open:
            self._open[host, port] = Node((host, port), self._connector.server(host, port))
        return self._open[host, port]

    async def close(self) -> None:
        await self._keep_only(())
        for node in self._leaving:
            await node.close()

    async def _keep_only(self, addresses: Sequence[Address]) -> None:
        """Close the connections to all other nodes, those in use once they are free."""
        for address in self._open.keys() - set(addresses):
            self._leaving.append(self._open.pop(address))
        idle = [node for node in self._leaving if not node.is_busy]
        self._leaving = [node for node in self._leaving if node.is_busy]
        for node in idle:
            await node.close()


class SentinelMaster(Nodes):
    """The master that the first sentinel to respond names."""

    def __init__(self, connector: Connector) -> None:
        super().__init__(connector)
        self._sentinel = connector.sentinel()
        self._master: Node | None = None
        self._look = SharedWork(self._discover)

    def known(self, key: str | None) -> Node | None:  # noqa: ARG002  # all are there
        return self._master

    async def _find(self, key: str | None) -> Node:  # noqa: ARG002  # all are there
        return await self._look.done()

    async def _discover(self) -> Node:
        host, port = await self._sentinel.discover_master(self._connector.url.service)
        await self._keep_only([(host, port)])
        self._master = self.at(host, port)
        return self._master

    def lost(self, node: Node) -> None:
        if node is self._master:
            self._master = None

    async def close(self) -> None:
        await super().close()
        for sentinel in self._sentinel.sentinels:
            await sentinel.aclose(close_connection_pool=True)


class ClusterNodes(Nodes):
    """The masters of a cluster and their slots, as the first node to respond reports them."""

    def __init__(self, connector: Connector) -> None:
        super().__init__(connector)
        self._owners: list[Node | None] = [None] * SLOTS
        self._known: list[Address] = list(connector.url.hosts)
        self._stale = True
        self._look = SharedWork(self._refresh)

    def known(self, key: str | None) -> Node | None:
        return None if self._stale else self._owners[_slot(key)]

    async def _find(self, key: str | None) -> Node:
        if self._stale:
            await self._look.done()
        node = self._owners[_slot(key)]
        if node is None:
            self._stale = True
            raise redis_errors.ConnectionError(f"no node of the cluster serves slot {_slot(key)}")
        return node

    def moved(self, slot: int, node: Node) -> None:
        """Note the new owner of a slot and refresh the table soon."""
        self._owners[slot] = node
        self._stale = True

    def lost(self, node: Node) -> None:
        """Refresh before the next call, and try this node last."""
        self._stale = True
        self._known.sort(key=lambda address: address == node.address)

    async def _refresh(self) -> None:
        by, slots = await self._read_slots()
        owners: list[Node | None] = [None] * SLOTS
        addresses: list[Address] = [by]
        for first, last, *servers in slots:
            # A node that does not know its own host leaves it out: it is the node that replied.
            named = [((host or b"").decode() or by[0], port) for host, port, *_ in servers if host != b"?"]
            addresses += named
            if servers[0][0] != b"?":
                owners[first : last + 1] = [self.at(*named[0])] * (last + 1 - first)
        # The hosts of the URL come last: their names may resolve to other nodes by now.
        self._known = list(dict.fromkeys([*addresses, *self._connector.url.hosts]))
        self._owners, self._stale = owners, False
        await self._keep_only(self._known)

    async def _read_slots(self) -> tuple[Address, Sequence[Any]]:
        """Return the first reply to CLUSTER SLOTS and the node that sent it."""
        problem: Exception | None = None
        for address in self._known:
            node = self.at(*address)
            node.busy += 1
            try:
                return address, await node.client.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
            except redis_errors.NoPermissionError:
                raise
            except (redis_errors.RedisError, OSError) as error:
                problem = error
            finally:
                node.busy -= 1
        raise redis_errors.ConnectionError(f"no node of the cluster responds: {problem}")


def _slot(key: str | None) -> int:
    return 0 if key is None else key_slot(key.encode())


def nodes_of(connector: Connector) -> Nodes:
    kinds = {"server": Nodes, "sentinel": SentinelMaster, "cluster": ClusterNodes}
    return kinds[connector.url.kind](connector)
