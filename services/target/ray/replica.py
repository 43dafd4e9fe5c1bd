"""A target replica on Ray Serve: one placement group, rank 0 in Serve's actor, the others in actors of ours.

Ray places, starts, watches and replaces. Requests bypass it: rank 0 listens on a gRPC port of its own and
registers itself in Redis, and the ranks talk by torch.distributed. A step makes no Ray call.

A lost rank ends the replica: rank 0 withdraws its registration, ends open requests with UNAVAILABLE and
exits; the other actors end with it, and Serve starts all of them again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import ray
from pydantic import SecretStr
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from galley.common.config.settings import OFF, read_secret
from galley.common.logs import get_logger, start_logging
from galley.common.metrics.labels import TARGET
from galley.common.metrics.metering import ANY_PORT, Metering, flush_telemetry, start_metering
from galley.common.registry.registration import Registered
from galley.common.server.process import in_passing_thread, limit_threads
from galley.common.server.server import Parts, RunningServer, Service, start_server
from galley.common.sockets import CannotBind
from galley.common.tracing.otlp import FLUSH_S
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from galley.core.errors import Unavailable
from services.target.ranks.rank import (
    REDIS_URL,
    REDIS_URL_FILE,
    rank_settings,
    run_follower,
    settings_for_ranks,
)
from services.target.ranks.ranks import LossExit, RankZero
from services.target.ray.autoscaling import KV_FREE_SHARE, QUEUE_DEPTH
from services.target.servicer import TargetService, add_target, registered_target
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from galley.engine.parallel.process_group import Store

_LOG = get_logger(__name__)

METRICS_PORTS = 16
"""Ports tried from the configured one upwards; the first free one serves this replica's metrics."""

_PORTS_END = 65536
# Addresses to listen on to which nobody can connect; the node's own address replaces them.
_WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104
# Time for the ranks to send their spans, at an orderly end.
_RANKS_END_S = FLUSH_S + 1.0


class Follower:
    """The actor of a rank other than 0: one call, which lasts as long as the replica."""

    def follow(self, settings: Mapping[str, Any], rank: int, address: str) -> None:
        start_logging("galley-target-rank")
        run_follower(rank_settings(settings), rank, address)


class Leader:
    """Rank 0 of a replica: `serve`, then `stop`; `exit` ends it after a rank was lost."""

    def __init__(self, settings: TargetSettings) -> None:
        self.exit = LossExit(self._withdraw)
        self._settings = settings
        self._rank = RankZero(settings, self.exit.begin)
        self._service: TargetService | None = None
        self._server: RunningServer | None = None
        self._telemetry = Telemetry()
        self._metering = Metering()

    async def serve(self, store: Store | None) -> str:
        """Load and serve; return the address. The other ranks meet at `store`; None with one rank."""
        self._telemetry = start_telemetry("galley-target")
        self._metering = await _start_metering(self._settings)
        if self._metering.address:
            _LOG.info("metrics server started", address=self._metering.address)
        self._server = await self._start_server(self._settings, store)
        return self._settings.advertise or self._server.address

    def load(self) -> dict[str, float]:
        """Return the load now, for `services.target.ray.autoscaling`; empty until the model is loaded."""
        if self._service is None:
            return {}
        info = self._service.describe()
        return {
            QUEUE_DEPTH: float(info.queue_depth),
            KV_FREE_SHARE: info.kv_blocks_free / max(1, info.kv_blocks_total),
        }

    async def _withdraw(self) -> None:
        """Withdraw the lease and send the remaining traces and metrics; do not wait for open requests."""
        if self._server is not None and isinstance(self._server.service, Registered):
            await self._server.service.withdraw()
        await flush_telemetry(self._telemetry, self._metering)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        await asyncio.to_thread(self._rank.release)
        await flush_telemetry(self._telemetry, self._metering)

    async def _start_server(self, settings: TargetSettings, store: Store | None) -> RunningServer:
        """Start the server; take any health port if another replica of this node has the configured one."""
        try:
            running = await start_server(
                settings,
                lambda server, parts: self._build(server, parts, store),
                Parts(telemetry=self._telemetry, metrics=self._metering.registry),
            )
        except CannotBind:
            if settings.health_port <= 0 or self._service is not None:
                raise  # with a service, the health port was free
            return await self._start_server(settings.model_copy(update={"health_port": 0}), store)
        if running.health_address:
            _LOG.info("health server started", address=running.health_address)
        return running

    async def _build(self, server: grpc.aio.Server, parts: Parts, store: Store | None) -> Service:
        engine = await in_passing_thread(self._rank.load, store)
        self._service = await add_target(server, parts, engine, self._settings)
        self._service.call_on_loss(self.exit.begin)
        return registered_target(self._service, self._settings, parts.address)


