"""The speculation statistics of one stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from galley.core.session.events import RoundEnded


@dataclass(slots=True)
class SpeculationStats:
    """Sums over the rounds of one stream; times in nanoseconds.

    Draft token i was accepted in `accepted_at[i]` of the `verified_at[i]` rounds in which it was verified.
    `cancelled` proposals were given up. The target waited `exposed_draft_ns` for drafts.
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
    orchestration_ns: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    verified_at: list[int] = field(default_factory=list)
    proposed: int = 0
    cancelled: int = 0
    exposed_draft_ns: int = 0

    def add(self, done: RoundEnded) -> None:
        elapsed = done.ended_ns - done.started_ns
        self.rounds += 1
        self.drafted += done.drafted
        self.verified += done.verified
        self.accepted += done.accepted
        self.round_ns += elapsed
        self.draft_ns += done.draft_wait_ns
        self.exposed_draft_ns += done.exposed_draft_ns
        self.verify_ns += done.verify_wait_ns
        self.draft_compute_ns += done.draft.compute_ns
        self.verify_compute_ns += done.target.compute_ns
        self.orchestration_ns.append(done.orchestration_ns)
        _count_below(self.accepted_at, done.accepted)
        _count_below(self.verified_at, done.verified)


def plain_ns(done: RoundEnded) -> int:
    """Return an estimate of what plain decoding would have taken for the tokens of a round, in ns.

    Each token takes the round without its wait for a draft and without what draft tokens added to the step;
    the prompt rows count once.
    """
    elapsed_ns = max(0, done.ended_ns - done.started_ns)
    computed_ns = done.target.compute_ns
    for_drafts_ns = max(0, computed_ns - done.plain_ns) if done.plain_ns else 0
    one_ns = max(0, elapsed_ns - done.parts.draft_ns - for_drafts_ns)
    once_ns = min(done.prefill_ns, one_ns)
    return done.confirmed * (one_ns - once_ns) + once_ns


def _count_below(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for index in range(length):
        counts[index] += 1
