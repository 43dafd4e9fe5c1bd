"""A round: from its first request to its verdict; with credit, from verdict to verdict."""

from __future__ import annotations

from galley.core.names import NO_STRATEGY
from galley.core.session.events import Overlap, RoundEnded, Timing, Verified


class Round:
    def __init__(self, started_ns: int, *, with_credit: bool) -> None:
        self.started_ns = started_ns
        self.verify_ns = started_ns
        self.draft_wait_ns = 0
        self.exposed_ns = 0
        self.drafted = 0
        self.overlap: Overlap = "none"
        self.draft = Timing()
        self._with_credit = with_credit

    def record_proposal(self, timing: Timing, now: int) -> None:
        self.draft_wait_ns = now - self.started_ns
        self.draft = Timing(self.draft.queue_ns + timing.queue_ns, self.draft.compute_ns + timing.compute_ns)

    def finish(
        self,
        verdict: Verified,
        confirmed: int,
        now: int,
        *,
        k: int,
        strategy: str,
        reads_prompt: bool,
    ) -> RoundEnded:
        if self._with_credit:
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
            exposed_draft_ns=verdict.timing.linger_ns if self._with_credit else self.exposed_ns,
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
