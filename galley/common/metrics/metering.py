"""Metrics of a process, exported by scrape, by OTLP push, or by both."""

from __future__ import annotations

from dataclasses import dataclass

from galley.common.metrics.labels import SERVICES
from galley.common.metrics.push import Pusher
from galley.common.metrics.registry import Registry
from galley.common.metrics.scrape import ScrapeServer
from galley.common.tracing.otlp import exports

OFF = -1
"""Port value that disables the scrape server."""
ANY_PORT = 0
"""Port value that lets the system choose."""


@dataclass(frozen=True, slots=True)
class Metering:
    """Exporters of a process. `registry` is None if metrics are off; `address` is the scrape server's."""

    registry: Registry | None = None
    address: str = ""
    _scrapes: ScrapeServer | None = None
    _pusher: Pusher | None = None

    async def close(self) -> None:
        """Push once more and stop the scrape server."""
        if self._pusher is not None:
            await self._pusher.close()
        if self._scrapes is not None:
            await self._scrapes.close()


async def start_metering(service: str, host: str, port: int) -> Metering:
    """Start exporting the metrics of `service`; listen on `port` unless it is OFF.

    Raise OSError if the port cannot be bound.
    """
    pushed = exports("metrics")
    if service not in SERVICES or (port == OFF and not pushed):
        return Metering()
    from galley.common.metrics.registry import Registry  # noqa: PLC0415  # off costs nothing

    registry = Registry(service)
    scrapes, address = None, ""
    if port != OFF:
        from galley.common.metrics.scrape import ScrapeServer  # noqa: PLC0415

        scrapes = ScrapeServer(registry)
        address = await scrapes.start(host, port)
    return Metering(registry, address, scrapes, _pusher(registry, service) if pushed else None)


def _pusher(registry: Registry, service: str) -> Pusher:
    from galley.common.metrics.push import Pusher  # noqa: PLC0415  # imports the SDK

    pusher = Pusher(registry, f"galley-{service}")
    pusher.start()
    return pusher
