"""The registry of replicas, as the dashboard asks it."""

from __future__ import annotations

from dataclasses import replace

from galley.common.registry.leases import DRAFT_POOL, TARGET_POOL, ReplicaRegistry
from galley.core.errors import GalleyError
from galley.core.routing.choice import DraftLease, TargetLease
from galley.top.fleet import Registered
from galley.top.scrape import TIMEOUT_S, shown


class Leases:
    """Leases in the registry at `redis_url`, which may be away. Raise ValueError for a malformed URL."""

    def __init__(self, redis_url: str) -> None:
        self._registry = ReplicaRegistry(redis_url, call_timeout_s=TIMEOUT_S)

    async def ask(self) -> Registered:
        """Who is registered now, or why that is not known."""
        try:
            targets = await self._registry.read(TARGET_POOL)
            drafts = await self._registry.read(DRAFT_POOL)
        except GalleyError as error:
            return Registered(problem=shown(str(error)))
        return Registered([_target(lease) for lease in targets], [_draft(lease) for lease in drafts])

    async def close(self) -> None:
        """Let go of connections."""
        await self._registry.close()


# Whoever can write to the store is not trusted with the terminal.


def _target(lease: TargetLease) -> TargetLease:
    return replace(lease, address=shown(lease.address))


def _draft(lease: DraftLease) -> DraftLease:
    return replace(lease, address=shown(lease.address))
