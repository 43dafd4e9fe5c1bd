"""The HTTP server over TLS, in the event loop of asyncio and in that of a service."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from galley.common.config.settings import ServerLimits
from galley.common.server.loop import ServiceLoop
from galley.common.sockets import bind_socket, socket_address
from galley.common.tls.credentials import TlsFiles
from galley.common.tls.files import NamedFile
from services.gateway.http.transport.server import HttpServer
from services.gateway.http.transport.tls import server_contexts
from tests.fakes.certificates import Authority, Certificate, Mounted, mounted
from tests.fakes.waiting import PATIENCE_S

MOST = 4
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
Run = Callable[[Coroutine[Any, Any, None]], None]
VERSIONS = pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])


@pytest.fixture(params=[asyncio.new_event_loop, ServiceLoop], ids=["asyncio", "service"])
def run(request: pytest.FixtureRequest) -> Run:
    def run_there(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(scenario)

    return run_there


@pytest.fixture
def first(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "first")


@pytest.fixture
def second(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "second")


@pytest.fixture
def files(tmp_path: Path, first: Authority) -> Mounted:
    return mounted(tmp_path / "files", first.ca, first.issue("gateway"))


@asynccontextmanager
async def serving(files: Mounted, **limits: Any) -> AsyncIterator[str]:
    named = (NamedFile("ca", files.ca), NamedFile("cert", files.cert), NamedFile("key", files.key))
    contexts = server_contexts(TlsFiles(*named, serves=True))
    server = HttpServer(PlainTextResponse("yes"), ServerLimits(**limits), PATIENCE_S, contexts)
    bound = bind_socket("127.0.0.1", 0)
    await server.start(bound)
    try:
        yield socket_address(bound)
    finally:
        await server.stop(0.0)


def context_of(authority: Authority, own: Certificate) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.check_hostname = False
    context.load_cert_chain(own.cert, own.key)
    return context


class Caller:
    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._session: ssl.SSLSession | None = None

    async def call(self, address: str) -> bool:
        """Return False if the server refuses the connection; go on with the session of the one before."""
        return await asyncio.to_thread(self._call, address)

    def _call(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            with (
                socket.create_connection((host, int(port)), PATIENCE_S) as plain,
                self._context.wrap_socket(plain, session=self._session) as secure,
            ):
                secure.sendall(REQUEST)
                answered = secure.recv(1 << 16).startswith(b"HTTP/1.1 200")
                self._session = secure.session
                return answered
        except (ssl.SSLError, ConnectionResetError):
            return False


@VERSIONS
def test_the_first_connection_after_a_change_is_checked_by_the_new_authority(
    run: Run, files: Mounted, first: Authority, second: Authority, version: ssl.TLSVersion
) -> None:
    async def scenario() -> None:
        former, later = (context_of(first, one.issue("client")) for one in (first, second))
        former.maximum_version = later.maximum_version = version
        async with serving(files) as address:
            assert await Caller(former).call(address)
            files.put_pair(second.ca, first.issue("gateway"))
            assert not await Caller(former).call(address)
            assert await Caller(later).call(address)

    run(scenario())


@VERSIONS
def test_a_session_does_not_outlive_its_authority(
    run: Run, files: Mounted, first: Authority, second: Authority, version: ssl.TLSVersion
) -> None:
    async def scenario() -> None:
        context = context_of(first, first.issue("client"))
        context.maximum_version = version
        caller = Caller(context)
        async with serving(files) as address:
            assert await caller.call(address)
            files.put_pair(second.ca, first.issue("gateway"))
            assert not await Caller(context).call(address)
            assert not await caller.call(address)

    run(scenario())


def test_connections_count_from_their_beginning(run: Run, files: Mounted, first: Authority) -> None:
    async def scenario() -> None:
        caller = Caller(context_of(first, first.issue("client")))
        async with serving(files, max_connections=MOST, handshake_timeout_s=10 * PATIENCE_S) as address:
            host, _, port = address.rpartition(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(3 * MOST)]
            async with asyncio.timeout(PATIENCE_S):
                assert not any([await reader.read() for reader, _ in silent[MOST:]])
            assert not any(reader.at_eof() for reader, _ in silent[:MOST])
            assert not await caller.call(address)
            for _, writer in silent:
                writer.transport.abort()
            while not await caller.call(address):
                continue

    run(scenario())


def test_a_handshake_ends_in_time(run: Run, files: Mounted) -> None:
    async def scenario() -> None:
        async with serving(files, handshake_timeout_s=0.1) as address:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            async with asyncio.timeout(PATIENCE_S):
                assert not await reader.read()
            writer.close()

    run(scenario())


def test_a_stop_ends_handshakes(run: Run, files: Mounted) -> None:
    async def scenario() -> None:
        async with serving(files, handshake_timeout_s=10 * PATIENCE_S) as address:
            host, _, port = address.rpartition(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(MOST)]
        async with asyncio.timeout(PATIENCE_S):
            for reader, writer in silent:
                with suppress(ConnectionResetError):
                    assert not await reader.read()
                writer.close()

    run(scenario())
