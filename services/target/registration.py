"""Register a target replica: the content of its lease, and how long its sessions may stay when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from galley.common.registry.leases import TARGET_POOL, target_lease
from galley.common.registry.registration import registered
from galley.common.server.server import Service
from galley.core.routing.choice import TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb
from services.target.settings import TargetSettings

_LEAVE_SHARE = 0.6
"""Share of the drain timeout in which live sessions may end here before they move to another replica."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of a replica's lease: its GetTargetInfo, and hashes of cached prefixes, best first."""

    info: pb.GetTargetInfoResponse
    cached_prefixes: Sequence[bytes] = ()


class LeasedService(Service, Protocol):
    """A target service that can fill its lease."""

    def facts(self) -> Facts:
        """Return the content of the lease now."""

    async def quiet(self) -> None:
        """Return once the live sessions have ended by themselves."""


def registered_target(service: LeasedService, settings: TargetSettings, bound: str) -> Service:
    """Return the service, registered from now on if there is a registry; `bound` is where it listens."""
    address = settings.advertise or bound

    def lease() -> TargetLease:
        facts = service.facts()
        return target_lease(address, facts.info, facts.cached_prefixes)

    async def last_sessions() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_timeout_s * _LEAVE_SHARE):
                await service.quiet()

    return registered(service, settings, TARGET_POOL, lease, last_sessions)
