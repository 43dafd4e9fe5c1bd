"""The batch of one step: how its rows are divided, and what its results share.

Verification comes first, then prompts, within a budget of rows. Tenants take turns with their prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from galley.core.content import SessionKey
from galley.core.cost.model import LiveStepTimes, StepNs, rows_that_pay
from galley.core.scheduler.messages import BatchInfo
from galley.core.scheduler.prefill import PrefillBudget
from galley.core.scheduler.request import ActiveRequest
from galley.core.step import Computed, StepOutcome, StepPlan
from galley.core.trees import CHAIN, Parents, simplified

# Prefill gets at least one in this many rows of the budget.
_PREFILL_SHARE = 4
# One in so many rows of prefill goes first to prompts that fit there whole.
_SHORT_SHARE = 4


@dataclass(frozen=True, slots=True)
class Grant:
    """The next `rows` confirmed tokens of the request are fed, and after the last of them `draft_tokens`.

    The first `certain` draft tokens, a chain, follow whatever the model computes, so none is drawn in their
    places. `parents`: see `galley/core/trees.py`.
    """

    request: ActiveRequest
    rows: int
    draft_tokens: tuple[int, ...] = ()
    certain: int = 0
    parents: Parents = CHAIN

    @property
    def end(self) -> int:
        """Return the position after the last token that is fed."""
        return (self.request.kv_len or 0) + self.rows + len(self.draft_tokens)

    @property
    def drawn_parents(self) -> Parents:
        """Return the parents of the draft tokens after the certain ones, among themselves."""
        if not self.parents:
            return CHAIN
        return simplified([parent - self.certain for parent in self.parents[self.certain :]])

    @property
    def is_final(self) -> bool:
        """Return True if the rows reach the request's position, so that a token is drawn."""
        return self.rows == self.request.uncomputed


