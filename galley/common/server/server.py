"""Start, serve and stop a gRPC server with health, reflection, limits and signals.

A start takes the port (so that one in use fails at once), builds the service (which may load a model),
listens, and reports that it is ready. A stop sets NOT_SERVING, drains, and closes server and service.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from galley.common.config.settings import ServerLimits, ServiceSettings, exit_with_bad_setting, parse_settings
from galley.common.logs import get_logger, start_logging
from galley.common.metrics.catalogue import SERVED_CERTIFICATE_EXPIRY
from galley.common.metrics.metering import flush_telemetry, observe_expiry, start_metering
from galley.common.metrics.registry import Registry
from galley.common.server.acceptors import Acceptors
from galley.common.server.deserialize import RequestInterceptor
from galley.common.server.garbage import collect_seldom
from galley.common.server.health import HealthServicer, serve_health_only
from galley.common.server.interceptors import StandardCallsInterceptor, StatusInterceptor
from galley.common.server.listen import bind, server_files, server_options
from galley.common.server.process import Readiness, die_with_parent, run_unless
from galley.common.tls.credentials import server_credentials
from galley.common.tls.files import BadFile
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from galley.core.errors import GalleyError

_LOG = get_logger(__name__)

# For calls that are open after the drain, such as health watches.
_STOP_GRACE_S = 0.5
_STACK_BYTES = 64 * 1024 * 1024
"""Of each thread, as far as it is used: llguidance recurses through a grammar, some 3 KiB a rule or level."""


class Service(Protocol):
    @property
    def grpc_services(self) -> Sequence[str]: ...

    async def drain(self) -> None:
        """Refuse new work and finish running work; cancelled when the drain timeout passes."""

    async def close(self) -> None:
        """Release all resources; called once, after the server has stopped."""


@dataclass(frozen=True)
class Parts:
    readiness: Readiness = field(default_factory=lambda: Readiness(None))
    telemetry: Telemetry = field(default_factory=Telemetry)
    # host:port that the server is bound to.
    address: str = ""
    metrics: Registry | None = None
    # Filled by a service that opens further ports: host:port by what they serve.
    addresses: dict[str, str] = field(default_factory=dict)


Interceptors: TypeAlias = Callable[[Parts], Sequence[grpc.aio.ServerInterceptor]]
"""A function that makes the interceptors of a service, before it is built and its address is known."""


class Prepared(NamedTuple):
    """The functions that make a service: `build`, and `interceptors` for what its calls pass before."""

    build: Callable[[grpc.aio.Server, Parts], Awaitable[Service]]
    interceptors: Interceptors = lambda _: ()


@dataclass(frozen=True)
class RunningServer:
    """A server at `address` (host:port); `health_address` is that of its health port, or empty."""

    address: str
    service: Service
    health_address: str
    _servers: Sequence[grpc.aio.Server]
    _health: HealthServicer
    _drain_timeout_s: float

    async def stop(self) -> None:
        """Refuse new work, finish running work within the drain timeout, and release all resources."""
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self.service.drain()
        except TimeoutError:
            _LOG.warning("drain timed out", timeout_s=self._drain_timeout_s)
        for server in self._servers:
            await server.stop(_STOP_GRACE_S)
        await self.service.close()


async def start_server(
    settings: ServiceSettings,
    build: Callable[[grpc.aio.Server, Parts], Awaitable[Service]],
    parts: Parts | None = None,
    interceptors: Interceptors = lambda _: (),
    limits: ServerLimits | None = None,
) -> RunningServer:
    """Serve in the running event loop; return the server. Raise CannotBind, BadFile, or as `build` does.

    Errors of `interceptors`, which run before the request of a call is read, become statuses. `limits`
    replace those of the settings.
    """
    parts = parts or Parts()
    limits = limits or settings.server_limits()
    files = server_files(settings)
    server = Acceptors(
        [
            *parts.telemetry.server_interceptors(),
            StatusInterceptor(),
            StandardCallsInterceptor(),
            *interceptors(parts),
            RequestInterceptor(limits),
        ],
        server_options(limits),
    )
    listen = partial(server.listen, credentials=server_credentials(files))
    servicer, health_address = HealthServicer(), ""
    servers: list[grpc.aio.Server] = [server]
    service: Service | None = None
    try:
        await _set_status(servicer, ("",), health_pb2.HealthCheckResponse.NOT_SERVING)
        if settings.health_port >= 0:
            health_server, health_address = await serve_health_only(
                settings.host, settings.health_port, servicer, limits.request_timeout_s
            )
            servers.append(health_server)
        address = bind(listen, settings.host, settings.port)
        service = await build(server, replace(parts, address=address))
        names = ("", *service.grpc_services)
        await _set_status(servicer, names, health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        if settings.reflection:
            standard = (health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection((*service.grpc_services, *standard), server)
        await server.start()
    except BaseException:
        for each in servers:
            await each.stop(None)
        if service is not None:
            await service.close()
        raise
    if parts.metrics is not None:
        observe_expiry(parts.metrics, SERVED_CERTIFICATE_EXPIRY, files)
    await _set_status(servicer, names, health_pb2.HealthCheckResponse.SERVING)
    return RunningServer(address, service, health_address, servers, servicer, settings.drain_timeout_s)


async def run_service(
    settings: ServiceSettings,
    name: str,
    prepared: Prepared,
) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully."""
    stopped = _stop_signal()
    metering = await start_metering(
        name, settings.host, settings.metrics_port, is_read=settings.collects_metrics
    )
    readiness, telemetry = Readiness(settings.ready_fd), start_telemetry(f"galley-{name}")
    parts = Parts(readiness, telemetry, metrics=metering.registry)
    parts.readiness.runs()
    try:
        running = await run_unless(
            stopped, start_server(settings, prepared.build, parts, prepared.interceptors)
        )
        if running is None:
            return
        collections = collect_seldom()
        addresses = {
            "metrics": metering.address,
            "health": running.health_address,
            **parts.addresses,
        }
        others = {name: address for name, address in addresses.items() if address}
        _LOG.info("server started", address=running.address, **others)
        parts.readiness.ready(running.address, **others)
        await stopped.wait()
        _LOG.info("server stopping")
        collections.cancel()
        await running.stop()
        await flush_telemetry(telemetry, metering)
        # Only tasks of the transport should be left.
        _LOG.info("server stopped", tasks=len(asyncio.all_tasks()) - 1)
    finally:
        parts.readiness.close()
        await flush_telemetry(telemetry, metering)


