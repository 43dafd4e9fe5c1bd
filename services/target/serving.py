"""Turn an engine into a service on a server: calibrated and limited."""

from __future__ import annotations

import grpc

from galley.common.logs import get_logger
from galley.common.server.process import in_passing_thread
from galley.common.server.server import Parts
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.calibrate import measure
from services.target.engine.protocol import TargetEngine
from services.target.servicer import Limits, TargetService
from services.target.settings import TargetSettings

_LOG = get_logger(__name__)
# Longest time that a step waits for a draft that is due; it waits only where that pays.
_MAX_LINGER_MS = 50.0


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
    spans = parts.telemetry.scope(__name__)
    service = TargetService(engine, times, spans, limits_of(settings), parts.metrics)
    rpc.add_TargetServicer_to_server(service, server)
    return service


def limits_of(settings: TargetSettings) -> Limits:
    """Return what a replica with these settings accepts."""
    return Limits(
        max_draft_tokens=settings.max_draft_tokens,
        max_sessions=settings.max_sessions,
        max_rows=settings.max_rows,
        max_linger_ms=_MAX_LINGER_MS,
    )
