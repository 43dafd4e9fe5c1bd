"""Starting, serving and stopping a gRPC server: health, reflection, limits, signals, in one way for all.

The order of a start: bind the port (so that a taken port is known at once), build the service (which may
load a model), serve, tell that it is ready. The order of a stop: NOT_SERVING, drain, stop, close.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from galley.common.config.settings import ServiceSettings, parse_settings, refuse
from galley.common.logs import get_logger, start_logging
from galley.common.metrics.certificates import observe_served
from galley.common.metrics.metering import Metering, start_metering
from galley.common.metrics.registry import Registry
from galley.common.server.deserialize import DeserializeInterceptor
from galley.common.server.health import HealthServicer, StandardCallsInterceptor
from galley.common.server.health_port import HealthPort, open_health_port
from galley.common.server.interceptors import RequestTimeoutInterceptor, StatusInterceptor
from galley.common.server.lifecycle import Readiness, flush_telemetry, run_unless
from galley.common.server.listen import CannotBind, bind, server_files, server_options
from galley.common.server.process import die_with_parent
from galley.common.tls.credentials import server_credentials
from galley.common.tls.files import BadFile
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from galley.core.errors import GalleyError

_LOG = get_logger(__name__)

# For what is still open when a service says that it has drained, such as health watches.
_STOP_GRACE_S = 0.5


class Service(Protocol):
    """What a server serves."""

    @property
    def grpc_services(self) -> Sequence[str]:
        """The full names that health and reflection show."""

    async def drain(self) -> None:
        """Refuse new work and finish what is under way; may be cancelled when time is up."""

    async def close(self) -> None:
        """Give everything back; called once, after the server has stopped."""


@dataclass(frozen=True)
class Parts:
    """What a service may use while it is built."""

    readiness: Readiness = field(default_factory=lambda: Readiness(None))
    telemetry: Telemetry = field(default_factory=Telemetry)
    # host:port that the server is bound to.
    address: str = ""
    # Where metrics are counted; None: they are not.
    metrics: Registry | None = None


Interceptors: TypeAlias = Callable[[Parts], Sequence[grpc.aio.ServerInterceptor]]
"""A service's own, made before it is built: its address is not known yet."""


def no_interceptors(_parts: Parts) -> Sequence[grpc.aio.ServerInterceptor]:
    """Of a service that has none."""
    return ()


@dataclass(frozen=True)
class RunningServer:
    """A server that serves at `address` (host:port) until it is stopped.

    `health_address` is where health alone is told; empty: nowhere.
    """

    address: str
    service: Service
    health_address: str
    _server: grpc.aio.Server
    _health: HealthServicer
    _health_port: HealthPort
    _drain_timeout_s: float

    async def stop(self) -> None:
        """Refuse new work, finish what is under way within the drain timeout, and give everything back."""
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self.service.drain()
        except TimeoutError:
            _LOG.warning("drain timeout passed; ending what is still under way")
        await self._server.stop(_STOP_GRACE_S)
        await self._health_port.stop()
        await self.service.close()


async def start_server(
    settings: ServiceSettings,
    build: Callable[[grpc.aio.Server, Parts], Awaitable[Service]],
    parts: Parts | None = None,
    interceptors: Interceptors = no_interceptors,
) -> RunningServer:
    """Start serving in the running event loop, without touching the process; raises CannotBind or BadFile.

    What `interceptors`, the service's own, raise becomes a status as what it raises itself. They come before
    a call's one request is read: whom they refuse has sent it for nothing.
    """
    parts = parts or Parts()
    files = server_files(settings)
    credentials = server_credentials(files)
    server = grpc.aio.server(
        interceptors=[
            StandardCallsInterceptor(),
            *parts.telemetry.server_interceptors(),
            StatusInterceptor(),
            *interceptors(parts),
            RequestTimeoutInterceptor(settings.request_timeout_s),
            DeserializeInterceptor(settings.max_message_bytes),
        ],
        options=server_options(settings),
    )
    address = bind(server, settings.host, settings.port, credentials)
    servicer, health_port = HealthServicer(), HealthPort()
    try:
        await _set_status(servicer, ("",), health_pb2.HealthCheckResponse.NOT_SERVING)
        health_port = await open_health_port(
            settings.host, settings.health_port, servicer, settings.request_timeout_s
        )
        service = await build(server, replace(parts, address=address))
        names = ("", *service.grpc_services)
        await _set_status(servicer, names, health_pb2.HealthCheckResponse.NOT_SERVING)
        _add_standard_services(server, service.grpc_services, servicer, reflects=settings.reflection)
        await server.start()
    except BaseException:
        await health_port.stop()
        await server.stop(None)
        raise
    if parts.metrics is not None:
        observe_served(parts.metrics, files)
    await _set_status(servicer, names, health_pb2.HealthCheckResponse.SERVING)
    return RunningServer(
        address, service, health_port.address, server, servicer, health_port, settings.drain_timeout_s
    )


