"""Turn an engine into a service on a server: calibrated, limited and registered."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc

from galley.common.logs import get_logger
from galley.common.registry.leases import TARGET_POOL
from galley.common.registry.registration import registered
from galley.common.server.process import in_passing_thread
from galley.common.server.server import Parts, Service
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.calibrate import measure
from services.target.engine.protocol import TargetEngine
from services.target.servicer import Limits, TargetService
from services.target.settings import TargetSettings

_LOG = get_logger(__name__)
# Longest time that a step waits for a draft that is due; it waits only where that pays.
_MAX_LINGER_MS = 50.0
# Share of the drain timeout in which live sessions may end here before they move to another replica.
_LEAVE_SHARE = 0.6


async def add_target(
    server: grpc.aio.Server, parts: Parts, engine: TargetEngine, settings: TargetSettings
) -> TargetService:
    """Calibrate the engine and serve it on `server`."""
    parts.readiness.stage("measuring steps")
    times = await in_passing_thread(measure, engine)
    # The names are those of the file that `galley plan --capacity` reads.
    _LOG.info(
        "steps measured",
        step_ms=round(times.one_row_ns / 1e6, 3),
        row_costs=str(times.curve),
        kv_tokens=engine.info.kv_blocks * engine.info.kv_block_tokens,
    )
    limits = Limits(
        max_draft_tokens=settings.max_draft_tokens,
        max_sessions=settings.max_sessions,
        max_rows=settings.max_rows,
        max_linger_ms=_MAX_LINGER_MS,
    )
    service = TargetService(engine, times, parts.telemetry.scope(__name__), limits, parts.metrics)
    rpc.add_TargetServicer_to_server(service, server)
    return service


def registered_target(service: TargetService, settings: TargetSettings, bound: str) -> Service:
    """Return the service, registered from now on if there is a registry; `bound` is where it listens."""
    address = settings.advertise or bound

    async def last_sessions() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_timeout_s * _LEAVE_SHARE):
                await service.quiet()

    return registered(service, settings, TARGET_POOL, lambda: service.lease(address), last_sessions)
