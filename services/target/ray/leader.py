"""Rank 0 of a sharded target: meets the others, loads its shard, serves, and registers where it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc
from pydantic import SecretStr

from galley.common.logs import get_logger
from galley.common.metrics.labels import TARGET
from galley.common.metrics.metering import ANY_PORT, OFF, Metering, start_metering
from galley.common.registry.registration import Registered
from galley.common.server.lifecycle import flush_telemetry
from galley.common.server.listen import CannotBind
from galley.common.server.process import in_passing_thread
from galley.common.server.server import Parts, RunningServer, Service, start_server
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from galley.core.errors import Unavailable
from galley.engine.parallel.process_group import Store
from services.target.ranks.rank import RankSpec
from services.target.ranks.rank_zero import RankZero
from services.target.registration import Facts, registered_target
from services.target.servicer import TargetService
from services.target.serving import add_target
from services.target.settings import TargetSettings

_LOG = get_logger(__name__)

METRICS_PORTS = 16
"""From the one that is told upwards, the first of so many ports that is free serves a replica's metrics."""

_PORTS_END = 65536


class Leader:
    """A replica's life in rank 0: `serve`, then `stop`; or `withdraw`, when a rank was lost.

    `on_loss` is called from the engine's thread.
    """

    def __init__(
        self, settings: TargetSettings, spec: RankSpec, redis_url: str, on_loss: Callable[[], None]
    ) -> None:
        # Replicas on Ray are told where to register apart from what Ray shows.
        self._settings = settings.model_copy(update={"redis_url": SecretStr(redis_url)})
        self._rank = RankZero(self._settings, spec, on_loss)
        self._service: TargetService | None = None
        self._server: RunningServer | None = None
        self._telemetry = Telemetry()
        self._metering = Metering()

    async def serve(self, store: Store | None) -> str:
        """Load and serve; the address. `store` is where the followers come; None with one rank."""
        self._telemetry = start_telemetry("galley-target")
        self._metering = await _start_metering(self._settings)
        if self.metrics_address:
            _LOG.info("serving metrics", address=self.metrics_address)
        self._server = await self._start_server(self._settings, store)
        return self._settings.advertise or self._server.address

    @property
    def metrics_address(self) -> str:
        """Where /metrics is fetched (host:port), if anywhere."""
        return self._metering.address

    def facts(self) -> Facts:
        """What the replica says of itself now."""
        return self._built.facts()

    async def withdraw(self) -> None:
        """Be no longer registered, and say last words; what is under way is left to its fate."""
        if self._server is not None and isinstance(self._server.service, Registered):
            await self._server.service.withdraw()
        await flush_telemetry(self._telemetry, self._metering)

    async def stop(self) -> None:
        """Drain, withdraw, and let the other ranks go."""
        if self._server is not None:
            await self._server.stop()
        await asyncio.to_thread(self._rank.release)
        await flush_telemetry(self._telemetry, self._metering)

    @property
    def _built(self) -> TargetService:
        if self._service is None:
            raise Unavailable("this replica is not loaded yet")
        return self._service

    async def _start_server(self, settings: TargetSettings, store: Store | None) -> RunningServer:
        """Where another replica of the node has the health port, any other: the log says which."""
        try:
            running = await start_server(
                settings,
                lambda server, parts: self._build(server, parts, store),
                Parts(telemetry=self._telemetry, metrics=self._metering.registry),
            )
        except CannotBind:
            if settings.health_port <= 0:
                raise
            return await self._start_server(settings.model_copy(update={"health_port": 0}), store)
        if running.health_address:
            _LOG.info("serving health", address=running.health_address)
        return running

    async def _build(self, server: grpc.aio.Server, parts: Parts, store: Store | None) -> Service:
        engine = await in_passing_thread(self._rank.load, store)
        self._service = await add_target(server, parts, engine, self._settings)
        return registered_target(self._service, self._settings, parts.address)


async def _start_metering(settings: TargetSettings) -> Metering:
    """A replica serves, whoever has its metrics port: other replicas of the node are told the same one."""
    host, told = settings.host, settings.metrics_port
    if told in {OFF, ANY_PORT}:
        return await start_metering(TARGET, host, told)
    for port in range(told, min(told + METRICS_PORTS, _PORTS_END)):
        with suppress(OSError):
            return await start_metering(TARGET, host, port)
    _LOG.warning("no metrics port is free; taking any", first=told, tried=METRICS_PORTS)
    return await start_metering(TARGET, host, ANY_PORT)
