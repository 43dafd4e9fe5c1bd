"""The parts of a gateway that its HTTP port shares with that of gRPC."""

from __future__ import annotations

from dataclasses import dataclass

from galley.common.metrics.registry import Registry
from services.gateway.auth.authentication import Authentication
from services.gateway.generation import Generation
from services.gateway.telemetry.interceptor import RequestTracer


@dataclass(frozen=True, slots=True)
class Shared:
    """The session path, who may call, traces and metrics; None where they are off."""

    generation: Generation
    authentication: Authentication
    tracer: RequestTracer | None
    registry: Registry | None
