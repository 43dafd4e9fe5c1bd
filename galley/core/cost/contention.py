"""The part of a draft's time that is lost to a target on the same cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# The part of the cores that may be busy before threads slow each other: they share caches and memory.
_UNDISTURBED = 0.75


class Host(Protocol):
    """The cores of a replica: those of a machine, and of a control group's limit, if that allows fewer.

    Replicas with the same `id` share the first, those with the same `limit_id` the others. An empty id is
    shared with none.
    """

    @property
    def id(self) -> str: ...
    @property
    def cores(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def limit_id(self) -> str: ...
    @property
    def limit_cores(self) -> float: ...


def contention(drafts: Sequence[Host], targets: Sequence[Host]) -> float:
    """Return the part of the drafts' time that they take from targets, in [0, 1]: the mean over the drafts.

    All threads on the cores of a draft count, of every replica there.
    """
    shares = [_share_of(draft, drafts, targets) for draft in drafts]
    return sum(shares) / len(shares) if shares else 0.0


def _share_of(draft: Host, drafts: Sequence[Host], targets: Sequence[Host]) -> float:
    by_machine = _beyond(draft.id, draft.cores, "id", drafts, targets)
    return max(by_machine, _beyond(draft.limit_id, draft.limit_cores, "limit_id", drafts, targets))


def _beyond(shared: str, cores: float, name: str, drafts: Sequence[Host], targets: Sequence[Host]) -> float:
    if not shared or not cores or not any(getattr(target, name) == shared for target in targets):
        return 0.0
    threads = sum(host.threads for host in (*drafts, *targets) if getattr(host, name) == shared)
    return min(1.0, max(0.0, threads / cores - _UNDISTURBED))
