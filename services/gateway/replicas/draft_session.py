"""The draft of one session: it keeps to one replica while that serves it, then goes to another.

One that fails an item, or stays silent until the item's time is up, loses that session; a silent one is asked
whether it lives, and without an answer all its sessions go at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.names import HYBRID, MODEL, MOVE_FAILED, MOVE_LATE, MOVE_LEFT, NGRAM
from galley.core.session import events as ev
from galley.core.session.ports import Replica
from galley.core.store import CacheLocation
from services.gateway.replicas.drafts import Draft, Drafts
from services.gateway.replicas.lookup import Lookup
from services.gateway.telemetry.observer import request_observer

_OF_A_MODEL = (MODEL, HYBRID)
"""Strategies in place of which lookup is better than nothing."""

_AS_ASKED = "draft"
_PLAIN = "plain"
"""What a session is drafted with, besides NGRAM in place of what it asked for."""
_AWAY, _ANSWERED = "away", "answered"
"""Why another thing than before."""


class SessionDraft:
    """The DraftPort of one session.

    It stays where it is until an item fails there or the draft begins to drain or is let go. What fails is
    tried at one other draft at once; one that failed the session is asked again only where there is no other.

    Where no draft that offers the session's strategy can be asked, one that looks up is; where none can be
    asked at all, the gateway looks up itself; and as soon as one can be asked again, it is.
    """

    def __init__(
        self, drafts: Drafts, held: CacheLocation | None = None, *, may_look_up: bool = False
    ) -> None:
        """`held` is from the KV directory: where a session that goes on has its tokens."""
        self._drafts = drafts
        self._home = None if held is None else Replica(held.replica, held.incarnation)
        self._at: Draft | None = None
        self._strategy = ""
        self._failed: set[str] = set()
        self._why_left = MOVE_LEFT
        self._may_look_up = may_look_up
        self._lookup: Lookup | None = None
        self._drafted_with = _AS_ASKED

    @property
    def replica(self) -> Replica | None:
        """Who has the session's tokens, for the KV directory; None while nobody does."""
        return None if self._lookup is not None else self._home

    async def propose(
        self, spec: SessionSpec, request: ev.Propose, remaining_ns: int | None
    ) -> ev.Proposed | ev.CacheMissed | ev.Failed:
        """See `galley.core.session.ports.DraftPort`."""
        began = self._drafts.now_ns()
        draft = self._place(request.strategy)
        if draft is None:
            away = ev.Failed(request.request_id, self._drafts.problem)
            return self._told(request, self._look_up(spec, request, away), _AWAY)
        answer = await self._ask(draft, spec, request, remaining_ns)
        if not isinstance(answer, ev.Failed) or not answer.retryable:
            return self._told(request, answer)
        other = self._place(request.strategy)
        if other is None or other.address in self._failed:
            return self._told(request, self._look_up(spec, request, answer))
        left_ns = None if remaining_ns is None else remaining_ns - (self._drafts.now_ns() - began)
        if left_ns is not None and left_ns <= 0:
            return self._told(request, answer)
        request_observer().draft_retried(answer.message)
        return self._told(request, await self._ask(other, spec, request, left_ns))

    def _place(self, wanted: str) -> Draft | None:
        """Who is asked; `_strategy` is what for. One that only looks up is left for one that does better."""
        now = self._drafts.now_ns()
        if self._at is None or self._strategy != wanted or not self._at.serves(now):
            for strategy in (wanted, NGRAM) if wanted in _OF_A_MODEL else (wanted,):
                self._at, self._strategy = self._drafts.choose(strategy, self._home, self._failed), strategy
                if self._at is not None:
                    break
        return self._at

    def _look_up(
        self, spec: SessionSpec, request: ev.Propose, failed: ev.Failed
    ) -> ev.Proposed | ev.CacheMissed | ev.Failed:
        """Here, if that is wanted."""
        if not self._may_look_up or request.strategy not in {"", NGRAM, *_OF_A_MODEL}:
            return failed
        if self._lookup is None:
            self._lookup = Lookup()
        return self._lookup.propose(spec, request)

    async def _ask(
        self, draft: Draft, spec: SessionSpec, request: ev.Propose, remaining_ns: int | None
    ) -> ev.Proposed | ev.CacheMissed | ev.Failed:
        began = self._drafts.now_ns()
        draft.sessions.add(spec.session_id, began)
        breaker, replica = draft.breaker, draft.pool.replica
        attempt = self._drafts.begin(draft, breaker)
        try:
            answer = await draft.pool.propose(spec, replace(request, strategy=self._strategy), remaining_ns)
        except asyncio.CancelledError:
            if self._drafts.waited_in_vain(began):
                self._drafts.failed(draft, breaker, attempt)
                self._leave(draft, spec, MOVE_LATE)
                self._draft_with(_PLAIN, MOVE_LATE)
                self._drafts.doubt(draft)
            else:
                breaker.record_cancelled(attempt)
            raise
        if isinstance(answer, ev.Failed):
            self._drafts.failed(draft, breaker, attempt)
            self._leave(draft, spec, MOVE_FAILED)
            if draft.pool.replica is None:
                self._drafts.look()
        else:
            self._drafts.answered(draft, breaker, attempt)
            self._stay(replica, spec)
        return answer

    def _stay(self, replica: Replica | None, spec: SessionSpec) -> None:
        if self._home is not None and replica is not None and self._home != replica:
            self._drafts.moves.note(spec.session_id, self._home, replica, self._why_left)
        self._home = replica
        self._why_left = MOVE_LEFT
        self._lookup = None
        self._failed.clear()

    def _leave(self, draft: Draft, spec: SessionSpec, why: str) -> None:
        draft.sessions.remove(spec.session_id)
        self._failed.add(draft.address)
        if self._at is draft:
            self._at = None
            self._why_left = why

    def _told(
        self,
        request: ev.Propose,
        answer: ev.Proposed | ev.CacheMissed | ev.Failed,
        why: str = MOVE_FAILED,
    ) -> ev.Proposed | ev.CacheMissed | ev.Failed:
        """The answer, once the trace knows who gave it."""
        if isinstance(answer, ev.Failed):
            self._draft_with(_PLAIN, why)
        elif self._lookup is not None or self._strategy != request.strategy:
            self._draft_with(NGRAM, why)
        else:
            self._draft_with(_AS_ASKED)
        return answer

    def _draft_with(self, what: str, why: str = "") -> None:
        """`why` is what keeps it from better."""
        if what != self._drafted_with:
            self._drafted_with = what
            request_observer().event(names.DRAFT_DEGRADED, {names.TO: what, names.REASON: why or _ANSWERED})
