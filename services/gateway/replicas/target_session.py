"""The target pool as sessions see it: each keeps to one replica while that serves it, then goes to another.

What a replica refuses or loses comes back to the session machine as Failed; the machine asks again, and it is
then that another replica is chosen. So a failover looks to a session like a target that paused. One whose
verdict is late (`galley.core.routing.lateness`) is left where another of the session's build can take over.
"""

from __future__ import annotations

from dataclasses import replace

from galley.core.answer.answer import SessionSpec
from galley.core.names import MOVE_FAILED, MOVE_LATE, MOVE_LEFT
from galley.core.routing.choice import RoutingRequest, cached_tokens
from galley.core.routing.lateness import VerdictTimeout
from galley.core.session import events as ev
from galley.core.session.ports import Replica, Verification
from galley.core.store import CacheLocation
from services.gateway.replicas.target_request import Routed
from services.gateway.replicas.targets import Target, Targets


class SessionTarget:
    """The TargetPort of one session.

    It stays where it is until an item fails there, the replica is let go, or an item is given up of which an
    answer was due; while that happens, replicas that failed it are asked only when there is no other.
    """

    def __init__(self, targets: Targets, fingerprint: str = "", held: CacheLocation | None = None) -> None:
        """`fingerprint` is the build that computed the session so far; `held` is from the KV directory."""
        self.patience = VerdictTimeout(targets.slow_factor)
        self._targets = targets
        self._fingerprint = fingerprint
        self._held = held
        self._at: Target | None = None
        self._failed: set[str] = set()
        self._served_by: Replica | None = None
        self._why_left = MOVE_LEFT

    def verify(self, spec: SessionSpec, request: ev.Verify, remaining_ns: int | None) -> Verification:
        """See `galley.core.session.ports.TargetPort`."""
        return Routed(self, spec, request, remaining_ns)

    def place(self, spec: SessionSpec, request: ev.Verify) -> Target | None:
        """The session's replica, chosen if it has none that will do.

        None if there is none, or only one of another build: whether that must be is worth another look.
        """
        at = self._at
        if at is None or not at.fits:
            at = self._targets.choose(self._wanted(spec, request), self._failed)
            self._at = at if at is not None and self._fingerprint in {"", at.fingerprint} else None
        return self._at

    async def find(self, spec: SessionSpec, request: ev.Verify) -> Target | None:
        """The same after a look at who is there now; of another build if it must be."""
        await self._targets.refresh()
        if self.place(spec, request) is None:
            self._at = self._targets.choose(self._wanted(spec, request), self._failed)
        return self._at

    @property
    def problem(self) -> str:
        """Why there is no replica."""
        return self._targets.problem

    def served(self, verdict: ev.Verified, session_id: str, replica: Replica | None) -> None:
        """The replica does what it should."""
        self._fingerprint = verdict.fingerprint
        self._held = None  # its KV is where the session is
        self._failed.clear()
        self.patience.record_in_time()
        if replica is not None and replica != self._served_by:
            if self._served_by is not None:
                self._targets.moves.note(session_id, self._served_by, replica, self._why_left)
            self._served_by = replica
            self._why_left = MOVE_LEFT

    def leave(self, member: Target, why: str = MOVE_FAILED) -> None:
        """The replica failed the session."""
        self._failed.add(member.address)
        if self._at is member:
            self._at = None
            self._why_left = why

    def other(self, spec: SessionSpec, request: ev.Verify, at: Target) -> Target | None:
        """A replica of the session's build that is up, and not `at` nor one that failed it."""
        fingerprint = self._fingerprint or at.fingerprint
        wanted = replace(self._wanted(spec, request), fingerprint=fingerprint)
        avoid = {*self._failed, at.address}
        other = self._targets.choose(wanted, avoid)
        if other is None or not other.up or other.address in avoid or other.fingerprint != fingerprint:
            return None
        return other

    def hedge_after_ns(self, at: Target) -> int | None:
        """How long an item's first verdict may take before another replica is asked too; None: for ever."""
        quantile = self._targets.hedge_quantile
        return at.times.first_verdict_quantile(quantile) if quantile else None

    def warm_other(self, spec: SessionSpec, request: ev.Verify, at: Target) -> Target | None:
        """A replica that could take over, and holds the prefix but for less than a block."""
        if request.slice.start:
            return None  # what the others have of it is not known
        other = self.other(spec, request, at)
        if other is None or other.lease is None:
            return None
        missing = len(request.slice.tokens) - cached_tokens(self._wanted(spec, request), other.lease)
        return other if missing <= other.lease.kv_block_tokens else None

    def go_to(self, member: Target, why: str) -> None:
        """Somebody else serves the session."""
        self._at = member
        self._why_left = why

    def leave_late(self, spec: SessionSpec, request: ev.Verify, at: Target, asked_s: float) -> bool:
        """Leave a replica that has kept a verdict waiting since `asked_s`, if another can do better.

        One that is at a standstill itself cannot: all may be slow, as where they share a machine.
        """
        other = self.other(spec, request, at)
        if other is None or not other.moves_on(asked_s):
            return False
        self.leave(at, MOVE_LATE)
        self.patience.record_late()
        self._targets.doubt(at)
        self._at = other
        return True

    def _wanted(self, spec: SessionSpec, request: ev.Verify) -> RoutingRequest:
        part = request.slice
        return RoutingRequest(
            tokens=part.tokens if part.start == 0 else spec.prompt,
            max_position=spec.max_position,
            tenant_salt=spec.tenant_salt,
            fingerprint=self._fingerprint,
            cached_at=self._held,
        )
