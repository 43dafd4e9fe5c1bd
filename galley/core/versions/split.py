"""The split of sessions between versions of the draft: which version a session is given."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, TypeAlias

SplitBy = Literal["session", "tenant", "workload"]
Arm: TypeAlias = Literal["stable", "canary", "drained", "other"]
ARMS: tuple[Arm, ...] = ("stable", "canary", "other", "drained")
"""All arms, in the order in which reports show them."""
MAX_SHARE = 0.5
"""Largest share of sessions that a canary gets."""

GROUPS = 16
"""Groups of principals whose gains are compared apart."""

_PARTS = 1 << 32


def group_of(tenant_salt: bytes) -> int:
    """Return the group of a principal, from 0 to `GROUPS` - 1, the same wherever its salt is."""
    return blake2b(tenant_salt, digest_size=1, person=b"galley.group").digest()[0] % GROUPS


@dataclass(frozen=True, slots=True)
class Split:
    """`share` of the sessions are given to the version `canary`, the others to `stable`.

    An empty `stable` means every version that is neither the canary nor `drained`. An empty `canary`: there
    is none. `by` says what is drawn: each session, each tenant with all its sessions, or each workload.
    Versions that are `drained` get no sessions.
    """

    stable: str = ""
    canary: str = ""
    share: float = 0.0
    by: SplitBy = "session"
    drained: frozenset[str] = frozenset()

    def is_canary(self, session_id: str, tenant_salt: bytes, workload: str) -> bool:
        """Return True if the canary is given the session. All gateways of a deployment agree."""
        if not self.canary or self.share <= 0:
            return False
        keys = {"session": session_id.encode(), "tenant": tenant_salt, "workload": workload.encode()}
        drawn = keys[self.by]
        digest = blake2b(drawn, digest_size=4, person=b"galley.split", salt=self._salt).digest()
        return int.from_bytes(digest, "little") < self.share * _PARTS

    def arm_of(self, version: str) -> Arm:
        """Return the arm of a version; the empty name is that of all stable ones without a name."""
        if version and version == self.canary:
            return "canary"
        if version in self.drained:
            return "drained"
        return "stable" if not self.stable or version == self.stable else "other"

    @property
    def _salt(self) -> bytes:
        """Return another salt for each canary, so that successive canaries get other sessions."""
        return blake2b(self.canary.encode(), digest_size=16).digest()
