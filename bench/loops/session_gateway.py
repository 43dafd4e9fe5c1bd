"""Run the real gateway over a timed store: Redis, or one that answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from bench.loops.store import InstantStore, timed
from galley.common.config.settings import settings_config
from galley.common.server.server import Prepared, run_main
from galley.core.store import SessionStore
from services.gateway.service import open_redis, prepare
from services.gateway.settings import GatewaySettings


class MeasuredSettings(GatewaySettings):
    """The gateway's settings, and what is measured."""

    model_config = settings_config("GALLEY_GATEWAY_")

    bench_store: Literal["redis", "instant"] = Field("redis", description="Kind of store.")
    bench_timings: Path = Field(Path(), description="File that receives the time of each commit.")


def prepare_measured(settings: MeasuredSettings) -> Prepared:
    """Return the gateway, with the commits of its store timed."""

    def open_store(given: GatewaySettings) -> SessionStore:
        real = settings.bench_store == "redis"
        return timed(open_redis(given) if real else InstantStore(), settings.bench_timings)

    return prepare(settings, open_store)


if __name__ == "__main__":
    run_main(
        MeasuredSettings,
        "gateway",
        "A gateway whose store is measured.",
        prepare_measured,
    )
