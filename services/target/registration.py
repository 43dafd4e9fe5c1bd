"""A target replica's registration: what its lease says, and how long its sessions may stay when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from galley.common.registry.leases import TARGET_POOL, target_lease
from galley.common.registry.registration import registered
from galley.common.server.server import Service
from galley.core.routing.choice import TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from services.target.servicer import TargetService

_LEAVE_SHARE = 0.6
"""Share of the drain timeout in which live sessions may end here before they go to another replica."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a replica says of itself: as GetTargetInfo answers, and hashes of cached blocks, best first."""

    info: pb.GetTargetInfoResponse
    cached_prefixes: Sequence[bytes] = ()


def registered_target(service: TargetService, settings: TargetSettings, bound: str) -> Service:
    """The service, registered from now on if there is a registry to tell; `bound` is where it listens."""
    address = settings.advertise or bound

    def lease() -> TargetLease:
        facts = service.facts()
        return target_lease(address, facts.info, facts.cached_prefixes)

    async def last_sessions() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_timeout_s * _LEAVE_SHARE):
                await service.quiet()

    return registered(service, settings, TARGET_POOL, lease, last_sessions)
