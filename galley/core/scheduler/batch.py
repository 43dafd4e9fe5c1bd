"""A pass: what goes into it, and what it tells of itself when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from galley.core.content import SessionKey
from galley.core.cost.live import LiveStepTimes
from galley.core.scheduler.messages import BatchInfo
from galley.core.scheduler.rows import Grant
from galley.core.step import Draw, StepChunk, StepPlan


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """What the results of a pass have in common; see `Confirmed`. `drafts_ns` is what draft rows added."""

    sessions: int
    rows: int
    row_ns: int
    prefill_ns: int
    drafts_ns: int
    span: bytes


@dataclass(frozen=True, slots=True)
class ActiveBatch:
    """The pass under way; `grants[i]` is what chunk i of the plan is for.

    After `drawn_rows` a token is drawn: after `draft_rows` draft tokens, and one a session. See `BatchInfo`.
    """

    plan: StepPlan
    grants: dict[SessionKey, Grant]
    started_ns: int
    draft_rows: int
    drawn_rows: int
    preempted: tuple[str, ...]
    evicted: tuple[SessionKey, ...]

    @classmethod
    def start(
        cls,
        plan: StepPlan,
        grants: dict[SessionKey, Grant],
        now: int,
        preempted: tuple[str, ...],
        evicted: tuple[SessionKey, ...],
    ) -> Self:
        """At this time; those named have lost their blocks since the pass before."""
        drafts = sum(len(grant.draft_tokens) for grant in grants.values())
        drawn = drafts + sum(grant.is_final for grant in grants.values())
        return cls(plan, grants, now, drafts, drawn, preempted, evicted)

    def info(self, free_blocks: int, queue_depth: int) -> BatchInfo:
        """What there is to tell of it."""
        return BatchInfo(
            request_ids=tuple(grant.request.id for grant in self.grants.values()),
            rows=self.plan.rows,
            draft_rows=self.draft_rows,
            prefill_rows=self.plan.rows - self.drawn_rows,
            free_blocks=free_blocks,
            queue_depth=queue_depth,
            preempted=self.preempted,
            evicted=tuple(session_id for _, session_id in self.evicted),
        )

    def record(self, times: LiveStepTimes, took_ns: int, batch_span: bytes) -> BatchTimes:
        """It is over: tell `times`, and what its results say of it.

        Rows of prompts cost less, for nothing is drawn from them: what a row costs is learnt without them.
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


def chunk_for(grant: Grant, blocks: Sequence[int]) -> StepChunk:
    """What is fed of the item, and what is drawn after it."""
    item, request = grant.request, grant.request.message
    start = item.kv_len or 0
    confirmed = item.tokens[start : start + grant.rows]
    if not grant.is_final:
        return StepChunk(start, confirmed, blocks, want_logits=0)
    draw = Draw(
        params=request.sampling,
        history=item.tokens,
        prompt_len=request.prompt_len,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.min_tokens,
        draft_tokens=grant.draft_tokens,
        logprobs=request.logprobs,
    )
    return StepChunk(start, [*confirmed, *grant.draft_tokens], blocks, 1 + len(grant.draft_tokens), draw)


@dataclass(slots=True)
class SchedulerCounts:
    """`prompt_tokens` came with sessions without KV of their own here; of them, `reused_tokens` were cached.

    `missed` items built on a prefix that is not held. `preempted` items had to stop in their midst, for older
    sessions or for want of blocks. `out_of_blocks` items were preempted, refused or put off as there was no
    block. For `linger_ns` passes were put off, for a draft that was due.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    missed: int = 0
    preempted: int = 0
    out_of_blocks: int = 0
    linger_ns: int = 0
