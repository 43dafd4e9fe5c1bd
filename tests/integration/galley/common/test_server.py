"""A real grpc.aio server on a port of the system's choice: faults, limits, health, reflection, stopping."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from galley.client.errors import rpc_error
from galley.common.server.interceptors import StatusInterceptor
from galley.common.server.server import Parts, RunningServer, start_server
from galley.common.sockets import CannotBind, host_and_port
from galley.core import errors
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.echo_service import SERVICE, EchoService, building, settings
from tests.fakes.tls_servers import request


@asynccontextmanager
async def serving(service: EchoService) -> AsyncIterator[tuple[RunningServer, grpc.aio.Channel]]:
    running = await start_server(settings(), building(service))
    try:
        async with grpc.aio.insecure_channel(running.address) as channel:
            yield running, channel
    finally:
        await running.stop()


async def failure(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        await call
    return raised.value


async def last(stream: Any) -> Any:
    return [answer async for answer in stream][-1]


CASES: list[tuple[BaseException, grpc.StatusCode]] = [
    (errors.InvalidField("k", "must be <= 8"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Unimplemented("credit"), grpc.StatusCode.UNIMPLEMENTED),
    (errors.UnknownSession("s"), grpc.StatusCode.NOT_FOUND),
    (errors.KeyReused(), grpc.StatusCode.ALREADY_EXISTS),
    (errors.Fenced("s"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.TokenizerMismatch("a", "b"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Overloaded("full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.DeadlinePassed(), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled(), grpc.StatusCode.CANCELLED),
    (errors.StoreUnavailable("redis is away", "secret:6379 refused"), grpc.StatusCode.UNAVAILABLE),
    (errors.TargetUnavailable("no target"), grpc.StatusCode.UNAVAILABLE),
    (errors.LogLost("log is shorter"), grpc.StatusCode.DATA_LOSS),
    (errors.Broken("secret"), grpc.StatusCode.INTERNAL),
    (KeyError("secret"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda value: type(value).__name__)
async def test_each_error_becomes_its_status_on_unary_and_stream(
    error: BaseException, code: grpc.StatusCode
) -> None:
    async with serving(EchoService(error)) as (_, channel):
        draft = rpc.DraftStub(channel)
        unary = rpc_error(await failure(draft.Propose(request())))
        stream = rpc_error(
            await failure(last(draft.ProposeStream(iter([pb.ProposeStreamRequest(items=request().items)]))))
        )
    assert vars(unary) == vars(stream)
    assert unary.code is code
    assert "secret" not in unary.message


async def test_a_bad_field_and_a_retry_time_reach_the_client() -> None:
    async with serving(EchoService(errors.InvalidField("k", "must be <= 8"))) as (_, channel):
        bad = rpc_error(await failure(rpc.DraftStub(channel).Propose(request())))
    assert bad.violations == (("k", "must be <= 8"),)
    assert bad.message == "k: must be <= 8"
    async with serving(EchoService(errors.Overloaded("full", 1.5))) as (_, channel):
        full = rpc_error(await failure(rpc.DraftStub(channel).Propose(request())))
    assert full.retry_after_s == 1.5


@pytest.mark.parametrize("error", [grpc.aio.InternalError("gone"), grpc.aio.AbortError("told")])
async def test_grpc_errors_are_neither_logged_nor_sent_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(_request: object, _context: object) -> None:
        raise error

    handler: Any = grpc.unary_unary_rpc_method_handler(failing)
    wrapped: Any = StatusInterceptor().wrap(handler, "/galley.v1.Draft/Propose")
    with pytest.raises(type(error)):
        await wrapped.unary_unary(b"", None)
    assert not caplog.records


async def test_cancellation_reaches_the_servicer() -> None:
    service = EchoService()
    async with serving(service) as (_, channel):
        service.release.clear()
        call = rpc.DraftStub(channel).Propose(request())
        await asyncio.wait_for(service.entered.wait(), 5)
        call.cancel()
        await asyncio.wait_for(service.cancelled.wait(), 5)
        service.release.set()


# The session_id of the second item is not UTF-8.
BAD_UTF8 = b"\x0a\x05\x0a\x03\x0a\x01s" + b"\x0a\x05\x0a\x03\x0a\x01\xff"


@pytest.mark.parametrize(
    ("payload", "field", "problem"),
    [
        (BAD_UTF8, "{}", "UTF-8"),
        (b"\x0a\x7f\x01", "{}", "well-formed"),
        (b"\x0a\x02\x22\x00" * 400, "{}", "at most 1024 bytes, got 1600"),
    ],
    ids=["utf8", "garbage", "oversize"],
)
async def test_unreadable_message_is_invalid_argument(payload: bytes, field: str, problem: str) -> None:
    async with serving(EchoService()) as (_, channel):
        unary: Any = channel.unary_unary(f"/{SERVICE}/Propose")
        stream: Any = channel.stream_stream(f"/{SERVICE}/ProposeStream")
        for call, kind in (
            (unary(payload), "ProposeRequest"),
            (last(stream(iter([payload]))), "ProposeStreamRequest"),
        ):
            reported = rpc_error(await failure(call))
            assert reported.code is grpc.StatusCode.INVALID_ARGUMENT
            ((named, why),) = reported.violations
            assert named == field.format(kind)
            assert problem in why


async def test_far_too_large_is_refused_by_grpc_itself() -> None:
    async with serving(EchoService()) as (_, channel):
        call: Any = channel.unary_unary(f"/{SERVICE}/Propose")
        reported = rpc_error(await failure(call(b"\x00" * 17 * 1024)))
    assert reported.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_and_reflection() -> None:
    async with serving(EchoService()) as (running, channel):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {entry.name for entry in (await listing.read()).list_services_response.service}
        assert SERVICE in names
        assert "grpc.health.v1.Health" in names
        stopping = asyncio.ensure_future(running.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stopping


async def test_a_stop_finishes_the_work_under_way() -> None:
    service = EchoService()
    running = await start_server(settings(), building(service))
    async with grpc.aio.insecure_channel(running.address) as channel:
        service.release.clear()
        call = asyncio.ensure_future(_await(rpc.DraftStub(channel).Propose(request("kept"))))
        await asyncio.wait_for(service.entered.wait(), 5)
        stopping = asyncio.ensure_future(running.stop())
        await asyncio.sleep(0)
        service.release.set()
        assert (await call).answers[0].session_id == "kept"
        await stopping
    assert service.closed


async def _await(call: Any) -> Any:
    return await call


async def test_taken_port_is_reported_at_once() -> None:
    async with serving(EchoService()) as (running, _):
        port = int(running.address.rsplit(":", 1)[1])
        with pytest.raises(CannotBind, match=str(port)):
            await start_server(settings(port=port), building(EchoService()))


class Starting:
    """A server that starts; its service is built once `built` is set."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.service = EchoService()
        self.built = asyncio.Event()
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._failure = failure

    @asynccontextmanager
    async def start(self) -> AsyncIterator[tuple[str, asyncio.Task[RunningServer]]]:
        starting = asyncio.create_task(start_server(settings(), self._build))
        try:
            yield await self._address, starting
        finally:
            self.built.set()
            [result] = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(result, RunningServer):
                await result.stop()

    async def _build(self, server: grpc.aio.Server, parts: Parts) -> EchoService:
        rpc.add_DraftServicer_to_server(self.service, server)
        self._address.set_result(parts.address)
        await self.built.wait()
        if self._failure is not None:
            raise self._failure
        return self.service