async def run_service(
    settings: ServiceSettings,
    name: str,
    build: Callable[[grpc.aio.Server, Parts], Awaitable[Service]],
    interceptors: Interceptors = no_interceptors,
) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully."""
    stopped = _stop_signal()
    metering = await start_metering(name, settings.host, settings.metrics_port)
    readiness, telemetry = Readiness(settings.ready_fd), start_telemetry(f"galley-{name}")
    parts = Parts(readiness, telemetry, metrics=metering.registry)
    parts.readiness.stage("starting")
    try:
        running = await run_unless(stopped, start_server(settings, build, parts, interceptors))
        if running is None:
            return
        # What a start leaves behind (modules, a model) lives as long as the process; do not walk it again.
        gc.collect()
        gc.freeze()
        told = _where_else(metering, running)
        _LOG.info("serving", address=running.address, **told)
        parts.readiness.ready(running.address, **told)
        await stopped.wait()
        _LOG.info("stopping")
        await running.stop()
        await flush_telemetry(telemetry, metering)
        # Of a service that has given everything back: none but the transport's own.
        _LOG.info("stopped", tasks=len(asyncio.all_tasks()) - 1)
    finally:
        parts.readiness.close()
        await flush_telemetry(telemetry, metering)


S = TypeVar("S", bound=ServiceSettings)


def main_of(
    settings_type: type[S],
    name: str,
    description: str,
    build: Callable[[S], Callable[[grpc.aio.Server, Parts], Awaitable[Service]]],
    argv: Sequence[str] | None = None,
    interceptors: Callable[[S], Interceptors] = lambda _: no_interceptors,
) -> None:
    """The whole of a service's `__main__`: returns when it has stopped, exits 1 if it cannot start.

    And 2 for what it is told: a setting that is wrong, or names a file that is of no use.
    """
    arguments = sys.argv[1:] if argv is None else argv
    program = f"python -m services.{name}"
    settings = parse_settings(settings_type, arguments, program, description)
    if settings.die_with_parent:
        die_with_parent()
    start_logging(f"galley-{name}", settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run_service(settings, name, build(settings), interceptors(settings)))
    except BadFile as error:
        refuse(settings_type, program, error.setting, error.problem)
    except (CannotBind, GalleyError, OSError, ValueError) as error:
        _LOG.error("cannot start", problem=str(error))  # the message says it all
        raise SystemExit(1) from None


def _where_else(metering: Metering, running: RunningServer) -> dict[str, str]:
    """What is served apart from the service itself."""
    served = {"metrics": metering.address, "health": running.health_address}
    return {what: address for what, address in served.items() if address}


async def _set_status(
    servicer: HealthServicer, names: Sequence[str], status: health_pb2.HealthCheckResponse.ServingStatus
) -> None:
    for name in names:
        await servicer.set(name, status)


def _add_standard_services(
    server: grpc.aio.Server, grpc_services: Sequence[str], servicer: HealthServicer, *, reflects: bool
) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if reflects:
        reflection.enable_server_reflection(
            (*grpc_services, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )


def _stop_signal() -> asyncio.Event:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  # not there on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop
