"""The draft pool as sessions see it: each keeps to one replica while that serves it, then goes to another.

A draft fits if it has the target's tokenizer. One that fails an item, or stays silent until the item's time
is up, loses that session; a silent one is asked whether it lives, and without an answer all its sessions go
at once. Nobody waits for a draft that is away: proposals fail at once, until it is met again. One that fails
often is left alone by all sessions for a while (`services.core.breaker`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from services.common.logs import get_logger
from services.common.registry import draft_lease
from services.core import events as ev
from services.core import trace_names as names
from services.core.breaker import Breaker, State
from services.core.errors import GalleyError, TokenizerMismatch
from services.core.move_reasons import FAILED, LATE, LEFT
from services.core.ports import Replica
from services.core.recent import Recent
from services.core.routing import DraftCandidate, DraftLease, choose_draft
from services.core.strategies import HYBRID, MODEL, NGRAM
from services.gateway.lookup import Lookup
from services.gateway.members import Member, Members
from services.gateway.moves import Moves
from services.gateway.pools import DraftPool
from services.gateway.spans import request_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import grpc

    from services.core.answer import SessionSpec
    from services.core.ports import Clock
    from services.core.store import Held
    from services.gateway.members import Source

_OF_A_MODEL = (MODEL, HYBRID)
"""Strategies in place of which lookup is better than nothing."""

_AS_ASKED = "draft"
_PLAIN = "plain"
"""What a session is drafted with, besides NGRAM in place of what it asked for."""
_AWAY, _ANSWERED = "away", "answered"
"""Why another thing than before."""

_log = get_logger(__name__)

_SHARE_OF_TIMEOUT = 0.9
"""Of the draft timeout: who gives up sooner was not kept waiting by the draft."""


class Draft(Member[DraftPool, DraftLease]):
    """One draft; `sessions` are the gateway's own that asked it of late."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        super().__init__(address, DraftPool(channel, address), channel)
        self.sessions = Recent()
        self._breaker = Breaker()
        self._breaker_of = ""

    @property
    def breaker(self) -> Breaker:
        """Closed anew with each life of the replica."""
        if self._breaker_of != self.pool.info.incarnation:
            self._breaker, self._breaker_of = Breaker(), self.pool.info.incarnation
        return self._breaker

    def may_be_asked(self, now_ns: int) -> bool:
        """It is there, and its breaker lets somebody try."""
        return self.fits and self.pool.replica is not None and self.breaker.allows(now_ns)

    def serves(self, now_ns: int) -> bool:
        """It may be asked, and takes new sessions."""
        draining = self.lease is not None and self.lease.draining
        return self.up and not draining and self.may_be_asked(now_ns)

    def candidate(self, now_ns: int) -> DraftCandidate:
        """As routing sees it."""
        lease = self.lease or draft_lease(self.address, self.pool.info)
        return DraftCandidate(lease, self.sessions.count(now_ns), self.up)


class Drafts(Members[Draft]):
    """All drafts; `start` once, `close` at the end."""

    sign_of_life_s = 0.5

    def __init__(
        self,
        source: Source,
        tokenizer_hash: str,
        open_channel: Callable[[str], grpc.aio.Channel],
        clock: Clock,
        timeout_ns: int,
    ) -> None:
        """`timeout_ns` is how long a session waits for a proposal."""
        super().__init__("draft", source, tokenizer_hash, open_channel, clock)
        self.moves = Moves("draft")
        self._patience_ns = int(timeout_ns * _SHARE_OF_TIMEOUT)

    async def start(self) -> None:
        """Look once who is there, and again from now on; a gateway needs none."""
        await self.refresh()
        self._watch()

    @property
    def strategies(self) -> tuple[str, ...]:
        """All that is offered by a draft that was met."""
        offered = {name for it in self._members.values() if it.fits for name in it.pool.info.strategies}
        return tuple(sorted(offered))

    def breakers(self) -> list[tuple[str, State]]:
        """Of each draft that was met: its address, and what its breaker lets through."""
        now = self._clock.now_ns()
        return [(it.address, it.breaker.state(now)) for it in self._members.values() if it.fits]

    def choose(self, strategy: str, home: Replica | None, avoid: Collection[str]) -> Draft | None:
        """The draft for a session whose tokens `home` has; None if none can be asked."""
        now = self._clock.now_ns()
        there = [it for it in self._members.values() if it.may_be_asked(now)]
        chosen = choose_draft(strategy, [it.candidate(now) for it in there], home, avoid)
        return None if chosen is None else self._members[chosen.lease.address]

    def now_ns(self) -> int:
        """The time of the clock."""
        return self._clock.now_ns()

    def waited_in_vain(self, since_ns: int) -> bool:
        """Whether who began to wait then, and gives up now, does so because the draft is late."""
        return self._clock.now_ns() - since_ns >= self._patience_ns

    def begin(self, draft: Draft, breaker: Breaker) -> int:
        """It is asked; the number of the attempt."""
        now = self._clock.now_ns()
        attempt = breaker.begin(now)
        if attempt >= 0 and breaker.state(now) is State.HALF_OPEN:
            _breaker_changed(draft, State.OPEN, State.HALF_OPEN)
        return attempt

    def failed(self, draft: Draft, breaker: Breaker, attempt: int) -> None:
        """It failed an item, or kept it waiting for too long."""
        now = self._clock.now_ns()
        before = breaker.state(now)
        if breaker.failed(attempt, now):
            _log.warning("a draft is left alone for a while", address=draft.address)
            _breaker_changed(draft, before, State.OPEN)

    def answered(self, draft: Draft, breaker: Breaker, attempt: int) -> None:
        """It answered an item; a miss is an answer."""
        if breaker.succeeded(attempt):
            _log.info("a draft is used again", address=draft.address)
            _breaker_changed(draft, State.HALF_OPEN, State.CLOSED)

    def _member(self, address: str) -> Draft:
        return Draft(address, self._open_channel(address))

    def _wrong_tokenizer(self, its_hash: str) -> TokenizerMismatch:
        return TokenizerMismatch(its_hash, self._tokenizer_hash)

    def _fault_of(self, member: Draft) -> GalleyError | None:
        its_hash = member.pool.info.tokenizer_hash
        return None if its_hash == self._tokenizer_hash else self._wrong_tokenizer(its_hash)

    def _tell(self) -> None:
        """Nobody is told: who asks finds out."""


class SessionDraft:
    """The DraftPort of one session.

    It stays where it is until an item fails there or the draft begins to drain or is let go. What fails is
    tried at one other draft at once; one that failed the session is asked again only where there is no other.

    Where no draft that offers the session's strategy can be asked, one that looks up is; where none can be
    asked at all, the gateway looks up itself; and as soon as one can be asked again, it is.
    """

    def __init__(self, drafts: Drafts, held: Held | None = None, *, may_look_up: bool = False) -> None:
        """`held` is from the KV directory: where a session that goes on has its tokens."""
        self._drafts = drafts
        self._home = None if held is None else Replica(held.replica, held.incarnation)
        self._at: Draft | None = None
        self._strategy = ""
        self._failed: set[str] = set()
        self._why_left = LEFT
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
        """See `services.core.ports.DraftPort`."""
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
        request_trace().retried(ev.Pool.DRAFT.value, answer.message)
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
        draft.sessions.note(spec.session_id, began)
        breaker, replica = draft.breaker, draft.pool.replica
        attempt = self._drafts.begin(draft, breaker)
        try:
            answer = await draft.pool.propose(spec, replace(request, strategy=self._strategy), remaining_ns)
        except asyncio.CancelledError:
            if self._drafts.waited_in_vain(began):
                self._drafts.failed(draft, breaker, attempt)
                self._leave(draft, spec, LATE)
                self._draft_with(_PLAIN, LATE)
                self._drafts.doubt(draft)
            else:
                breaker.given_up(attempt)
            raise
        if isinstance(answer, ev.Failed):
            self._drafts.failed(draft, breaker, attempt)
            self._leave(draft, spec, FAILED)
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
        self._why_left = LEFT
        self._lookup = None
        self._failed.clear()

    def _leave(self, draft: Draft, spec: SessionSpec, why: str) -> None:
        draft.sessions.drop(spec.session_id)
        self._failed.add(draft.address)
        if self._at is draft:
            self._at = None
            self._why_left = why

    def _told(
        self,
        request: ev.Propose,
        answer: ev.Proposed | ev.CacheMissed | ev.Failed,
        why: str = FAILED,
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
            request_trace().event(names.DRAFT_DEGRADED, {names.TO: what, names.REASON: why or _ANSWERED})


def _breaker_changed(draft: Draft, before: State, after: State) -> None:
    request_trace().event(
        names.BREAKER_CHANGED,
        {
            names.POOL: ev.Pool.DRAFT.value,
            names.REPLICA: draft.address,
            names.FROM: before.name.lower(),
            names.TO: after.name.lower(),
        },
    )
