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
    """Return the part of the drafts' time that they take from targets, in [0, 1]: the mean over all pairs."""
    pairs = len(drafts) * len(targets)
    return sum(_of_pair(draft, target) for draft in drafts for target in targets) / pairs if pairs else 0.0


def _of_pair(draft: Host, target: Host) -> float:
    if not draft.id or draft.id != target.id or not draft.cores:
        return 0.0
    return min(1.0, max(0.0, (draft.threads + target.threads) / draft.cores - _UNDISTURBED))