class TargetReplica:
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Mapping[str, Any], size: int
    ) -> None:
        self._settings = _settings_here(settings, size)
        limit_threads(self._settings.threads)
        start_logging("galley-target", self._settings.log_level, self._settings.log_format)
        from galley.engine.parallel.process_group import open_store  # noqa: PLC0415  # after limit_threads

        self._leader = Leader(self._settings)
        self._watches: list[asyncio.Task[None]] = []
        values = settings_for_ranks(self._settings)
        store = open_store(self._settings.host, size) if size > 1 else None
        for rank in range(1, size):
            actor = _place(rank, self._settings)
            call = actor.follow.remote(values, rank, store.address if store else "")
            self._watches.append(asyncio.create_task(self._watch(rank, call)))
        address = await self._leader.serve(store)
        _LOG.info("replica started", address=address, ranks=size)

    async def check_health(self) -> None:
        """Raise Unavailable when Serve must replace this replica; Serve calls it every second."""
        if self._leader.exit.has_begun:
            raise Unavailable("this replica has lost a rank")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load; Serve calls it to autoscale."""
        return self._leader.load()

    async def __del__(self) -> None:
        """Drain, withdraw and stop the other ranks; Serve calls it at an orderly end."""
        self._leader.exit.disarmed = True
        await self._leader.stop()
        if self._watches:
            # The other ranks end with this process, and may have spans to send.
            await asyncio.wait(self._watches, timeout=_RANKS_END_S)
        for watch in self._watches:
            watch.cancel()

    async def _watch(self, rank: int, call: Any) -> None:
        """Notice the exit of a rank, even while no step runs."""
        try:
            await call
        except ray.exceptions.RayError as error:
            _LOG.error("rank exited", rank=rank, error=str(error))
        self._leader.exit.begin()


async def _start_metering(settings: TargetSettings) -> Metering:
    """Serve metrics at the first free port from the configured one on, which replicas of a node share."""
    host, configured = settings.host, settings.metrics_port
    if configured in {OFF, ANY_PORT}:
        return await start_metering(TARGET, host, configured)
    for port in range(configured, min(configured + METRICS_PORTS, _PORTS_END)):
        with suppress(OSError):
            return await start_metering(TARGET, host, port)
    _LOG.warning("metrics ports taken; using any", first=configured, tried=METRICS_PORTS)
    return await start_metering(TARGET, host, ANY_PORT)


def _redis_url() -> str:
    """Return the store's URL from this node's environment, or the file it names; empty: do not register."""
    url, file = os.environ.get(REDIS_URL, ""), os.environ.get(REDIS_URL_FILE)
    return read_secret(Path(file)) if file and not url else url


def _settings_here(settings: Mapping[str, Any], size: int) -> TargetSettings:
    """Return the replica's settings on this node; without a port each replica of a node takes a free one."""
    here = {"port": 0, **settings, "tensor_parallel": size}
    if here.get("host") in _WILDCARDS:
        util: Any = ray.util
        here["host"] = util.get_node_ip_address()
    return rank_settings(here).model_copy(update={"redis_url": SecretStr(_redis_url())})


def _place(rank: int, settings: TargetSettings) -> Any:
    """Return a rank's actor, in its bundle of this replica's placement group; it ends with this process."""
    group: Any = ray.util.get_current_placement_group()
    actor = ray.remote(Follower).options(
        num_cpus=settings.threads,
        num_gpus=1 if settings.device.startswith("cuda") else 0,
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=rank
        ),
    )
    return actor.remote()