S = TypeVar("S", bound=ServiceSettings)


def run_main(
    settings_type: type[S],
    name: str,
    description: str,
    prepare: Callable[[S], Prepared],
    argv: Sequence[str] | None = None,
) -> None:
    """Run the service of `argv` (None: the command line) until SIGTERM or SIGINT has stopped it.

    Exit 2 for a setting that is wrong or names a file that cannot be used, else 1 if it cannot start.
    """
    arguments = sys.argv[1:] if argv is None else argv
    program = f"galley {name}"
    settings = parse_settings(settings_type, arguments, program, description)
    if settings.die_with_parent:
        die_with_parent()
    start_logging(f"galley-{name}", settings.log_level, settings.log_format)
    threading.stack_size(_STACK_BYTES)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run_service(settings, name, prepare(settings)))
    except BadFile as error:
        exit_with_bad_setting(settings_type, program, error.setting, error.problem)
    except (GalleyError, OSError, ValueError) as error:
        _LOG.error("start failed", error=str(error))
        raise SystemExit(1) from None


async def _set_status(
    servicer: HealthServicer, names: Sequence[str], status: health_pb2.HealthCheckResponse.ServingStatus
) -> None:
    for name in names:
        await servicer.set(name, status)


def _stop_signal() -> asyncio.Event:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        from galley.common.server.loop import ServiceLoop  # noqa: PLC0415  # uvloop is not on every platform
    except ImportError:
        return None
    return ServiceLoop
