"""A round, from its first request to its verdict; under credit, from verdict to verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from galley.core.session.events import Timing, Verified

NO_STRATEGY = "none"
"""No draft token was sent."""

Overlap = Literal["hit", "miss", "none"]
"""Draft tokens were ready; they were still being drafted; none were wanted or to be had."""


class Round:
    """What is known of the round under way."""

    def __init__(self, started_ns: int, *, unasked: bool) -> None:
        """With credit the target goes on `unasked`."""
        self.started_ns = started_ns
        self.verify_ns = started_ns
        self.draft_wait_ns = 0
        self.exposed_ns = 0
        self.drafted = 0
        self.overlap: Overlap = "none"
        self.draft = Timing()
        self._unasked = unasked

    def draft_came(self, timing: Timing, now: int) -> None:
        """A proposal came, or came to nothing."""
        self.draft_wait_ns = now - self.started_ns
        self.draft = Timing(self.draft.queue_ns + timing.queue_ns, self.draft.compute_ns + timing.compute_ns)

    def ended(
        self,
        verdict: Verified,
        confirmed: int,
        now: int,
        *,
        k: int,
        strategy: str,
        reads_prompt: bool,
    ) -> RoundEnded:
        """By this verdict, of which so many tokens were confirmed."""
        if self._unasked:
            unaccounted = now - self.verify_ns - verdict.timing.queue_ns - verdict.timing.compute_ns
        else:
            unaccounted = now - self.started_ns - self.draft.compute_ns - verdict.timing.compute_ns
        return RoundEnded(
            position=verdict.position,
            started_ns=self.started_ns,
            ended_ns=now,
            drafted=self.drafted,
            verified=verdict.verified,
            accepted=min(verdict.accepted, confirmed),
            confirmed=confirmed,
            draft_wait_ns=self.draft_wait_ns,
            verify_wait_ns=now - self.verify_ns,
            exposed_draft_ns=verdict.timing.linger_ns if self._unasked else self.exposed_ns,
            orchestration_ns=max(0, unaccounted),
            draft=self.draft,
            target=verdict.timing,
            k=k,
            strategy=strategy if self.drafted or verdict.verified else NO_STRATEGY,
            overlap=self.overlap,
            plain_ns=verdict.plain_ns,
            prefill_ns=verdict.prefill_ns,
            kv_reused=verdict.kv_reused,
            batch_span=verdict.batch_span,
            batch_sessions=verdict.sessions,
            reads_prompt=reads_prompt,
        )


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """For telemetry: one round, from its first request to its verdict; under credit, from verdict to verdict.

    `drafted` counts the draft tokens that the target was sent in this round. `verify_wait_ns` is how long the
    verdict was awaited. `draft_wait_ns` is how long into the round its last proposal came: without credit the
    target is asked only then; with it, it may have waited so long, and the two waits overlap.
    `exposed_draft_ns` is how long the target was held up: the wait for a proposal, or its lingering.
    `orchestration_ns` is what neither of the two accounts for: without credit the round less their computing,
    with it the wait for the verdict less the target's queueing and computing.

    `k` is how many tokens the draft was last asked for, 0 if none were wanted; `strategy` guessed those that
    were sent ("none" if none were). `overlap` says whether draft tokens were ready when the round began.
    `plain_ns`, `prefill_ns`, `kv_reused`, `batch_span` and `batch_sessions` are the verdict's. With
    `reads_prompt`, the target read more than the last token of the session before it came to this verdict.
    """

    position: int
    started_ns: int
    ended_ns: int
    drafted: int
    verified: int
    accepted: int
    confirmed: int
    draft_wait_ns: int
    exposed_draft_ns: int
    verify_wait_ns: int
    orchestration_ns: int
    draft: Timing
    target: Timing
    k: int = 0
    strategy: str = NO_STRATEGY
    overlap: Overlap = "none"
    plain_ns: int = 0
    prefill_ns: int = 0
    kv_reused: int = 0
    batch_span: bytes = b""
    batch_sessions: int = 1
    reads_prompt: bool = False

    @property
    def parts(self) -> RoundParts:
        """What its time went into; the parts sum to it."""
        left = max(0, self.ended_ns - self.started_ns)
        compute_ns = min(self.target.compute_ns, left)
        left -= compute_ns
        draft_ns = min(self.exposed_draft_ns, left)
        left -= draft_ns
        queue_ns = min(max(0, self.target.queue_ns - self.target.linger_ns), left)
        return RoundParts(draft_ns, queue_ns, compute_ns, wire_ns=left - queue_ns)


@dataclass(frozen=True, slots=True)
class RoundParts:
    """The time of a round: a draft was awaited, the target had it wait, computed, and all the rest.

    A target that lingers awaits a draft. What it did before the round began (under credit a pass may begin
    before the last verdict has arrived) is not of the round.
    """

    draft_ns: int
    queue_ns: int
    compute_ns: int
    wire_ns: int
