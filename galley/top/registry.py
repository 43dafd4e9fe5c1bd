"""Read the registry of replicas for the dashboard."""

from __future__ import annotations

from dataclasses import replace

from galley.common.registry.leases import DRAFT_POOL, TARGET_POOL, ReplicaRegistry
from galley.core.errors import GalleyError
from galley.core.routing.choice import DraftLease, TargetLease
from galley.top.fleet import Registered
from galley.top.scrape import TIMEOUT_S, printable


class Leases:
    """The leases in the registry at `redis_url`. Raises ValueError for a malformed URL."""

    def __init__(self, redis_url: str) -> None:
        self._registry = ReplicaRegistry(redis_url, call_timeout_s=TIMEOUT_S)

    async def read(self) -> Registered:
        """Return the current leases, or the reason why they cannot be read."""
        try:
            targets = await self._registry.read(TARGET_POOL)
            drafts = await self._registry.read(DRAFT_POOL)
        except GalleyError as error:
            return Registered(problem=printable(str(error)))
        return Registered([_target(lease) for lease in targets], [_draft(lease) for lease in drafts])

    async def close(self) -> None:
        """Close the connections to the registry."""
        await self._registry.close()


# Writers of the store are not trusted: addresses are cleaned before a terminal shows them.


def _target(lease: TargetLease) -> TargetLease:
    return replace(lease, address=printable(lease.address))


def _draft(lease: DraftLease) -> DraftLease:
    return replace(lease, address=printable(lease.address))
