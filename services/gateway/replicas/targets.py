"""The target replicas that a gateway knows: what each must be to serve here, and what all of them can keep.

A replica fits if it has the gateway's tokenizer, and the vocabulary and draft length of those met before.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import grpc

from galley.common.registry.leases import target_lease
from galley.core.errors import GalleyError, TargetUnavailable, TokenizerMismatch, Unavailable
from galley.core.routing.choice import RoutingRequest, TargetCandidate, TargetLease, choose_target
from galley.core.routing.lateness import ROWS_OF_A_SESSION, SLOW_FACTOR, VerdictTimes
from galley.core.session.ports import Clock
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.clients import TargetPool
from services.gateway.replicas.membership import Member, Members, Source
from services.gateway.replicas.moves_count import Moves

_FIRST_PAUSE_S = 0.1


class Target(Member[TargetPool, TargetLease]):
    """One target; `items` counts the gateway's own that are open there.

    `times` is what verdicts take there.
    """

    def __init__(self, address: str, pool: TargetPool, channel: grpc.aio.Channel) -> None:
        super().__init__(address, pool, channel)
        self.items = 0
        self._rows = 0
        self._answered_s = 0.0
        self._times = VerdictTimes()
        self._times_of: pb.GetTargetInfoResponse | None = None

    @property
    def times(self) -> VerdictTimes:
        """Begun anew with each life of the replica."""
        info = self.pool.info
        if self._times_of is None or self._times_of.incarnation != info.incarnation:
            self._times = VerdictTimes([(cost.rows, cost.ns) for cost in info.row_costs])
        self._times_of = info
        return self._times

    @property
    def rows_ahead(self) -> int:
        """Rows that are to be computed before whoever comes now has its verdict, as far as is known."""
        others = 0 if self.lease is None else max(0, self.lease.queue_depth - self.items)
        return self._rows + self.items + others * ROWS_OF_A_SESSION

    def take(self, rows: int) -> None:
        """An item of so many rows is sent there."""
        self.items += 1
        self._rows += rows

    def answered(self, now_s: float, rows: int) -> None:
        """One of its items has an answer, for which so many rows were counted."""
        self._answered_s = now_s
        self._rows -= rows

    def let_go(self, rows: int) -> None:
        """An item is over, for which so many rows are still counted."""
        self.items -= 1
        self._rows -= rows

    def moves_on(self, since_s: float) -> bool:
        """Whether it is not known to be at a standstill since then."""
        return not self.items or self._answered_s >= since_s

    @property
    def fingerprint(self) -> str:
        """Of its build, as it was last told."""
        return self.candidate().lease.fingerprint

    def candidate(self) -> TargetCandidate:
        """As routing sees it."""
        return TargetCandidate(self.lease or target_lease(self.address, self.pool.info), self.items, self.up)

    def must_meet(self) -> bool:
        """Also, without a lease, how it is doing is not known."""
        return super().must_meet() or self.lease is None


class Targets(Members[Target]):
    """All targets; `start` once, `close` at the end."""

    def __init__(
        self,
        source: Source,
        tokenizer_hash: str,
        open_channel: Callable[[str], grpc.aio.Channel],
        clock: Clock,
        max_draft_tokens: int,
        slow_factor: float = SLOW_FACTOR,
        hedge_quantile: float = 0.0,
    ) -> None:
        """`max_draft_tokens` is the most that the gateway would ask for.

        A verdict that takes `slow_factor` times as long as expected is late. One that takes longer than the
        share `hedge_quantile` of those before it (0: none) may be asked of another replica too.
        """
        super().__init__("target", source, tokenizer_hash, open_channel, clock)
        self.info = pb.GetTargetInfoResponse()
        self.moves = Moves("target")
        self.slow_factor = slow_factor
        self.hedge_quantile = hedge_quantile
        self._max_draft_tokens = max_draft_tokens

    async def start(self, timeout_s: float) -> None:
        """Wait for the first replica. Raises TargetUnavailable, or TokenizerMismatch if all are refused."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._first()
        except TimeoutError as error:
            raise TargetUnavailable(self.problem) from error
        if self._source.changes:
            self._watch()

    async def _first(self) -> None:
        while True:
            await self.refresh()
            if any(member.fits and member.up for member in self._members.values()):
                return  # and `info` is known: one whose lease has ended tells nothing
            if self.mismatch is not None:
                raise self.mismatch
            await asyncio.sleep(_FIRST_PAUSE_S)

    def choose(self, wanted: RoutingRequest, avoid: Collection[str]) -> Target | None:
        """The replica that a session is best served by; None if none can."""
        candidates = [member.candidate() for member in self._members.values() if member.fits]
        chosen = choose_target(wanted, candidates, avoid)
        return None if chosen is None else self._members[chosen.lease.address]

    def _member(self, address: str) -> Target:
        channel = self._open_channel(address)
        return Target(address, TargetPool(channel, address, self._tell), channel)

    def _wrong_tokenizer(self, its_hash: str) -> TokenizerMismatch:
        return TokenizerMismatch(self._tokenizer_hash, its_hash, "gateway")

    def _fault_of(self, member: Target) -> GalleyError | None:
        """What keeps a replica from serving the same requests as those that were met before."""
        info = member.pool.info
        if info.tokenizer_hash != self._tokenizer_hash:
            return self._wrong_tokenizer(info.tokenizer_hash)
        if self.info.vocab_size not in {0, info.vocab_size}:
            return Unavailable(f"its vocabulary is {info.vocab_size}, the others' {self.info.vocab_size}")
        needed = min(self._max_draft_tokens, self.info.max_draft_tokens)
        if info.max_draft_tokens < needed:
            return Unavailable(f"it takes {info.max_draft_tokens} draft tokens, and {needed} may come")
        return None

    def _tell(self) -> None:
        """`info` as all replicas that are up can keep it; with none, as it was."""
        infos = [member.pool.info for member in self._members.values() if member.fits and member.up]
        if infos:
            self.info = _merged(infos)


def _merged(infos: Sequence[pb.GetTargetInfoResponse]) -> pb.GetTargetInfoResponse:
    """What holds for all; of builds, the one that most replicas run."""
    merged = pb.GetTargetInfoResponse()
    [(fingerprint, _)] = Counter(info.fingerprint for info in infos).most_common(1)
    merged.CopyFrom(next(info for info in infos if info.fingerprint == fingerprint))
    merged.context_window = min(info.context_window for info in infos)
    merged.max_draft_tokens = min(info.max_draft_tokens for info in infos)
    merged.deterministic = all(info.deterministic for info in infos)
    return merged
