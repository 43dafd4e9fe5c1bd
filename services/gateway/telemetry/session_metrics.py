"""What a gateway counts of its sessions: rounds, drafts, commits. A round costs a microsecond, more later."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from opentelemetry.trace import SpanContext

from galley.common.metrics import catalogue
from galley.common.metrics.cells import SpanRef, span_ref
from galley.common.metrics.labels import NO_WORKLOAD, OK, WORKLOAD
from galley.common.metrics.registry import Registry
from galley.common.wire.status import error_type
from galley.core.errors import GalleyError
from galley.core.session.events import RoundEnded
from galley.core.session.stats import SpeculationStats, plain_ns
from services.gateway.session.timeouts import SECOND
from services.gateway.telemetry.meter import StreamMeter
from services.gateway.telemetry.spans import STALL_NS

_POSITIONS = 16
_MOST_LATER = 512
"""Rounds and commits that are put off, to be counted together."""


class Sessions:
    """The cells of all sessions; `model` is the name of the served one."""

    def __init__(self, registry: Registry, model: str) -> None:
        self.model = model
        self.rounds = registry.count(catalogue.ROUNDS)
        self.drafted = registry.count(catalogue.DRAFTED_TOKENS)
        self.verified = registry.count(catalogue.VERIFIED_TOKENS)
        self.accepted = registry.count(catalogue.ACCEPTED_TOKENS)
        self.confirmed = registry.count(catalogue.CONFIRMED_TOKENS)
        self.k = registry.distribute(catalogue.K)
        self.plain = registry.count(catalogue.PLAIN_TIME)
        self.decode = registry.count(catalogue.DECODE_TIME)
        self.commits = registry.distribute(catalogue.COMMIT_DURATION)
        wasted = registry.count(catalogue.WASTED_DRAFT_TOKENS)
        self.rejected, self.unverified = wasted.at("rejected"), wasted.at("unverified")
        self.wasted_rows = registry.count(catalogue.WASTED_VERIFY_TOKENS).at()
        self.draft_wait = registry.distribute(catalogue.DRAFT_WAIT).at()
        self.duration = registry.distribute(catalogue.ROUND_DURATION).at()
        overlaps = registry.count(catalogue.OVERLAPS)
        self.overlaps = {result: overlaps.at(result) for result in ("hit", "miss")}
        misses = registry.count(catalogue.CACHE_MISSES)
        self.misses = {pool: misses.at(pool) for pool in ("draft", "target")}
        self.stalls = registry.count(catalogue.CLIENT_STALLS).at()
        self.retries = registry.count(catalogue.STORE_RETRIES).at()
        self.accepted_at, self.verified_at = ByPosition(), ByPosition()
        registry.observe(catalogue.ACCEPTED_AT, self.accepted_at.read)
        registry.observe(catalogue.VERIFIED_AT, self.verified_at.read)
        self.later: list[Callable[[], None]] = []
        registry.before_reading(self.settle)
        self._workload = registry.bound(WORKLOAD)
        self._of: dict[str, OfWorkload] = {}
        self.of_workload(NO_WORKLOAD)

    def settle(self) -> None:
        """Count what was put off: for many rounds in a row, one costs a fraction."""
        later, self.later = self.later, []
        for count in later:
            count()

    def of_workload(self, workload: str) -> OfWorkload:
        """Its own cells, or those of all others."""
        name = self._workload.fit(workload or NO_WORKLOAD)
        if name not in self._of:
            self._of[name] = OfWorkload(self, name)
        return self._of[name]


class ByPosition:
    """Tokens by their position in a round, of which the first so many were of a kind."""

    __slots__ = ("_beyond", "_lengths")

    def __init__(self) -> None:
        self._lengths = [0] * (_POSITIONS + 1)
        self._beyond = 0

    def add(self, length: int) -> None:
        """Of one more round, the tokens at positions [0, length)."""
        if length <= _POSITIONS:
            self._lengths[length] += 1
        else:
            self._lengths[_POSITIONS] += 1
            self._beyond += length - _POSITIONS

    def read(self) -> list[tuple[tuple[str], float]]:
        """How many tokens there were at each position."""
        at = [sum(self._lengths[position + 1 :]) for position in range(_POSITIONS)]
        return [*(((str(position),), count) for position, count in enumerate(at)), (("16+",), self._beyond)]


class _OfStrategy:
    """The cells of a workload's rounds of one strategy."""

    __slots__ = ("accepted", "drafted", "rounds", "verified")

    def __init__(self, of: Sessions, workload: str, strategy: str) -> None:
        self.rounds = of.rounds.at(workload, strategy)
        self.drafted = of.drafted.at(workload, strategy, of.model)
        self.verified = of.verified.at(workload, strategy, of.model)
        self.accepted = of.accepted.at(workload, strategy, of.model)


