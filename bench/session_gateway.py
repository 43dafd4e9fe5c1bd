"""`python -m bench.session_gateway`: the real gateway over a store that is timed, Redis or none at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import grpc
from pydantic import Field

from bench.session_store import InstantStore, TimedStore
from galley.common.config.settings import settings_config
from galley.common.server.server import Parts, main_of
from services.gateway.service import GatewayService, OpenedStore, build, interceptors, open_redis
from services.gateway.settings import GatewaySettings


class MeasuredSettings(GatewaySettings):
    """A gateway's, and what is measured."""

    model_config = settings_config("GALLEY_GATEWAY_")

    bench_store: Literal["redis", "instant"] = Field("redis", description="Which store.")
    bench_timings: Path = Field(Path(), description="Where the times of commits are written.")


def build_measured(
    settings: MeasuredSettings,
) -> Callable[[grpc.aio.Server, Parts], Awaitable[GatewayService]]:
    """The gateway, with its store behind a TimedStore."""

    def open_store(given: GatewaySettings) -> OpenedStore:
        real = settings.bench_store == "redis"
        return TimedStore(open_redis(given) if real else InstantStore(), settings.bench_timings)

    return build(settings, open_store)


if __name__ == "__main__":
    main_of(
        MeasuredSettings,
        "gateway",
        "A gateway whose store is measured.",
        build_measured,
        interceptors=interceptors,
    )
