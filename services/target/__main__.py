"""Runs a target replica: `python -m services.target`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
from services.common.process import limit_threads
from services.common.server import main_of
from services.target.servicer import TargetService
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import grpc

    from services.common.server import Parts
    from services.target.verifier import Verifier

_DESCRIPTION = "A Galley target: verifies draft tokens of many sessions at once with the trusted model."


def build(settings: TargetSettings) -> Callable[[grpc.aio.Server, Parts], Awaitable[TargetService]]:
    """How to build the service of these settings."""

    async def build_service(server: grpc.aio.Server, parts: Parts) -> TargetService:
        parts.readiness.stage("loading model", detail=settings.model)
        engine = await asyncio.to_thread(load_verifier, settings)
        service = TargetService(
            engine,
            parts.telemetry.tracer(__name__),
            max_draft_tokens=settings.max_draft_tokens,
            max_waiting=settings.max_waiting,
        )
        rpc.add_TargetServicer_to_server(service, server)
        return service

    return build_service


def load_verifier(settings: TargetSettings) -> Verifier:
    """Load the model and probe it; blocks."""
    limit_threads(settings.threads)
    # Late, so that --help needs no torch.
    from services.engine.fingerprint import fingerprint  # noqa: PLC0415
    from services.engine.serving import load_model  # noqa: PLC0415
    from services.target.verifier import Verifier  # noqa: PLC0415

    model = load_model(settings.model, dtype=settings.dtype, device=settings.device, threads=settings.threads)
    return Verifier(
        model,
        fingerprint(model),
        max_sessions=settings.max_sessions,
        max_kv_tokens=settings.max_kv_tokens,
    )


def main() -> None:
    """Serve until told to stop."""
    main_of(TargetSettings, "target", _DESCRIPTION, build)


if __name__ == "__main__":
    main()
