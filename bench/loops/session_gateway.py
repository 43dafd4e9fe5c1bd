"""Run the real gateway over a timed store: Redis, or one that answers at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import grpc
from pydantic import Field

from bench.loops.store import InstantStore, TimedStore
from galley.common.config.settings import settings_config
from galley.common.server.server import Parts, run_main
from galley.core.store import SessionStore
from services.gateway.service import GatewayService, build, interceptors, open_redis
from services.gateway.settings import GatewaySettings


class MeasuredSettings(GatewaySettings):
    """The gateway's settings, and what is measured."""

    model_config = settings_config("GALLEY_GATEWAY_")

    bench_store: Literal["redis", "instant"] = Field("redis", description="Kind of store.")
    bench_timings: Path = Field(Path(), description="File that receives the time of each commit.")


def build_measured(
    settings: MeasuredSettings,
) -> Callable[[grpc.aio.Server, Parts], Awaitable[GatewayService]]:
    """Return the gateway, with its store behind a TimedStore."""

    def open_store(given: GatewaySettings) -> SessionStore:
        real = settings.bench_store == "redis"
        return TimedStore(open_redis(given) if real else InstantStore(), settings.bench_timings)

    return build(settings, open_store)


if __name__ == "__main__":
    run_main(
        MeasuredSettings,
        "gateway",
        "A gateway whose store is measured.",
        build_measured,
        interceptors=interceptors,
    )
