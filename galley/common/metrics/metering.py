"""Metrics of a process, exported by scrape, by OTLP push, or by both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from galley.common.config.settings import OFF
from galley.common.metrics.labels import SERVICES
from galley.common.metrics.metric import LabelValues, Metric
from galley.common.metrics.registry import Registry
from galley.common.tls.channels import Material
from galley.common.tls.files import WatchedFiles
from galley.common.tracing.otlp import is_exported
from galley.common.tracing.telemetry import Telemetry

ANY_PORT = 0
"""Port value that lets the system choose."""


@dataclass(frozen=True, slots=True)
class Metering:
    """Exporters of a process. `registry` is None if metrics are off; `address` is the scrape server's."""

    registry: Registry | None = None
    address: str = ""
    _closes: tuple[Callable[[], Awaitable[None]], ...] = ()

    async def close(self) -> None:
        for close in self._closes:
            await close()


async def start_metering(service: str, host: str, port: int, *, is_read: bool = False) -> Metering:
    """Start the scrape server, unless `port` is OFF, and the push to a collector, if one is configured.

    With `is_read`, another port serves the registry. Raise OSError if the port cannot be bound, ValueError if
    the settings of the push are invalid.
    """
    pushed = is_exported("metrics")
    if service not in SERVICES or not (port != OFF or pushed or is_read):
        return Metering()
    registry = Registry(service)
    address, closes = "", []
    if port != OFF:
        from galley.common.metrics.scrape import ScrapeServer  # noqa: PLC0415  # imports prometheus_client

        scrapes = ScrapeServer(registry)
        address = await scrapes.start(host, port)
        closes.append(scrapes.close)
    if pushed:
        from galley.common.metrics.push import Pusher  # noqa: PLC0415  # imports the SDK

        pusher = Pusher(registry, f"galley-{service}")
        pusher.start()
        closes.insert(0, pusher.close)
    return Metering(registry, address, tuple(closes))


def observe_expiry(registry: Registry, metric: Metric, files: WatchedFiles[Material] | None) -> None:
    """Register the expiry of the certificate in `files`; the metric is absent without one."""

    def read() -> list[tuple[LabelValues, float]]:
        expires = None if files is None else files.latest().expires
        return [] if expires is None else [((), expires.timestamp())]

    registry.observe(metric, read)


async def flush_telemetry(telemetry: Telemetry, metering: Metering) -> None:
    """Send the remaining traces and metrics at the same time; a second call sends nothing."""
    await asyncio.gather(metering.close(), asyncio.to_thread(telemetry.shutdown))
