"""Metrics of sessions: rounds, draft tokens, commits.

Rounds and commits are queued and counted many at a time, which makes each much cheaper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from opentelemetry.trace import SpanContext

from galley.common.metrics import catalogue
from galley.common.metrics.labels import NO_WORKLOAD, OK, WORKLOAD
from galley.common.metrics.registry import Count, Registry, span_ref
from galley.common.wire.status import error_type
from galley.core.admission.admission import Principal
from galley.core.errors import GalleyError
from galley.core.session.events import RoundEnded
from galley.core.session.round import SpeculationStats, plain_ns
from galley.core.trees import MAX_WIDTH

_SECOND = 1e9
_POSITIONS = 16
_MAX_QUEUED = 512
"""Most rounds and commits that are counted together."""


class SessionMetrics:
    def __init__(self, registry: Registry, model: str, *, names_principals: bool = False) -> None:
        """Count usage by the kind of the principal; with `names_principals` by its name."""
        self.model = model
        self._names_principals = names_principals
        self.prompts = registry.count(catalogue.PROMPT_TOKENS)
        self._usage = registry.count(catalogue.USAGE_TOKENS)
        self.running = 0
        """Sessions that have ended a round and have not stopped."""
        self.rounds = registry.count(catalogue.ROUNDS)
        self.drafted = registry.count(catalogue.DRAFTED_TOKENS)
        self.verified = registry.count(catalogue.VERIFIED_TOKENS)
        self.accepted = registry.count(catalogue.ACCEPTED_TOKENS)
        self.confirmed = registry.count(catalogue.CONFIRMED_TOKENS)
        self.k = registry.distribute(catalogue.K)
        self.plain = registry.count(catalogue.PLAIN_TIME)
        self.decode = registry.count(catalogue.DECODE_TIME)
        self.commits = registry.distribute(catalogue.COMMIT_DURATION)
        self.good_commits = self.commits.at(OK)
        wasted = registry.count(catalogue.WASTED_DRAFT_TOKENS)
        self.rejected, self.unverified = wasted.at("rejected"), wasted.at("unverified")
        self.wasted_rows = registry.count(catalogue.WASTED_VERIFY_TOKENS).at()
        self.draft_wait = registry.distribute(catalogue.DRAFT_WAIT).at()
        self.duration = registry.distribute(catalogue.ROUND_DURATION).at()
        overlaps = registry.count(catalogue.OVERLAPS)
        self.overlaps = {result: overlaps.at(result) for result in ("hit", "miss")}
        self._proposals = registry.count(catalogue.PROPOSALS).at()
        self._with_features = registry.count(catalogue.PROPOSALS_WITH_FEATURES).at()
        state_bytes = registry.count(catalogue.FEATURE_BYTES)
        self.state_bytes = {direction: state_bytes.at(direction) for direction in ("received", "sent")}
        misses = registry.count(catalogue.CACHE_MISSES)
        self.misses = {pool: misses.at(pool) for pool in ("draft", "target")}
        self.stalls = registry.count(catalogue.CLIENT_STALLS).at()
        self.retries = registry.count(catalogue.STORE_RETRIES).at()
        self.accepted_at, self.verified_at = ByPosition(), ByPosition()
        registry.observe(catalogue.ACCEPTED_AT, self.accepted_at.read)
        registry.observe(catalogue.VERIFIED_AT, self.verified_at.read)
        self.accepted_by_rank, self.verified_by_rank = ByRank(), ByRank()
        registry.observe(catalogue.ACCEPTED_BY_RANK, self.accepted_by_rank.read)
        registry.observe(catalogue.VERIFIED_BY_RANK, self.verified_by_rank.read)
        self._queued: list[Callable[[], None]] = []
        registry.before_reading(self.flush)
        self._workload = registry.bound(WORKLOAD)
        self._workloads: dict[str, WorkloadMetrics] = {}
        self.of_workload(NO_WORKLOAD)

    def usage_of(self, principal: str, direction: str) -> Count:
        return self._usage.at(principal if self._names_principals else Principal(principal).kind, direction)

    def count_proposals(self, stats: SpeculationStats) -> None:
        """Count the proposals of a stream that has ended."""
        self.unverified.value += stats.unverified
        self._proposals.value += stats.proposals
        self._with_features.value += stats.proposals_with_features

    def queue(self, count: Callable[[], None]) -> None:
        """Run `count` before the next reading."""
        self._queued.append(count)
        if len(self._queued) >= _MAX_QUEUED:
            self.flush()

    def flush(self) -> None:
        queued, self._queued = self._queued, []
        for count in queued:
            count()

    def of_workload(self, workload: str) -> WorkloadMetrics:
        """Return the metrics of a workload; beyond the bound on labels, those of all others."""
        name = self._workload.fit(workload or NO_WORKLOAD)
        if name not in self._workloads:
            self._workloads[name] = WorkloadMetrics(self, name)
        return self._workloads[name]


class ByPosition:
    __slots__ = ("_beyond", "_lengths")

    def __init__(self) -> None:
        self._lengths = [0] * (_POSITIONS + 1)
        self._beyond = 0

    def add(self, length: int) -> None:
        """Count one round at positions [0, length)."""
        if length <= _POSITIONS:
            self._lengths[length] += 1
        else:
            self._lengths[_POSITIONS] += 1
            self._beyond += length - _POSITIONS

    def read(self) -> list[tuple[tuple[str], float]]:
        at = [sum(self._lengths[position + 1 :]) for position in range(_POSITIONS)]
        return [*(((str(position),), count) for position, count in enumerate(at)), (("16+",), self._beyond)]


class ByRank:
    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * MAX_WIDTH

    def add(self, counts: Sequence[int]) -> None:
        for rank, count in enumerate(counts):
            self._counts[rank] += count

    def read(self) -> list[tuple[tuple[str], float]]:
        return [((str(rank),), count) for rank, count in enumerate(self._counts)]


class _StrategyMetrics:
    __slots__ = ("accepted", "drafted", "rounds", "verified")

    def __init__(self, of: SessionMetrics, workload: str, strategy: str) -> None:
        self.rounds = of.rounds.at(workload, strategy)
        self.drafted = of.drafted.at(workload, strategy, of.model)
        self.verified = of.verified.at(workload, strategy, of.model)
        self.accepted = of.accepted.at(workload, strategy, of.model)


class WorkloadMetrics:
    __slots__ = (
        "_all",
        "_name",
        "_strategies",
        "decode",
        "from_draft",
        "from_target",
        "k",
        "plain",
        "prompts",
    )

    def __init__(self, of: SessionMetrics, name: str) -> None:
        self._all = of
        self._name = name
        self._strategies: dict[str, _StrategyMetrics] = {}
        self.from_draft = of.confirmed.at("draft", name)
        self.from_target = of.confirmed.at("target", name)
        self.k = of.k.at(name)
        self.prompts = of.prompts.at(name)
        self.plain, self.decode = of.plain.at(name), of.decode.at(name)

    def count(self, done: RoundEnded) -> None:
        self._of(done.strategy).rounds.value += 1
        for tokens in done.sources:
            of = self._of(tokens.source)
            of.drafted.value += tokens.drafted
            of.verified.value += tokens.verified
            of.accepted.value += tokens.accepted
        self.from_draft.value += done.accepted
        self.from_target.value += done.confirmed - done.accepted
        self.k.observe(done.k)
        if not done.reads_prompt:
            self.plain.value += plain_ns(done) / _SECOND
            self.decode.value += (done.ended_ns - done.started_ns) / _SECOND

    def _of(self, strategy: str) -> _StrategyMetrics:
        of = self._strategies.get(strategy)
        if of is None:
            of = self._strategies[strategy] = _StrategyMetrics(self._all, self._name, strategy)
        return of


class SessionCounts:
    """Count one session; its exemplars name `span`."""

    def __init__(self, of: SessionMetrics, workload: str, principal: str, span: SpanContext) -> None:
        self._all = of
        self._workload = of.of_workload(workload)
        self._principal = principal
        self._output = of.usage_of(principal, "output")
        self._span = span_ref(span)
        self._is_running = False

    def began(self, prompt_tokens: int) -> None:
        """Count the prompt of a new session."""
        self._workload.prompts.value += prompt_tokens
        self._all.usage_of(self._principal, "input").value += prompt_tokens

    def round_ended(self, done: RoundEnded) -> None:
        if not self._is_running:
            self._is_running = True
            self._all.running += 1
        self._all.queue(partial(self._count_round, done, time.time()))

    def _count_round(self, done: RoundEnded, at_s: float) -> None:
        of, verified = self._all, done.verdict.verified
        self._workload.count(done)
        self._output.value += done.confirmed
        of.accepted_at.add(done.accepted)
        of.verified_at.add(done.depth)
        tree = done.tree
        of.accepted_by_rank.add((done.accepted,) if tree is None else tree.accepted_by_rank)
        of.verified_by_rank.add((verified,) if tree is None else tree.verified_by_rank)
        of.rejected.value += verified - done.accepted
        of.wasted_rows.value += done.wasted_rows
        of.draft_wait.observe(done.exposed_draft_ns / _SECOND)
        of.duration.observe((done.ended_ns - done.started_ns) / _SECOND, self._span, at_s)
        if done.overlap != "none":
            of.overlaps[done.overlap].value += 1

    def stopped(self) -> None:
        if self._is_running:
            self._is_running = False
            self._all.running -= 1

    def committed(self, took_ns: int, error: GalleyError | None) -> None:
        self._all.queue(partial(self._count_commit, took_ns, error, time.time()))

    def _count_commit(self, took_ns: int, error: GalleyError | None, at_s: float) -> None:
        cell = self._all.good_commits if error is None else self._all.commits.at(error_type(error))
        cell.observe(took_ns / _SECOND, self._span, at_s)
