"""The target pool as sessions see it: each keeps to one replica while that serves it, then goes to another.

What a replica refuses or loses comes back to the session machine as Failed; the machine asks again, and it is
then that another replica is chosen. So a failover looks to a session like a target that paused. One whose
verdict is late (`services.core.lateness`) is left where another of the session's build can take over.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from services.core import events as ev
from services.core.lateness import Patience
from services.core.routing import Wanted, cached_tokens
from services.gateway.hedge import Hedge
from services.gateway.moves import FAILED, HEDGED, LATE, LEFT
from services.gateway.patience import SECOND
from services.gateway.watch import Watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.core.answer import SessionSpec
    from services.core.ports import Replica, Verification
    from services.core.store import Held
    from services.gateway.pools import PoolVerification
    from services.gateway.targets import Target, Targets


class SessionTarget:
    """The TargetPort of one session.

    It stays where it is until an item fails there, the replica is let go, or an item is given up of which an
    answer was due; while that happens, replicas that failed it are asked only when there is no other.
    """

    def __init__(self, targets: Targets, fingerprint: str = "", held: Held | None = None) -> None:
        """`fingerprint` is the build that computed the session so far; `held` is from the KV directory."""
        self.patience = Patience(targets.slow_factor)
        self._targets = targets
        self._fingerprint = fingerprint
        self._held = held
        self._at: Target | None = None
        self._failed: set[str] = set()
        self._served_by: Replica | None = None
        self._why_left = LEFT

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

    def served(self, verdict: ev.Verified, session_id: str, replica: Replica | None) -> None:
        """The replica does what it should."""
        self._fingerprint = verdict.fingerprint
        self._held = None  # its KV is where the session is
        self._failed.clear()
        self.patience.served()
        if replica is not None and replica != self._served_by:
            if self._served_by is not None:
                self._targets.moves.note(session_id, self._served_by, replica, self._why_left)
            self._served_by = replica
            self._why_left = LEFT

    def leave(self, member: Target, why: str = FAILED) -> None:
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
        return at.times.slower_than(quantile) if quantile else None

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
        self.leave(at, LATE)
        self.patience.lost()
        self._targets.doubt(at)
        self._at = other
        return True

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
        self._item: PoolVerification | None = None
        self._member: Target | None = None
        self._rows = len(request.slice.tokens) + len(request.draft_tokens)
        self._asked_s = 0.0
        self._predicted_ns = 0
        self._watch = Watch(self._is_late)
        self._hedge: Hedge | None = None
        self._limit_s = 0.0
        self._unanswered = True
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
        """Kept until there is a verdict, for whoever else may be asked."""
        if self._unanswered:
            self._extensions.append(request)
        if self._item is not None:
            self._item.extend(request)
        if self._hedge is not None:
            self._hedge.item.extend(request)

    async def aclose(self) -> None:
        """Give the item up. A replica that owes an answer by then is not asked next."""
        if self._member is not None and self._owes:
            self._session.leave(self._member)
        await self._drop_hedge()
        await self._end()

    def _ask(self, member: Target) -> Verification:
        self._member = member
        member.take(self._rows)
        self._expect(member)
        self._item = member.pool.verify(self._spec, self._request, self._remaining_ns)
        for extension in self._extensions:
            self._item.extend(extension)
        return self._item

    async def _answers(self) -> AsyncIterator[ev.Verified | ev.CacheMissed | ev.Failed]:
        item: Verification | None = self._item
        if item is None:
            member = await self._session.find(self._spec, self._request)
            if member is None:
                yield ev.Failed(self._request.request_id, self._session.problem)
                return
            item = self._ask(member)
        try:
            async for answer in item:
                if isinstance(answer, ev.Failed) and self._hedge and self._hedge.first:
                    break
                await self._drop_hedge()
                yield self._note(answer)
            if (hedge := self._hedge) is not None and hedge.first is not None:
                yield self._note(await self._take(hedge, hedge.first))
                async for answer in hedge.item:
                    yield self._note(answer)
        finally:
            await self.aclose()

    async def _take(self, hedge: Hedge, first: ev.Verified) -> ev.Verified:
        """The second replica answered first, and goes on."""
        await self._end()
        self._hedge = None
        self._member, self._item = hedge.member, hedge.item
        self._unanswered = False  # how long this one took is not known
        self._watch = Watch(self._is_late)
        self._expect(hedge.member)
        self._session.go_to(hedge.member, HEDGED)
        return first

    async def _drop_hedge(self) -> None:
        hedge, self._hedge = self._hedge, None
        if hedge is not None:
            await hedge.drop()

    def _note(
        self, answer: ev.Verified | ev.CacheMissed | ev.Failed
    ) -> ev.Verified | ev.CacheMissed | ev.Failed:
        member = self._member
        if member is None:  # given up meanwhile
            return answer
        self._owes = isinstance(answer, ev.Failed) or (isinstance(answer, ev.Verified) and answer.more)
        if isinstance(answer, ev.Failed):
            return self._leave(member, answer)
        self._answered(member)
        if isinstance(answer, ev.Verified):
            self._session.served(answer, self._spec.session_id, self.replica)
            self._expect(member)
        return answer

    def _leave(self, member: Target, answer: ev.Failed) -> ev.Failed:
        self._owes = False
        self._session.leave(member)
        other = self._session.other(self._spec, self._request, member) if answer.retryable else None
        return replace(answer, elsewhere=other is not None)

    # -------------------------------------------------------------------------- is it late? --

    def _expect(self, member: Target) -> None:
        """The next verdict, from now on."""
        self._asked_s = asyncio.get_running_loop().time()
        rows = member.rows_ahead
        self._predicted_ns = member.times.predicted_ns(rows)
        limit_ns = self._session.patience.limit_ns(member.times.expected_ns(rows))
        self._limit_s = self._asked_s + limit_ns / SECOND
        hedge_ns = self._session.hedge_after_ns(member) if self._unanswered else None
        self._watch.expect(limit_ns if hedge_ns is None else min(limit_ns, hedge_ns))

    def _answered(self, member: Target) -> None:
        now_s = asyncio.get_running_loop().time()
        waited_ns = round((now_s - self._asked_s) * SECOND)
        member.answered(now_s, self._rows)
        member.times.saw(self._predicted_ns, waited_ns)
        if self._unanswered:
            member.times.saw_first(waited_ns)
            self._unanswered = False
            self._extensions.clear()
        self._rows = 0  # what an item goes on with is a few rows a pass, which every pass has room for

    def _is_late(self) -> int | None:
        """Ask another too, or leave it for a better one; for how long to wait on otherwise."""
        member, item = self._member, self._item
        if member is None or item is None:
            return None
        left_ns = round((self._limit_s - asyncio.get_running_loop().time()) * SECOND)
        if left_ns > 0:
            if item.is_open:
                self._ask_also(member)
            return left_ns
        limit_ns = self._session.patience.limit_ns(member.times.expected_ns(member.rows_ahead))
        if not item.is_open or not self._session.leave_late(self._spec, self._request, member, self._asked_s):
            return limit_ns
        self._owes = False
        item.give_up(f"no verdict from {member.address} in {limit_ns / SECOND:.1f} s")
        return None

    def _ask_also(self, member: Target) -> None:
        """Whoever answers first goes on."""
        other = self._session.warm_other(self._spec, self._request, member)
        if other is None or self._hedge is not None:
            return
        item = other.pool.verify(self._spec, self._request, self._remaining_ns)
        for extension in self._extensions:
            item.extend(extension)
        self._hedge = Hedge(other, item, self._rows, self._hedge_won)

    def _hedge_won(self) -> None:
        if self._item is not None:
            self._item.give_up("another has answered")

    async def _end(self) -> None:
        """Once, though both the reader of the answers and its caller come here."""
        self._watch.stop()
        member, self._member = self._member, None
        if member is not None and self._item is not None:
            member.let_go(self._rows)
            await self._item.aclose()
