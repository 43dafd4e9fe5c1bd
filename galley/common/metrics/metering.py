"""The metrics of a process: counted if somebody is to have them, by scrape or by push, or by both."""

from __future__ import annotations

from dataclasses import dataclass

from galley.common.metrics.labels import SERVICES
from galley.common.metrics.push import Pusher
from galley.common.metrics.registry import Registry
from galley.common.metrics.scrape import ScrapeServer
from galley.common.tracing.otlp import exports

OFF = -1
"""As a port: nothing is listened on."""
ANY_PORT = 0
"""As a port: the system chooses."""


@dataclass(frozen=True, slots=True)
class Metering:
    """`registry` is None where nobody is to have them; `address` is where they are fetched, if anywhere."""

    registry: Registry | None = None
    address: str = ""
    _scrapes: ScrapeServer | None = None
    _pusher: Pusher | None = None

    async def close(self) -> None:
        """Send what is left, listen no more."""
        if self._pusher is not None:
            await self._pusher.close()
        if self._scrapes is not None:
            await self._scrapes.close()


async def start_metering(service: str, host: str, port: int) -> Metering:
    """Begin to give the metrics of `service`, if the catalogue names it; on `port` unless that is OFF.

    Raises OSError if the port cannot be had.
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