class OfWorkload:
    """The cells of one workload."""

    __slots__ = ("_all", "_name", "_strategies", "decode", "from_draft", "from_target", "k", "plain")

    def __init__(self, of: Sessions, name: str) -> None:
        self._all = of
        self._name = name
        self._strategies: dict[str, _OfStrategy] = {}
        self.from_draft = of.confirmed.at("draft", name)
        self.from_target = of.confirmed.at("target", name)
        self.k = of.k.at(name)
        self.plain, self.decode = of.plain.at(name), of.decode.at(name)

    def count(self, done: RoundEnded) -> None:
        """One round."""
        of = self._strategies.get(done.strategy)
        if of is None:
            of = self._strategies[done.strategy] = _OfStrategy(self._all, self._name, done.strategy)
        of.rounds.value += 1
        of.drafted.value += done.drafted
        of.verified.value += done.verified
        of.accepted.value += done.accepted
        self.from_draft.value += done.accepted
        self.from_target.value += done.confirmed - done.accepted
        self.k.observe(done.k)
        if not done.reads_prompt:
            self.plain.value += plain_ns(done) / SECOND
            self.decode.value += (done.ended_ns - done.started_ns) / SECOND


class CountingStreamMeter(StreamMeter):
    """Counts one session; what it observes names the span that it was told of."""

    def __init__(self, of: Sessions, workload: str) -> None:
        self.stalled_ns = 0
        self._all = of
        self._of = of.of_workload(workload)
        self._span: SpanRef | None = None

    def traced(self, span: SpanContext) -> None:
        """See `StreamMeter`."""
        self._span = span_ref(span)

    def round(self, done: RoundEnded) -> None:
        """See `StreamMeter`."""
        self._put_off(partial(self._round, done, self._span, time.time()))

    def _round(self, done: RoundEnded, span: SpanRef | None, at_s: float) -> None:
        of = self._all
        self._of.count(done)
        of.accepted_at.add(done.accepted)
        of.verified_at.add(done.verified)
        of.rejected.value += done.verified - done.accepted
        of.wasted_rows.value += done.verified + 1 - done.confirmed
        of.draft_wait.observe(done.exposed_draft_ns / SECOND)
        of.duration.observe((done.ended_ns - done.started_ns) / SECOND, span, at_s)
        if done.overlap != "none":
            of.overlaps[done.overlap].value += 1

    def missed(self, pool: str) -> None:
        """See `StreamMeter`."""
        self._all.misses[pool].value += 1

    def retried(self) -> None:
        """See `StreamMeter`."""
        self._all.retries.value += 1

    def committed(self, took_ns: int, error: GalleyError | None) -> None:
        """See `StreamMeter`."""
        self._put_off(partial(self._committed, took_ns, error, self._span, time.time()))

    def _committed(self, took_ns: int, error: GalleyError | None, span: SpanRef | None, at_s: float) -> None:
        outcome = OK if error is None else error_type(error)
        self._all.commits.at(outcome).observe(took_ns / SECOND, span, at_s)

    def _put_off(self, count: Callable[[], None]) -> None:
        of = self._all
        of.later.append(count)
        if len(of.later) >= _MOST_LATER:
            of.settle()

    def stalled(self, waited_ns: int) -> None:
        """See `StreamMeter`."""
        if waited_ns >= STALL_NS:
            self.stalled_ns += waited_ns
            self._all.stalls.value += 1

    def ended(self, stats: SpeculationStats) -> None:
        """See `StreamMeter`."""
        self._all.unverified.value += max(0, stats.proposed - stats.verified)
