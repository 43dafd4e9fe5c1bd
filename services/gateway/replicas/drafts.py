"""The draft pool: which drafts there are, which of them may be asked, and which is best for a session.

A draft fits if it has the target's tokenizer. Nobody waits for one that is away: proposals fail at once,
until it is met again. One that fails often is left alone by all sessions for a while
(`galley.core.routing.breaker`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import grpc

from galley.common.logs import get_logger
from galley.common.registry.leases import draft_lease
from galley.core import names
from galley.core.errors import GalleyError, TokenizerMismatch
from galley.core.lru import RecentKeys
from galley.core.routing.breaker import Breaker, State
from galley.core.routing.choice import DraftCandidate, DraftLease, choose_draft
from galley.core.session import events as ev
from galley.core.session.ports import Clock, Replica
from services.gateway.replicas.clients import DraftPool
from services.gateway.replicas.membership import Member, Members, Source
from services.gateway.replicas.moves_count import Moves
from services.gateway.telemetry.observer import request_observer

_log = get_logger(__name__)

_SHARE_OF_TIMEOUT = 0.9
"""Of the draft timeout: who gives up sooner was not kept waiting by the draft."""


class Draft(Member[DraftPool, DraftLease]):
    """One draft; `sessions` are the gateway's own that asked it of late."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        super().__init__(address, DraftPool(channel, address), channel)
        self.sessions = RecentKeys()
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
        return self.fits and self.pool.replica is not None and self.breaker.can_begin(now_ns)

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
        if breaker.record_failure(attempt, now):
            _log.warning("a draft is left alone for a while", address=draft.address)
            _breaker_changed(draft, before, State.OPEN)

    def answered(self, draft: Draft, breaker: Breaker, attempt: int) -> None:
        """It answered an item; a miss is an answer."""
        if breaker.record_success(attempt):
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


def _breaker_changed(draft: Draft, before: State, after: State) -> None:
    request_observer().event(
        names.BREAKER_CHANGED,
        {
            names.POOL: ev.Pool.DRAFT.value,
            names.REPLICA: draft.address,
            names.FROM: before.name.lower(),
            names.TO: after.name.lower(),
        },
    )
