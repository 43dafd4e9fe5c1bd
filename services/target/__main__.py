"""Runs a target replica: `python -m services.target`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.process import in_passing_thread
from services.common.redis_connections import refuse_bad_files
from services.common.server import main_of
from services.target.loading import load_engine
from services.target.registration import registered_target
from services.target.serving import add_target
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import grpc

    from services.common.server import Parts, Service

_DESCRIPTION = "A Galley target: verifies draft tokens of many sessions at once with the trusted model."


def build(settings: TargetSettings) -> Callable[[grpc.aio.Server, Parts], Awaitable[Service]]:
    """How to build the service of these settings. Raises BadFile."""
    refuse_bad_files(settings.redis_url)
    if settings.tensor_parallel > 1:
        raise ValueError(
            f"tensor_parallel: {settings.tensor_parallel} ranks need Ray: python -m services.target.deploy"
        )

    async def build_service(server: grpc.aio.Server, parts: Parts) -> Service:
        parts.readiness.stage("loading model", detail=settings.model)
        engine = await in_passing_thread(load_engine, settings)
        service = await add_target(server, parts, engine, settings)
        return registered_target(service, settings, parts.address)

    return build_service


def main() -> None:
    """Serve until told to stop."""
    main_of(TargetSettings, "target", _DESCRIPTION, build)


if __name__ == "__main__":
    main()
