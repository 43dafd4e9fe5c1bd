"""Several real servers that are one store: a Redis Cluster, and a replica set with its sentinels."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from redis import asyncio as redis_asyncio

from galley.stack.ports import free_ports
from tests.fakes.redis_servers import BINARIES, REDIS, VALKEY, Server, running

CLUSTER = "cluster"
KINDS = (*BINARIES, CLUSTER)
"""The kinds of store that tests can start."""
SERVICE = "galley"
SLOTS = 16384
PATIENCE_S = 30.0
NEVER_MS = 600_000
"""A node timeout that never passes in a test, so that no node counts as lost."""
_HOST = "127.0.0.1"
_TRIES = 5


ServerT = TypeVar("ServerT", bound=Server)


def either() -> str:
    return REDIS if shutil.which("redis-server") else VALKEY


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class TcpServer(Server):
    def __init__(self, kind: str, directory: Path, port: int, *options: str, tls: Sequence[str] = ()) -> None:
        at_once = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
        listen = ("--tls-port" if tls else "--port", str(port), "--bind", _HOST)
        super().__init__(kind, directory, *listen, *at_once, *options, *tls)
        self.port = port

    @property
    def address(self) -> str:
        return f"{_HOST}:{self.port}"


class ClusterNode(TcpServer):
    def __init__(self, kind: str, directory: Path, timeout_ms: int, tls: Sequence[str]) -> None:
        self.bus_port = free_ports(1)[0]
        super().__init__(
            kind,
            directory,
            free_ports(1)[0],
            *("--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)),
            *("--cluster-node-timeout", str(timeout_ms), "--cluster-replica-validity-factor", "0"),
            tls=(*tls, "--tls-cluster", "yes", "--tls-replication", "yes") if tls else (),
        )


@contextmanager
def serving(make: Callable[[Path], ServerT]) -> Iterator[ServerT]:
    with ExitStack() as held:
        yield _started(make, held)


def _started(make: Callable[[Path], ServerT], held: ExitStack) -> ServerT:
    for left in reversed(range(_TRIES)):
        directory = held.enter_context(
            tempfile.TemporaryDirectory(prefix="galley-", ignore_cleanup_errors=True)
        )
        server = make(Path(directory))
        held.callback(server.stop)
        try:
            server.start()
        except RuntimeError:  # another process took the port
            if not left:
                raise
        else:
            return server
    raise AssertionError


class Cluster:
    def __init__(self, masters: list[ClusterNode], replicas: list[ClusterNode]) -> None:
        self.masters = masters
        self.replicas = replicas

    @property
    def nodes(self) -> list[ClusterNode]:
        return [*self.masters, *self.replicas]

    @property
    def url(self) -> str:
        return f"redis+cluster://{self.addresses}"

    @property
    def addresses(self) -> str:
        return ",".join(node.address for node in self.nodes)

    def raw(self) -> redis_asyncio.Redis:
        return cast(
            "redis_asyncio.Redis", redis_asyncio.RedisCluster.from_url(f"redis://{self.masters[0].address}")
        )

    async def command(self, *command: str | bytes) -> Any:
        async with self.raw() as client:
            return await client.execute_command(*command)  # type: ignore[no-untyped-call]  # is untyped

    async def form(self) -> None:
        step = SLOTS // len(self.masters)
        for at, node in enumerate(self.masters):
            last = SLOTS - 1 if node is self.masters[-1] else (at + 1) * step - 1
            await node.command("CLUSTER", "SET-CONFIG-EPOCH", str(at + 1))
            await node.command("CLUSTER", "ADDSLOTSRANGE", str(at * step), str(last))
        first, *others = self.nodes
        for node in others:
            await node.command("CLUSTER", "MEET", _HOST, str(first.port), str(first.bus_port))
        for node in self.nodes:
            await until(lambda node=node: self._is_well(node))  # type: ignore[misc]  # binds now
        await self._attach_replicas()

    async def _is_well(self, node: TcpServer) -> bool:
        info = (await node.command("CLUSTER", "INFO")).decode().split()
        return {"cluster_state:ok", f"cluster_known_nodes:{len(self.nodes)}"} <= set(info)

    async def _attach_replicas(self) -> None:
        for at, replica in enumerate(self.replicas):
            master = self.masters[at % len(self.masters)]
            await replica.command("CLUSTER", "REPLICATE", await self.node_id(master))
        for replica in self.replicas:
            await until(lambda replica=replica: follows(replica))  # type: ignore[misc]  # binds now

    async def node_id(self, node: TcpServer) -> str:
        return str((await node.command("CLUSTER", "MYID")).decode())


async def follows(replica: Server) -> bool:
    info = await replica.command("INFO", "replication")
    return bool(info["role"] == "slave" and info["master_link_status"] == "up")


@contextmanager
def cluster_servers(
    kind: str, replicas: int = 0, timeout_ms: int = NEVER_MS, tls: Sequence[str] = ()
) -> Iterator[Cluster]:
    """Start three masters with `replicas` each, not yet a cluster (`form`)."""

    with ExitStack() as held:
        nodes = [
            _started(lambda directory: ClusterNode(kind, directory, timeout_ms, tls), held)
            for _ in range(3 + replicas)
        ]
        yield Cluster(nodes[:3], nodes[3:])


@contextmanager
def backend(kind: str) -> Iterator[Server | Cluster]:
    """Start a fresh store of one of KINDS; call it outside an event loop."""
    if kind != CLUSTER:
        with running(kind) as server:
            yield server
        return
    with cluster_servers(either()) as cluster:
        asyncio.run(cluster.form())
        yield cluster


class Sentinel(TcpServer):
    ready = b"+monitor"

    def __init__(
        self, kind: str, directory: Path, port: int, master_port: int, tls: Sequence[str] = ()
    ) -> None:
        super().__init__(kind, directory, port)
        config = directory / "sentinel.conf"
        listen = f"port 0\ntls-port {port}" if tls else f"port {port}"
        files = "".join(f"{name[2:]} {value}\n" for name, value in zip(tls[::2], tls[1::2], strict=True))
        config.write_text(
            f"{listen}\n{files}bind {_HOST}\ndir {directory}\nunixsocket {directory / 's'}\n"
            f"sentinel monitor {SERVICE} {_HOST} {master_port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\n"
            f"sentinel failover-timeout {SERVICE} 2000\n"
        )
        self._command = [self._command[0], str(config), "--sentinel"]


class ReplicaSet:
    def __init__(self, master: TcpServer, replica: TcpServer, sentinel: TcpServer) -> None:
        self.master = master
        self.replica = replica
        self.sentinel = sentinel

    @property
    def url(self) -> str:
        return f"redis+sentinel://{self.sentinel.address}/0?service={SERVICE}"

    async def form(self) -> None:
        await self.replica.command("REPLICAOF", _HOST, str(self.master.port))
        # Sentinels discover replicas at their start and then only every ten seconds.
        await until(self._is_followed)
        self.sentinel.start()
        await until(self._is_watched)

    async def _is_followed(self) -> bool:
        info = await self.master.command("INFO", "replication")
        return await follows(self.replica) and info.get("slave0", {}).get("state") == "online"

    async def _is_watched(self) -> bool:
        return bool(await self.sentinel.command("SENTINEL", "REPLICAS", SERVICE))


@asynccontextmanager
async def replica_set(kind: str, tls: Sequence[str] = ()) -> AsyncIterator[ReplicaSet]:
    options = (*tls, "--tls-replication", "yes") if tls else ()
    with ExitStack() as held:
        master, replica = (
            _started(lambda directory: TcpServer(kind, directory, free_ports(1)[0], tls=options), held)
            for _ in range(2)
        )
        directory = held.enter_context(tempfile.TemporaryDirectory(prefix="galley-"))
        sentinel = Sentinel(kind, Path(directory), free_ports(1)[0], master.port, options)
        held.callback(sentinel.stop)
        servers = ReplicaSet(master, replica, sentinel)
        await servers.form()
        yield servers
