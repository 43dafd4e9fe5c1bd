"""The batch of one step: what goes into it, and what its results share."""

from __future__ import annotations

from dataclasses import dataclass

from galley.core.content import SessionKey
from galley.core.cost.live import LiveStepTimes
from galley.core.scheduler.messages import BatchInfo
from galley.core.scheduler.rows import Grant
from galley.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The part that all results of one step share; `Confirmed` explains it. Draft rows added `drafts_ns`."""

    sessions: int
    rows: int
    row_ns: int
    prefill_ns: int
    drafts_ns: int
    span: bytes


class ActiveBatch:
    """The batch of the step in progress; `grants[i]` belongs to chunk i of the plan.

    A token is drawn after each of `drawn_rows` rows: `draft_rows`, and one more per session.
    """

    def __init__(
        self,
        plan: StepPlan,
        grants: dict[SessionKey, Grant],
        now: int,
        preempted: tuple[str, ...],
        evicted: tuple[SessionKey, ...],
    ) -> None:
        """Start now; `preempted` and `evicted` sessions lost their blocks since the last batch."""
        self.plan = plan
        self.grants = grants
        self.started_ns = now
        self.draft_rows = sum(len(grant.draft_tokens) for grant in grants.values())
        self.drawn_rows = self.draft_rows + sum(grant.is_final for grant in grants.values())
        self._preempted = preempted
        self._evicted = evicted

    def info(self, free_blocks: int, queue_depth: int) -> BatchInfo:
        return BatchInfo(
            request_ids=tuple(grant.request.id for grant in self.grants.values()),
            rows=self.plan.rows,
            draft_rows=self.draft_rows,
            prefill_rows=self.plan.rows - self.drawn_rows,
            free_blocks=free_blocks,
            queue_depth=queue_depth,
            preempted=self._preempted,
            evicted=tuple(session_id for _, session_id in self._evicted),
        )

    def record(self, times: LiveStepTimes, took_ns: int, batch_span: bytes) -> BatchTimes:
        """Teach `times` what the step took, and return what its results share.

        Rows of prompts cost less because nothing is drawn from them, so steps with any teach nothing.
        """
        drafts, drawn, sessions = self.draft_rows, self.drawn_rows, len(self.grants)
        prefill_ns = 0
        if drawn == self.plan.rows:
            times.record(drawn, drafts, took_ns)
        else:
            prefill_ns = max(0, took_ns - times(drawn, drafts)) if drawn else took_ns
        drafts_ns = max(0, times(drawn, drafts) - times(drawn - drafts, 0)) if drafts else 0
        return BatchTimes(
            sessions=sessions,
            rows=self.plan.rows,
            row_ns=times.added_row_ns(sessions),
            prefill_ns=prefill_ns,
            drafts_ns=min(drafts_ns, took_ns),
            span=batch_span,
        )


@dataclass(slots=True)
class SchedulerCounts:
    """Counts of a replica's scheduler since its start.

    `prompt_tokens` came with sessions that held no blocks here; `reused_tokens` of them were cached. `missed`
    requests named a prefix that is not cached. `preempted` ones lost their blocks; `out_of_blocks` ones were
    preempted, refused or delayed because no block was left. Steps waited `linger_ns` for hints.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    missed: int = 0
    preempted: int = 0
    out_of_blocks: int = 0
    linger_ns: int = 0
