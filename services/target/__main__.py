"""Run a target replica, or one host of its ranks: `python -m services.target`."""

from __future__ import annotations

from galley.common.server.sigterm import heed_sigterm

if __name__ == "__main__":
    heed_sigterm()

import sys
from collections.abc import Awaitable, Callable

import grpc

from galley.common.config.settings import parse_settings
from galley.common.redis.connections import refuse_bad_files
from galley.common.server.process import in_passing_thread
from galley.common.server.server import Parts, Prepared, Service, run_main
from services.target.loading import load_engine
from services.target.ranks.ranks import exit_on_loss, run_host, start_ranked_target
from services.target.servicer import add_target, registered_target
from services.target.settings import TargetSettings

_DESCRIPTION = "A Galley target: verifies draft tokens of many sessions at once with the trusted model."


def build(settings: TargetSettings) -> Callable[[grpc.aio.Server, Parts], Awaitable[Service]]:
    """Return what builds the service on a server. Raise BadFile if a file is unusable."""
    refuse_bad_files(settings.redis_url)

    async def build_service(server: grpc.aio.Server, parts: Parts) -> Service:
        if settings.engine == "vllm":
            # Late: only vLLM's environment has what it imports.
            from services.target.engine.vllm.service import start_vllm_target  # noqa: PLC0415

            return await start_vllm_target(settings, server, parts)
        if settings.tensor_parallel > 1:
            return await start_ranked_target(settings, server, parts)
        parts.readiness.stage("loading model", detail=settings.model)
        engine = await in_passing_thread(load_engine, settings)
        target = await add_target(server, parts, engine, settings)
        service = registered_target(target, settings, parts.address)
        exit_on_loss(target, service)
        return service

    return build_service


def main() -> None:
    """Serve until stopped; a host other than 0 runs its ranks until rank 0 stops them."""
    settings = parse_settings(TargetSettings, sys.argv[1:], "galley target", _DESCRIPTION)
    if settings.host_index > 0:
        run_host(settings)
        return
    run_main(TargetSettings, "target", _DESCRIPTION, lambda settings: Prepared(build(settings)))


if __name__ == "__main__":
    main()