async def test_a_server_refuses_connections_until_it_has_started() -> None:
    """A caller that has another address to try would otherwise wait until this server is ready."""
    first = Starting()
    async with first.start() as (address, starting):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*host_and_port(address))
        first.built.set()
        await starting
        async with grpc.aio.insecure_channel(address) as channel:
            assert (await rpc.DraftStub(channel).Propose(request("s"))).answers[0].session_id == "s"


async def test_of_two_servers_that_start_on_one_port_the_second_fails_and_closes_its_service() -> None:
    second = Starting()
    async with second.start() as (address, starting):
        port = host_and_port(address)[1]
        first = await start_server(settings(port=port), building(EchoService()))
        second.built.set()
        with pytest.raises(CannotBind, match=str(port)):
            await starting
        assert second.service.closed
        await first.stop()


async def test_a_start_that_fails_gives_its_port_back() -> None:
    failing = Starting(errors.Broken("no model"))
    async with failing.start() as (address, starting):
        failing.built.set()
        with pytest.raises(errors.Broken):
            await starting
        running = await start_server(settings(port=host_and_port(address)[1]), building(EchoService()))
        await running.stop()


@pytest.mark.parametrize("left", [0, 3])
async def test_a_process_says_at_its_end_how_many_tasks_outlived_its_service(left: int) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.galley.common.leaking", str(left)),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            events = []
            async for line in process.stderr:
                events.append(json.loads(line))
                if events[-1]["event"] == "server started":
                    process.send_signal(signal.SIGTERM)
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert events[-1]["event"] == "server stopped"
    assert events[-1]["tasks"] == left
