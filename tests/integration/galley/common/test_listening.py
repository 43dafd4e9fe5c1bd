"""Servers listen at IPv4 and IPv6 addresses; `::` is both, as pods of any cluster need."""

from __future__ import annotations

import asyncio
import errno
import socket

import psutil
import pytest

from galley.common import sockets
from galley.common.metrics.registry import Registry
from galley.common.metrics.scrape import ScrapeServer
from galley.common.server.server import start_server
from galley.common.sockets import bind_socket, host_and_port, socket_address
from galley.engine.parallel.process_group import open_store
from tests.fakes.echo_service import EchoService, building, settings


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
BOTH = ("127.0.0.1", "::1")


async def reached(address: str) -> tuple[str, ...]:
    """Return the loopback addresses at which the server at `address`, of this process, takes connections."""
    port = host_and_port(address)[1]
    ours = {
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }
    found = []
    for host in BOTH:
        if not ours & {host, f"::ffff:{host}", "0.0.0.0", "::"}:  # another process may have the port there
            continue
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            continue
        writer.close()
        found.append(host)
    return tuple(found)


HOSTS = [
    pytest.param("::", BOTH, marks=needs_ipv6),
    pytest.param("::1", ("::1",), marks=needs_ipv6),
    ("127.0.0.1", ("127.0.0.1",)),
]


@pytest.mark.parametrize(("host", "expected"), HOSTS)
async def test_grpc_and_health_listen(host: str, expected: tuple[str, ...]) -> None:
    running = await start_server(settings(host=host, health_port=0), building(EchoService()))
    try:
        assert await reached(running.address) == expected
        assert await reached(running.health_address) == expected
    finally:
        await running.stop()


@pytest.mark.parametrize(("host", "expected"), HOSTS)
async def test_metrics_listen(host: str, expected: tuple[str, ...]) -> None:
    server = ScrapeServer(Registry("draft"))
    try:
        assert await reached(await server.start(host, 0)) == expected
    finally:
        await server.close()


@pytest.mark.parametrize(("host", "expected"), HOSTS)
async def test_sockets_of_http_listen(host: str, expected: tuple[str, ...]) -> None:
    with bind_socket(host, 0) as bound:
        bound.listen()
        assert await reached(socket_address(bound)) == expected


@pytest.mark.parametrize(("host", "expected"), HOSTS)
async def test_the_meeting_of_ranks_listens(host: str, expected: tuple[str, ...]) -> None:
    store = await asyncio.to_thread(open_store, host, 1)
    assert await reached(store.address) == expected


async def test_every_address_is_those_of_ipv4_where_the_kernel_has_no_ipv6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return socket.socket(family, kind)

    monkeypatch.setattr(sockets, "socket", make)
    with bind_socket("::", 0) as bound:
        bound.listen()
        assert "127.0.0.1" in await reached(socket_address(bound))
    with pytest.raises(OSError, match=r"cannot listen on \[::1\]:0: Address family"):
        bind_socket("::1", 0)
