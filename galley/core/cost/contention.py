"""The part of a draft's time that is lost to a target on the same cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# The part of the cores that may be busy before threads slow each other: they share caches and memory.
_UNDISTURBED = 0.75


class Host(Protocol):
    """The cores of a replica; replicas with the same `id` share theirs. An empty one is shared with none."""

    @property
    def id(self) -> str: ...
    @property
    def cores(self) -> int: ...
    @property
    def threads(self) -> int: ...


def contention(drafts: Sequence[Host], targets: Sequence[Host]) -> float:
    """Return the part of the drafts' time that they take from targets, in [0, 1]: the mean over the drafts.

    All threads on the cores of a draft count, of every replica there.
    """
    taken = [_of_draft(draft, drafts, targets) for draft in drafts]
    return sum(taken) / len(taken) if taken else 0.0


def _of_draft(draft: Host, drafts: Sequence[Host], targets: Sequence[Host]) -> float:
    if not draft.id or not draft.cores or not any(target.id == draft.id for target in targets):
        return 0.0
    threads = sum(host.threads for host in (*drafts, *targets) if host.id == draft.id)
    return min(1.0, max(0.0, threads / draft.cores - _UNDISTURBED))
