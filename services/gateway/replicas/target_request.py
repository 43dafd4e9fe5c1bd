"""One item of a session, at the replica that the session has or at those that it goes to instead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.names import MOVE_HEDGED
from galley.core.session import events as ev
from galley.core.session.ports import Replica, Verification
from services.gateway.replicas.clients import PoolVerification
from services.gateway.replicas.hedge import Hedge
from services.gateway.replicas.targets import Target
from services.gateway.replicas.watch import Watch
from services.gateway.session.timeouts import SECOND
from services.gateway.telemetry.observer import request_observer

if TYPE_CHECKING:
    from services.gateway.replicas.target_session import SessionTarget


class Routed:
    """An item at the replica that its session has; see `galley.core.session.ports.Verification`."""

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
        self._session.go_to(hedge.member, MOVE_HEDGED)
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
        member.times.record(self._predicted_ns, waited_ns)
        if self._unanswered:
            member.times.record_first(waited_ns)
            self._unanswered = False
            self._extensions.clear()
        self._rows = 0  # what an item goes on with is a few rows a pass, which every pass has room for

    def _is_late(self) -> int | None:
        """Ask another too, or leave it for a better one; for how long to wait on otherwise."""
        member, item = self._member, self._item
        if member is None or item is None:
            return None
        if item.has_answer:  # which is yet to be read
            return self._session.patience.limit_ns(member.times.expected_ns(member.rows_ahead))
        left_ns = round((self._limit_s - asyncio.get_running_loop().time()) * SECOND)
        if left_ns > 0:
            if item.is_open:
                self._ask_also(member)
            return left_ns
        limit_ns = self._session.patience.limit_ns(member.times.expected_ns(member.rows_ahead))
        if not item.is_open or not self._session.leave_late(self._spec, self._request, member, self._asked_s):
            return limit_ns
        self._owes = False
        why = f"no verdict from {member.address} in {limit_ns / SECOND:.1f} s"
        item.give_up(why, "deadline_exceeded")
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
        request_observer().event(names.HEDGED, {names.POOL: "target", names.TO: other.address})

    def _hedge_won(self) -> None:
        """Unless the first has answered too, and only the reader has not come to it."""
        if self._item is not None and not self._item.has_answer:
            self._item.give_up("another has answered", "cancelled")

    async def _end(self) -> None:
        """Once, though both the reader of the answers and its caller come here."""
        self._watch.stop()
        member, self._member = self._member, None
        if member is not None and self._item is not None:
            member.let_go(self._rows)
            await self._item.aclose()