def grant_rows(
    requests: Sequence[ActiveRequest],
    step_ns: StepNs,
    max_rows: int,
    budget: PrefillBudget,
    *,
    divides_prompts: bool = False,
) -> list[Grant]:
    """Return the grants of a step of about `max_rows` rows, in the order of `requests`, oldest first.

    Every request whose KV reaches its position gets one row, whatever the budget. Certain draft tokens come
    next: each takes a row now or in a later step. Then follow other draft rows, as many as pay by `step_ns`.
    Prefill takes what is left, but at least a quarter of the rows, and at most its `budget` of time, as the
    certain tokens do. If the engine `divides_prompts` over steps itself, it takes all, without draft tokens:
    they would follow in no step.
    """
    verifying = sum(request.uncomputed == 1 for request in requests)
    demand = sum(request.uncomputed for request in requests if request.uncomputed > 1)
    reserved = min(demand, max_rows // _PREFILL_SHARE)
    prefill = budget.rows(min(demand, max(max_rows - verifying, reserved)), verifying, 0)
    offering = _reaching(requests, 0 if divides_prompts else prefill)
    room = max_rows - verifying - reserved
    most = budget.rows(max(0, min(room, sum(one.certain for one in offering))), verifying, 0)
    counts = _certain_counts(offering, most)
    _add_draft_counts(counts, offering, verifying + prefill, room, step_ns)
    if not divides_prompts:
        drafts = sum(counts.values())
        used = verifying + drafts
        demand = budget.rows(min(demand, max(max_rows - used, reserved)), used, drafts)
    return _grants(requests, counts, demand, skips=not divides_prompts)


def _reaching(requests: Sequence[ActiveRequest], prefill: int) -> list[ActiveRequest]:
    """Return the requests that reach their position with `prefill` rows of prefill."""
    rows = _prompt_rows(requests, prefill)
    return [request for request in requests if rows.get(request.id, 1) == request.uncomputed]


def _prompt_rows(requests: Sequence[ActiveRequest], prefill: int) -> dict[int, int]:
    """Return how many of `prefill` rows each prompt gets, by the id of its request; 0 for some.

    Of the highest priority, prompts that fit whole into a quarter of the rows come first. Then all follow by
    priority, and in turn (`PromptTurns`). So the long prompts of one tenant hold up those of others for the
    time of one of them, and short ones hardly.
    """
    prompts = [request for request in requests if request.uncomputed > 1]
    rows = dict.fromkeys((request.id for request in prompts), 0)
    left, short = prefill, prefill // _SHORT_SHARE
    for request in prompts:
        if request.uncomputed <= short and request.message.priority == prompts[0].message.priority:
            rows[request.id] = request.uncomputed
            short -= request.uncomputed
            left -= request.uncomputed
    for request in sorted(prompts, key=_turn):
        more = min(request.uncomputed - rows[request.id], left)
        rows[request.id] += more
        left -= more
    return rows


def _turn(request: ActiveRequest) -> tuple[int, int, tuple[int, int, int]]:
    return (-request.message.priority, request.turn or 0, request.age)


def _certain_counts(offering: Sequence[ActiveRequest], most: int) -> dict[int, int]:
    """Return how many certain tokens of each request, by its id, to feed: up to `most`, the oldest first."""
    counts: dict[int, int] = {}
    for request in offering:
        if count := min(request.certain, most):
            counts[request.id] = count
            most -= count
    return counts


def _add_draft_counts(
    counts: dict[int, int], offering: Sequence[ActiveRequest], rows: int, room: int, step_ns: StepNs
) -> None:
    """Add how many more draft tokens of each request to verify, beside `rows` other rows."""
    certain = sum(counts.values())
    worth = [
        (chance, request.id)
        for request in offering
        for chance in request.survival()[counts.get(request.id, 0) :]
    ]
    # A session's chances fall, so the best of all sessions are the first ones of each.
    worth.sort(key=lambda one: -one[0])
    chances = [chance for chance, _ in worth]
    drawing, rows = len(offering) + certain, rows + certain
    prompts_ns = step_ns(rows, 0) - step_ns(drawing, 0) if rows > drawing > 0 else 0.0
    pays = rows_that_pay(
        chances, tokens=drawing, rows=rows, step_ns=step_ns, room=room - certain, prompts_ns=prompts_ns
    )
    for _, request_id in worth[:pays]:
        counts[request_id] = counts.get(request_id, 0) + 1


def _grants(
    requests: Sequence[ActiveRequest], counts: dict[int, int], prefill: int, *, skips: bool
) -> list[Grant]:
    grants = []
    prompt_rows = _prompt_rows(requests, prefill)
    for request in requests:
        rows = prompt_rows.get(request.id, 1)
        if rows == 0:
            continue
        count = counts.get(request.id, 0) if rows == request.uncomputed else 0
        drafts, parents = request.tail.draft_tokens[:count], request.tail.parents[:count]
        # Where logprobs are wanted, the model is asked about every token.
        skipped = min(request.certain, len(drafts)) if skips and request.message.logprobs is None else 0
        grants.append(Grant(request, rows, drafts, skipped, simplified(parents) if parents else CHAIN))
    return grants


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
    """The batch of the step in progress; the i-th of `grants` belongs to chunk i of the plan.

    `is_corrected`: the engine fed other rows than planned.
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
        self._preempted = preempted
        self._evicted = evicted
        self.is_corrected = False
        self._count(grants.values())

    def _count(self, grants: Iterable[Grant]) -> None:
        """Count the rows of these grants.

        A token is drawn after each of `_drawn_rows`: `_draft_rows`, and one for each grant that is final.
        """
        self._fed = [grant for grant in grants if grant.rows]
        self._draft_rows = sum(len(grant.draft_tokens) for grant in self._fed)
        self._drawn_rows = self._draft_rows + sum(grant.is_final for grant in self._fed)
        self._rows = self._draft_rows + sum(grant.rows for grant in self._fed)

    def correct(self, key: SessionKey, drafts: int) -> None:
        """Grant the session all that it now lacks, and only this many of its draft tokens."""
        self.is_corrected = True
        grant = self.grants[key]
        self.grants[key] = Grant(grant.request, grant.request.uncomputed, grant.draft_tokens[:drafts])

    def settle(self, outcomes: Sequence[StepOutcome]) -> None:
        """Count the rows that were fed, where they are not those of the plan."""
        if self.is_corrected or any(isinstance(outcome, Computed) for outcome in outcomes):
            self._count(map(_fed, self.grants.values(), outcomes))

    @property
    def fed_requests(self) -> list[ActiveRequest]:
        """Return the requests of which the step feeds rows."""
        return [grant.request for grant in self._fed]

    def info(self, free_blocks: int, queue_depth: int) -> BatchInfo:
        return BatchInfo(
            request_ids=tuple(request.id for request in self.fed_requests),
            rows=self._rows,
            draft_rows=self._draft_rows,
            prefill_rows=self._rows - self._drawn_rows,
            free_blocks=free_blocks,
            queue_depth=queue_depth,
            preempted=self._preempted,
            evicted=tuple(session_id for _, session_id in self._evicted),
        )

    def record(
        self, times: LiveStepTimes, budget: PrefillBudget, took_ns: int, batch_span: bytes
    ) -> BatchTimes:
        """Record in `times` how long the step took, and return what its results share.

        Steps that read prompts are recorded in `budget` instead: prompt rows cost less, because nothing is
        drawn after them.
        """
        drafts, drawn, sessions = self._draft_rows, self._drawn_rows, len(self._fed)
        prefill_ns = 0
        if 0 < drawn == self._rows:
            times.record(drawn, drafts, took_ns)
        else:
            prefill_ns = max(0, took_ns - times(drawn, drafts)) if drawn else took_ns
            if self._rows > drawn:
                budget.record(self._rows - drawn, drawn, drafts, took_ns)
        drafts_ns = max(0, times(drawn, drafts) - times(drawn - drafts, 0)) if drafts else 0
        return BatchTimes(
            sessions=sessions,
            rows=self._rows,
            row_ns=times.added_row_ns(max(1, sessions)),
            prefill_ns=prefill_ns,
            drafts_ns=min(drafts_ns, took_ns),
            span=batch_span,
        )


def _fed(grant: Grant, outcome: StepOutcome) -> Grant:
    if not isinstance(outcome, Computed):
        return grant
    return Grant(grant.request, max(0, outcome.kv_len - (grant.request.kv_len or 0)))


@dataclass(slots=True)
class SchedulerCounts:
    """Counts of a replica's scheduler since its start.

    `prompt_tokens` counts the tokens of sessions that held no blocks here; `reused_tokens` of them were
    cached. `missed` counts requests whose prefix is not cached, `preempted` those that lost their blocks, and
    `out_of_blocks` those preempted or refused for lack of blocks. Steps waited `linger_ns` for hints, and
    `mask_wait_ns` for the masks of grammars.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    missed: int = 0
    preempted: int = 0
    out_of_blocks: int = 0
    linger_ns: int = 0
    mask_wait_ns: int = 0
