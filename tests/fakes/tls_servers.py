"""TLS servers and channels whose files a test can replace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from galley.common.server.listen import server_files
from galley.common.server.server import RunningServer, start_server
from galley.common.tls.channels import ChannelTls, open_channel
from galley.common.tls.credentials import TlsFiles, server_credentials
from galley.common.tls.files import CHECK_INTERVAL_S, NamedFile
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.certificates import Mounted
from tests.fakes.echo_service import EchoService, building, settings

PATIENCE_S = 20.0


def files_of(files: Mounted | None, *, own: bool = True) -> TlsFiles:
    ca, cert, key = ("", "", "") if files is None else (files.ca, files.cert, files.key)
    pair = (cert, key) if own else ("", "")
    return TlsFiles(NamedFile("ca_file", ca), NamedFile("cert_file", pair[0]), NamedFile("key_file", pair[1]))


def tls_settings(files: Mounted, *, mutual: bool) -> dict[str, str]:
    fields = {"tls_cert_file": files.cert, "tls_key_file": files.key}
    return {**fields, "tls_client_ca_file": files.ca} if mutual else fields


def credentials_of(files: Mounted, *, mutual: bool) -> grpc.ServerCredentials | None:
    return server_credentials(server_files(settings(**tls_settings(files, mutual=mutual))))()


@asynccontextmanager
async def serving(
    service: EchoService, files: Mounted | None, *, mutual: bool = True, **given: object
) -> AsyncIterator[RunningServer]:
    tls = {} if files is None else tls_settings(files, mutual=mutual)
    running = await start_server(settings(**tls, **given), building(service))
    try:
        yield running
    finally:
        await running.stop()


def open_to(
    running: RunningServer, files: Mounted | None, *, own: bool = True, name: str = ""
) -> grpc.aio.Channel:
    tls = None if files is None else ChannelTls(files_of(files, own=own).watch(CHECK_INTERVAL_S), name)
    return open_channel(running.address, tls)


def request(name: str = "s") -> pb.ProposeRequest:
    return pb.ProposeRequest(items=[pb.ProposeItem(slice=pb.SessionSlice(session_id=name))])


async def ask(channel: grpc.aio.Channel) -> None:
    answer = await rpc.DraftStub(channel).Propose(request(), timeout=PATIENCE_S)
    assert answer.answers[0].session_id == "s"


async def connection_error(running: RunningServer, files: Mounted | None, **how: Any) -> str:
    async with open_to(running, files, **how) as channel:
        return await refusal(channel)


async def refusal(channel: grpc.aio.Channel) -> str:
    try:
        await ask(channel)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return error.details() or "no details"
    return ""


class Stream:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = rpc.DraftStub(channel).ProposeStream()

    async def must_live(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._call.write(pb.ProposeStreamRequest(items=request("again").items))
            answer: Any = await self._call.read()
        assert answer.answers[0].session_id == "again"

    async def end(self) -> None:
        await self._call.done_writing()
        async with asyncio.timeout(PATIENCE_S):
            assert await self._call.read() is grpc.aio.EOF
