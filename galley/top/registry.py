"""Read the registry of replicas, and the split of the drafts' versions, for the dashboard."""

from __future__ import annotations

from dataclasses import replace

from galley.common.printable import one_line
from galley.common.registry.leases import DRAFT_POOL, TARGET_POOL, ReplicaRegistry
from galley.common.registry.trials import DraftVersions
from galley.core.errors import GalleyError
from galley.top.fleet import Registered


async def read_leases(registry: ReplicaRegistry, versions: DraftVersions) -> Registered:
    """Return what could be read: the leases are shown also if the split cannot be read."""
    try:
        targets, drafts = await registry.read(TARGET_POOL), await registry.read(DRAFT_POOL)
    except GalleyError as error:
        return Registered(problem=one_line(str(error), 200))
    split, problem = None, ""
    try:
        split = (await versions.read()).split
    except GalleyError as error:
        problem = one_line(str(error), 200)
    # Writers of the store are not trusted: addresses are cleaned before a terminal shows them. The names of
    # versions that get sessions are checked where they are read; names of drained ones are not shown.
    return Registered(
        [replace(lease, address=one_line(lease.address)) for lease in targets],
        [
            replace(lease, address=one_line(lease.address), version=one_line(lease.version))
            for lease in drafts
        ],
        split,
        problem,
    )
