"""The target pool as sessions see it: each keeps to one replica while that serves it, then goes to another.

What a replica refuses or loses comes back to the session machine as Failed; the machine asks again, and it is
then that another replica is chosen. So a failover looks to a session like a target that paused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.core import events as ev
from services.core.routing import Wanted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.core.answer import SessionSpec
    from services.core.ports import Replica, Verification
    from services.core.store import Held
    from services.gateway.targets import Target, Targets


class SessionTarget:
    """The TargetPort of one session.

    It stays where it is until an item fails there, the replica is let go, or an item is given up of which an
    answer was due; while that happens, replicas that failed it are asked only when there is no other.
    """

    def __init__(self, targets: Targets, fingerprint: str = "", held: Held | None = None) -> None:
        """`fingerprint` is the build that computed the session so far; `held` is from the KV directory."""
        self._targets = targets
        self._fingerprint = fingerprint
        self._held = held
        self._at: Target | None = None
        self._failed: set[str] = set()

    def verify(self, spec: SessionSpec, request: ev.Verify, remaining_ns: int | None) -> Verification:
        """See `services.core.ports.TargetPort`."""
        return _Routed(self, spec, request, remaining_ns)

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

    def served(self, verdict: ev.Verified) -> None:
        """The replica does what it should."""
        self._fingerprint = verdict.fingerprint
        self._held = None  # its KV is where the session is
        self._failed.clear()

    def leave(self, member: Target) -> None:
        """The replica failed the session."""
        self._failed.add(member.address)
        if self._at is member:
            self._at = None

    def _wanted(self, spec: SessionSpec, request: ev.Verify) -> Wanted:
        part = request.slice
        return Wanted(
            tokens=part.tokens if part.start == 0 else spec.prompt,
            max_position=spec.max_position,
            tenant_salt=spec.tenant_salt,
            fingerprint=self._fingerprint,
            held=self._held,
        )


class _Routed:
    """An item at the replica that its session has; see `services.core.ports.Verification`."""

    def __init__(
        self, session: SessionTarget, spec: SessionSpec, request: ev.Verify, remaining_ns: int | None
    ) -> None:
        self._session = session
        self._spec = spec
        self._request = request
        self._remaining_ns = remaining_ns
        self._extensions: list[ev.ExtendVerify] = []
        self._owes = True
        self._item: Verification | None = None
        self._member: Target | None = None
        member = session.place(spec, request)
        if member is not None:
            self._ask(member)

    @property
    def replica(self) -> Replica | None:
        """Who answers."""
        return None if self._item is None else self._item.replica

    def __aiter__(self) -> AsyncIterator[ev.Verified | ev.CacheMissed | ev.Failed]:
        """The answers as they come."""
        return self._answers()

    def extend(self, request: ev.ExtendVerify) -> None:
        """Kept until somebody is there to be told."""
        if self._item is None:
            self._extensions.append(request)
        else:
            self._item.extend(request)

    async def aclose(self) -> None:
        """Give the item up. A replica that owes an answer by then is not asked next."""
        if self._member is not None and self._owes:
            self._session.leave(self._member)
        await self._end()

    def _ask(self, member: Target) -> Verification:
        self._member = member
        member.items += 1
        self._item = member.pool.verify(self._spec, self._request, self._remaining_ns)
        for extension in self._extensions:
            self._item.extend(extension)
        return self._item

    async def _answers(self) -> AsyncIterator[ev.Verified | ev.CacheMissed | ev.Failed]:
        item = self._item
        if item is None:
            member = await self._session.find(self._spec, self._request)
            if member is None:
                yield ev.Failed(self._request.request_id, self._session.problem)
                return
            item = self._ask(member)
        try:
            async for answer in item:
                self._note(answer)
                yield answer
        finally:
            await self.aclose()

    def _note(self, answer: ev.Verified | ev.CacheMissed | ev.Failed) -> None:
        if isinstance(answer, ev.Verified):
            self._session.served(answer)
        self._owes = isinstance(answer, ev.Failed) or (isinstance(answer, ev.Verified) and answer.more)
        if isinstance(answer, ev.Failed) and self._member is not None:
            self._session.leave(self._member)

    async def _end(self) -> None:
        """Once, though both the reader of the answers and its caller come here."""
        member, self._member = self._member, None
        if member is not None and self._item is not None:
            member.items -= 1
            await self._item.aclose()
