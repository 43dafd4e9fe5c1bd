"""One round, from its first request (with credit: from the last verdict) to its verdict; sums of rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from galley.core.names import LOCAL_SOURCES, NO_STRATEGY
from galley.core.session.events import (
    Overlap,
    RoundEnded,
    SourceTokens,
    Timing,
    Verified,
    VerifiedTree,
)
from galley.core.trees import CHAIN, Parents, depths, ranks
from galley.core.values import value

_NO_DRAFT = Timing()
_KEPT_ROUNDS = 1024
"""Rounds of a stream of which it keeps single times: the latest."""


@value
class VerifiedNodes:
    """Verified draft tokens: what proposed each, their tree, and which of a tree were accepted.

    Of a chain (no `parents`), the first ones were accepted. `undrafted` counts the further tokens that the
    target verified although nothing here had drafted them.
    """

    sources: Sequence[str] = ()
    parents: Parents = CHAIN
    path: Sequence[int] = ()
    undrafted: int = 0


_NO_NODES = VerifiedNodes()


class Round:
    def __init__(self, started_ns: int, *, with_credit: bool) -> None:
        self.started_ns = started_ns
        self.verify_ns = started_ns
        self.draft_wait_ns = 0
        self.exposed_ns = 0
        self.drafted = 0
        self._drafted_by: dict[str, int] = {}
        self.overlap: Overlap = "none"
        self.draft = _NO_DRAFT
        self._with_credit = with_credit

    def record_proposal(self, timing: Timing, now: int) -> None:
        self.draft_wait_ns = now - self.started_ns
        self.draft = Timing(self.draft.queue_ns + timing.queue_ns, self.draft.compute_ns + timing.compute_ns)

    def record_sent(self, sources: Sequence[str]) -> None:
        """Record draft tokens that were sent to the target, by what proposed each."""
        self.drafted += len(sources)
        for source in dict.fromkeys(sources):
            self._drafted_by[source] = self._drafted_by.get(source, 0) + sources.count(source)

    def finish(
        self,
        verdict: Verified,
        confirmed: int,
        now: int,
        *,
        nodes: VerifiedNodes = _NO_NODES,
        k: int,
        strategy: str,
        reads_prompt: bool,
    ) -> RoundEnded:
        """Return the report of the round; `nodes` are the draft tokens that were verified."""
        accepted = min(verdict.accepted, confirmed)
        if self._with_credit:
            unaccounted = now - self.verify_ns - verdict.timing.queue_ns - verdict.timing.compute_ns
        else:
            unaccounted = now - self.started_ns - self.draft.compute_ns - verdict.timing.compute_ns
        # Made for each verdict, and in half the time without the names.
        return RoundEnded(
            verdict,
            self.started_ns,
            now,
            self.drafted,
            accepted,
            confirmed,
            self.draft_wait_ns,
            verdict.timing.linger_ns if self._with_credit else self.exposed_ns,
            now - self.verify_ns,
            max(0, unaccounted),
            self.draft,
            k,
            strategy if self.drafted or verdict.verified else NO_STRATEGY,
            self.overlap,
            reads_prompt,
            self._by_source(nodes, accepted),
            _verified_tree(nodes, accepted) if nodes.parents else None,
            nodes.undrafted,
        )

    def _by_source(self, nodes: VerifiedNodes, accepted: int) -> tuple[SourceTokens, ...]:
        verified_by = nodes.sources
        if not self._drafted_by and not verified_by:
            return ()
        right = (
            [verified_by[node] for node in nodes.path[:accepted]] if nodes.parents else verified_by[:accepted]
        )
        return tuple(
            [
                SourceTokens(
                    source, self._drafted_by.get(source, 0), verified_by.count(source), right.count(source)
                )
                for source in dict.fromkeys((*self._drafted_by, *verified_by))
            ]
        )


@dataclass(slots=True)
class SpeculationStats:
    """Sums over the rounds of one stream; times in nanoseconds.

    `orchestration_ns` has the latest 1,024 rounds, the latest last.
    A draft token for position i of the round was accepted in `accepted_at[i]` of the `verified_at[i]` rounds
    in which any was verified. `accepted_by_rank` and `verified_by_rank` count draft tokens by rank among the
    candidates for their position, the likeliest first.
    `cancelled` counts the proposals that were given up. Of the `proposals` of drafts that arrived,
    `proposals_with_features` read the target's state of the token before the last confirmed one. The target
    waited `exposed_draft_ns` for drafts, and found `cached_tokens` of the session in its cache when the
    stream began. `sources` divides draft tokens by what proposed them.
    """

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    round_ns: int = 0
    draft_ns: int = 0
    verify_ns: int = 0
    draft_compute_ns: int = 0
    verify_compute_ns: int = 0
    orchestration_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_ROUNDS))
    accepted_at: list[int] = field(default_factory=list)
    verified_at: list[int] = field(default_factory=list)
    proposed: int = 0
    cancelled: int = 0
    exposed_draft_ns: int = 0
    cached_tokens: int = 0
    sources: dict[str, SourceTokens] = field(default_factory=dict)
    accepted_by_rank: list[int] = field(default_factory=list)
    verified_by_rank: list[int] = field(default_factory=list)
    proposals: int = 0
    proposals_with_features: int = 0

    @property
    def unverified(self) -> int:
        """Return how many tokens of the draft were never verified."""
        own = sum(self.sources[name].verified for name in LOCAL_SOURCES if name in self.sources)
        return max(0, self.proposed - (self.verified - own))

    def add(self, done: RoundEnded) -> None:
        elapsed = done.ended_ns - done.started_ns
        if not self.rounds:
            self.cached_tokens = done.verdict.kv_reused
        self.rounds += 1
        self.drafted += done.drafted
        self.verified += done.verdict.verified
        self.accepted += done.accepted
        self.round_ns += elapsed
        self.draft_ns += done.draft_wait_ns
        self.exposed_draft_ns += done.exposed_draft_ns
        self.verify_ns += done.verify_wait_ns
        self.draft_compute_ns += done.draft.compute_ns
        self.verify_compute_ns += done.verdict.timing.compute_ns
        self.orchestration_ns.append(done.orchestration_ns)
        _count_below(self.accepted_at, done.accepted)
        _count_below(self.verified_at, done.depth)
        if done.tree is not None:
            _add(self.accepted_by_rank, done.tree.accepted_by_rank)
            _add(self.verified_by_rank, done.tree.verified_by_rank)
        elif done.verdict.verified:
            _add(self.accepted_by_rank, (done.accepted,))
            _add(self.verified_by_rank, (done.verdict.verified,))
        if done.sources:
            self.sources = sum_sources((*self.sources.values(), *done.sources))


def sum_sources(counts: Iterable[SourceTokens]) -> dict[str, SourceTokens]:
    """Return the sums of draft tokens by source."""
    sums: dict[str, SourceTokens] = {}
    for of in counts:
        known = sums.get(of.source, SourceTokens(of.source, 0, 0, 0))
        sums[of.source] = SourceTokens(
            of.source,
            known.drafted + of.drafted,
            known.verified + of.verified,
            known.accepted + of.accepted,
        )
    return sums


def plain_ns(done: RoundEnded) -> int:
    """Return an estimate of what plain decoding would have taken for the tokens of a round, in ns.

    Each token takes the round without its wait for a draft and without what draft tokens added to the step;
    the prompt rows count once.
    """
    elapsed_ns = max(0, done.ended_ns - done.started_ns)
    verdict = done.verdict
    for_drafts_ns = max(0, verdict.timing.compute_ns - verdict.plain_ns) if verdict.plain_ns else 0
    waited_ns = done.parts.draft_ns if done.exposed_draft_ns else 0
    one_ns = max(0, elapsed_ns - waited_ns - for_drafts_ns)
    once_ns = min(verdict.prefill_ns, one_ns)
    return done.confirmed * (one_ns - once_ns) + once_ns


def _count_below(counts: list[int], length: int) -> None:
    if not length:
        return
    counts.extend([0] * (length - len(counts)))
    for index in range(length):
        counts[index] += 1


def _add(sums: list[int], counts: Sequence[int]) -> None:
    sums.extend([0] * (len(counts) - len(sums)))
    for index, count in enumerate(counts):
        sums[index] += count


def _verified_tree(nodes: VerifiedNodes, accepted: int) -> VerifiedTree:
    parents = nodes.parents
    rank_of = ranks(parents, len(parents))
    width = max(rank_of) + 1
    right = [rank_of[node] for node in nodes.path[:accepted]]
    return VerifiedTree(
        max(depths(parents, len(parents))) + 1,
        tuple([rank_of.count(rank) for rank in range(width)]),
        tuple([right.count(rank) for rank in range(width)]),
    )
