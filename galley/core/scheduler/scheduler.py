"""What a target replica does next: which tokens of which sessions go into the coming forward pass.

Pure: it knows tokens, blocks and costs; time is an argument, in nanoseconds of one monotonic clock. Rules:

- An item *stands* from `submit` to its last answer. A session has one standing item; a newer one overtakes
  it.
- One pass at a time: `plan` begins it, `conclude` or `fail` ends it. What is asked meanwhile of a session
  that takes part is done when the pass is over; others are served at once, and join the next pass.
- In a pass every standing session whose KV reaches its position gets one row, and draft rows as far as they
  pay (`galley/core/scheduler/rows.py`); prompts fill the rest of the row budget, the oldest session first.
- The higher priority counts as older, whenever it came. Blocks are reserved oldest first, so that the oldest
  session always gets them: the youngest loses its own, and is told by a cache miss what is left. Where too
  many wait, the youngest of them is refused. Arrival is the caller's and survives retries.
- An item with credit goes on after its first result, pass after pass, until its limit, a stop token or the
  end.

Answers are collected and taken with `take_answers` after any call.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from galley.core.acceptance import confirm
from galley.core.content import Miss, SessionKey
from galley.core.cost.live import LiveStepTimes
from galley.core.cost.model import StepTimes
from galley.core.errors import Broken, DeadlinePassed, GalleyError, InvalidField, Overloaded
from galley.core.kv.table import KvTable, Reservation
from galley.core.scheduler.batch import ActiveBatch, BatchTimes, SchedulerCounts, chunk_for
from galley.core.scheduler.linger import LingerPolicy
from galley.core.scheduler.messages import (
    BatchInfo,
    Confirmed,
    Extend,
    Outcome,
    Response,
    Superseded,
    VerifyRequest,
)
from galley.core.scheduler.request import ActiveRequest, SessionStatistics
from galley.core.scheduler.rows import Grant, grant_rows
from galley.core.step import Sampled, StepOutcome, StepPlan

MAX_ROWS = 256
_RETRY_AFTER_S = 0.5
# Sessions whose acceptance and hint delays are remembered: a few numbers each.
_MEMORIES = 4096
# Preempted sessions that are named of a pass.
_NAMED = 16


@dataclass(frozen=True, slots=True)
class Linger:
    """Plan again at `until_ns`, or as soon as anything is submitted, extended or cancelled."""

    until_ns: int


class Scheduler:
    """Schedules the items of one replica; see the module for the rules."""

    def __init__(
        self,
        table: KvTable,
        times: StepTimes,
        *,
        max_rows: int = MAX_ROWS,
        max_waiting: int = 1024,
        max_linger_ns: int = 0,
    ) -> None:
        """`max_waiting` items may wait for their first row; `max_linger_ns` 0 never waits for a hint.

        `waits_ns` is how long the items had waited that the last pass was the first of.
        """
        self.counts = SchedulerCounts()
        self.queue_times_ns: Sequence[int] = ()
        self._table = table
        self._times = LiveStepTimes(times)
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._lingering = LingerPolicy(max_linger_ns, self._times)
        self._requests: dict[int, ActiveRequest] = {}
        self._active: dict[SessionKey, ActiveRequest] = {}
        self._arriving: dict[SessionKey, list[ActiveRequest]] = {}
        self._memories: OrderedDict[SessionKey, SessionStatistics] = OrderedDict()
        self._overall = SessionStatistics()
        self._batch: ActiveBatch | None = None
        self._preempted: deque[str] = deque(maxlen=_NAMED)
        self._responses: list[Response] = []
        self._last_id = 0
        self._draining = False

    # --------------------------------------------------------------------------------- the facts --

    @property
    def queue_depth(self) -> int:
        """Items with work to do."""
        return len(self._requests)

    @property
    def current_batch(self) -> BatchInfo:
        """What there is to tell of the pass under way. Raises Broken if there is none."""
        now = self._batch
        if now is None:
            raise Broken("no pass is under way")
        return now.info(self._table.free, self.queue_depth)

    def take_responses(self) -> list[Response]:
        """All answers since the last time."""
        answers, self._responses = self._responses, []
        return answers

    # ---------------------------------------------------------------------------- what is asked --

    def submit(self, request: VerifyRequest, now: int) -> int:
        """Take an item; the number that names it in answers.

        Raises Overloaded if too many wait, InvalidField if the whole pool could not hold its tokens.
        """
        capacity = self._table.total * self._table.block_tokens
        if request.position > capacity:
            raise InvalidField(
                "slice.tokens",
                f"must end within the {capacity} tokens that the KV memory holds, at {request.position}",
            )
        self._last_id += 1
        item = ActiveRequest(self._last_id, request, self._memory(request.key), now)
        self._make_room(item)
        self._requests[item.id] = item
        if self._is_busy(item.key):
            self._arriving.setdefault(item.key, []).append(item)
        else:
            self._admit(item)
        return item.id

    def _make_room(self, item: ActiveRequest) -> None:
        """Refuse the youngest that waits where too many do; raises Overloaded if that is this item."""
        waiting = [other for other in self._requests.values() if not other.has_started]
        if len(waiting) < self._max_waiting:
            return
        refused = Overloaded(f"{self._max_waiting} items are waiting", _RETRY_AFTER_S)
        youngest = max(waiting, key=_age)
        if youngest.age <= item.age:
            raise refused
        self._respond(youngest, refused)

    def extend(self, request_id: int, extension: Extend, now: int) -> None:
        """More credit or a hint for an item; ignored if it does not stand any more."""
        if (item := self._requests.get(request_id)) is not None:
            item.extend(extension, now)

    def cancel(self, request_id: int) -> None:
        """Give an item up: no answer follows. Its session keeps its KV as long as nobody needs the room."""
        item = self._requests.get(request_id)
        if item is None:
            return
        if self._takes_part(item):
            item.cancelled = True
            del self._requests[request_id]
        else:
            self._close(item)

    def expire(self, now: int) -> None:
        """Refuse the items whose deadline has passed before anything was done for them."""
        late = [
            item
            for item in self._requests.values()
            if item.message.deadline_ns is not None
            and item.message.deadline_ns <= now
            and not item.has_started
            and not self._takes_part(item)
        ]
        for item in late:
            self._respond(item, DeadlinePassed("the deadline passed before the work began"))

    def drain(self) -> None:
        """From now on every item ends with its next result, whatever credit it has."""
        self._draining = True

    def abandon(self, error: GalleyError) -> None:
        """After a fault of the scheduler's own: all items get `error`, and nothing that was held is trusted.

        No pass may be under way in the engine.
        """
        self._responses += [Response(item_id, error) for item_id in self._requests]
        self._requests.clear()
        self._active.clear()
        self._arriving.clear()
        self._batch = None
        self._table.clear()

    def _admit(self, item: ActiveRequest) -> None:
        """Let it stand for its session, if the cache holds what it builds on."""
        if (before := self._active.get(item.key)) is not None:
            self._respond(before, Superseded(before.position, before.prefix_hash()))
        request = item.message
        found = self._table.look_up(item.key, request.start, request.tokens, request.prefix_hash)
        if isinstance(found, Miss):
            self.counts.missed += 1
            self._respond(item, found)
            return
        item.tokens = [*self._table.tokens_of(item.key)[: request.start], *request.tokens]
        self._active[item.key] = item

    def _memory(self, key: SessionKey) -> SessionStatistics:
        memory = self._memories.pop(key, None) or SessionStatistics(self._overall)
        self._memories[key] = memory
        if len(self._memories) > _MEMORIES:
            self._memories.popitem(last=False)
        return memory

    def _is_busy(self, key: SessionKey) -> bool:
        return self._batch is not None and key in self._batch.grants

    def _takes_part(self, item: ActiveRequest) -> bool:
        return self._is_busy(item.key) and self._active.get(item.key) is item

    # --------------------------------------------------------------------------------- the plan --

    def plan(self, now: int) -> StepPlan | Linger | None:
        """The next pass, which is then under way; or until when to wait for a hint; None: nothing to do."""
        if self._batch is not None:
            raise Broken("a pass is under way")
        while items := self._opened():
            for item in items:
                item.update_hint()
            until_ns = self._lingering.until(items, now)
            if until_ns is not None:
                return Linger(until_ns)
            grants, copies = self._reserve(grant_rows(items, self._times, self._max_rows))
            if grants:
                return self._begin(grants, copies, now)
        return None

    def _opened(self) -> list[ActiveRequest]:
        """The standing items, oldest first, with their blocks opened."""
        for item in sorted(self._active.values(), key=_age):
            # One may have made place for an older one already.
            if item.kv_len is None and self._active.get(item.key) is item:
                self._open(item)
        return sorted(self._active.values(), key=_age)

    def _open(self, item: ActiveRequest) -> None:
        """Where there is no place left for a session, the youngest makes it, if it is younger than this."""
        try:
            self._hold(item)
        except Overloaded as error:
            opened = (other for other in self._active.values() if other.kv_len is not None)
            youngest = max(opened, key=_age, default=item)
            if youngest.age <= item.age:
                self._respond(item, error)
                return
            self._preempt(youngest)
            self._hold(item)

    def _hold(self, item: ActiveRequest) -> None:
        """Raises Overloaded."""
        is_new = not self._table.has_blocks(item.key)
        item.kv_len = item.kv_reused = self._open_blocks(item)
        if is_new:
            self.counts.prompt_tokens += len(item.tokens)
            self.counts.reused_tokens += item.kv_reused

    def _open_blocks(self, item: ActiveRequest) -> int:
        """How far they hold it already. Raises Overloaded."""
        request = item.message
        return self._table.open(item.key, request.arrival_ns, item.tokens, request.priority)

    def _reserve(self, wanted: Sequence[Grant]) -> tuple[dict[SessionKey, Grant], list[tuple[int, int]]]:
        """Make blocks for what is granted, oldest first; who gets none is answered and left out."""
        grants: dict[SessionKey, Grant] = {}
        copies: list[tuple[int, int]] = []
        for grant in wanted:
            item = grant.request
            if self._active.get(item.key) is not item:
                continue  # preempted by an older one
            try:
                granted, reservation = self._reserve_for(grant, frozenset(grants))
            except Overloaded as error:
                self.counts.out_of_blocks += 1
                # What it has computed stays until somebody needs it; it goes on from there when asked again.
                if item.has_started:
                    self._preempt(item)
                else:
                    self._respond(item, error)
                continue
            self.counts.out_of_blocks += len(reservation.preempted)
            for key in reservation.preempted:
                self._preempt(self._active[key])
            grants[item.key] = granted
            copies += reservation.copies
        return grants, copies

    def _preempt(self, item: ActiveRequest) -> None:
        """It cannot go on; its caller is told what of it is left."""
        self.counts.preempted += 1
        self._preempted.append(item.key[1])
        self._respond(item, self._table.cached_prefix(item.key), preempted=True)

    def _reserve_for(self, grant: Grant, busy: frozenset[SessionKey]) -> tuple[Grant, Reservation]:
        """With its draft tokens, or without where only these do not fit. Raises Overloaded."""
        item = grant.request
        length = (item.kv_len or 0) + grant.rows
        if grant.draft_tokens:
            try:
                whole = length + len(grant.draft_tokens)
                return grant, self._table.reserve(item.key, whole, busy)
            except Overloaded:
                grant = Grant(item, grant.rows)
        return grant, self._table.reserve(item.key, length, busy)

    def _begin(
        self, grants: dict[SessionKey, Grant], copies: Sequence[tuple[int, int]], now: int
    ) -> StepPlan:
        items = [grant.request for grant in grants.values()]
        self.queue_times_ns = [now - item.arrived_ns for item in items if not item.has_started]
        self.counts.linger_ns += self._lingering.waited_ns
        for item in items:
            item.has_started = True
            item.linger_ns += self._lingering.waited_ns
        chunks = tuple(chunk_for(grant, self._table.blocks_of(key)) for key, grant in grants.items())
        plan = StepPlan(chunks, tuple(copies))
        preempted, evicted = tuple(self._preempted), self._table.take_evicted()
        self._batch = ActiveBatch.start(plan, grants, now, preempted, evicted)
        self._preempted.clear()
        return plan

    # ------------------------------------------------------------------------------ the outcomes --

    def conclude(
        self, plan: StepPlan, outcomes: Sequence[StepOutcome], now: int, batch_span: bytes = b""
    ) -> None:
        """The pass is over: confirm, cut, answer. Raises Broken if this is not the pass under way.

        `batch_span` names it in a trace.
        """
        done = self._end(plan)
        if len(outcomes) != len(plan.chunks):
            raise Broken(f"a pass of {len(plan.chunks)} chunks had {len(outcomes)} outcomes")
        took_ns = now - done.started_ns
        shared = done.record(self._times, took_ns, batch_span)
        for grant, outcome in zip(done.grants.values(), outcomes, strict=True):
            grant.request.compute_ns += took_ns
            self._settle(grant, outcome, shared, now)
        self._admit_arrived(done)

    def fail(self, plan: StepPlan, error: GalleyError) -> None:
        """The pass came to nothing: its sessions get `error`, and keep what KV they had before it."""
        done = self._end(plan)
        for grant in done.grants.values():
            self._table.roll_back(grant.request.key)
            self._respond(grant.request, error)
        self._admit_arrived(done)

    def _end(self, plan: StepPlan) -> ActiveBatch:
        done = self._batch
        if done is None or done.plan is not plan:
            raise Broken("this pass is not under way")
        self._batch = None
        return done

    def _admit_arrived(self, done: ActiveBatch) -> None:
        for key in done.grants:
            for item in self._arriving.pop(key, ()):
                self._admit(item)

    def _settle(self, grant: Grant, outcome: StepOutcome, shared: BatchTimes, now: int) -> None:
        """One session's outcome; an error costs it what the pass computed, and no other anything."""
        item = grant.request
        if grant.is_final and (outcome is None or (isinstance(outcome, Sampled) and not outcome.tokens)):
            outcome = Broken("the engine drew no token where one was wanted")
        if isinstance(outcome, GalleyError):
            self._table.roll_back(item.key)
            self._respond(item, outcome)
            return
        start = item.kv_len or 0
        if isinstance(outcome, Sampled) and grant.is_final and not item.cancelled:
            self._confirm(grant, outcome, shared, now)
            return
        # A prompt's part; or a cancelled item's tokens, which nobody will be told: theirs is only the KV.
        self._computed(item, min(start + grant.rows, len(item.tokens)))
        if item.cancelled:
            self._close(item)

    def _computed(self, item: ActiveRequest, length: int) -> None:
        """The item's first `length` tokens have their KV now."""
        self._table.append_computed(item.key, item.tokens[item.kv_len or 0 : length])
        self._table.truncate(item.key, length)
        item.kv_len = length

    def _confirm(self, grant: Grant, sampled: Sampled, shared: BatchTimes, now: int) -> None:
        item, request, position = grant.request, grant.request.message, grant.request.position
        verdict = confirm(
            grant.draft_tokens,
            sampled.tokens,
            position=position,
            max_position=request.max_position,
            stop_token_ids=request.stop_token_ids,
            output_len=position - request.prompt_len,
            min_tokens=request.min_tokens,
        )
        stopped = _has_stopped(request, position, verdict.tokens)
        checked = _checked(grant, sampled)
        queue_ns, compute_ns, linger_ns = item.confirm(verdict.tokens, now)
        # The last confirmed token has no KV yet: the next pass feeds it.
        self._computed(item, len(item.tokens) - 1)
        self._respond(
            item,
            Confirmed(
                position=position,
                tokens=verdict.tokens,
                accepted=verdict.accepted,
                verified=checked,
                logprobs=sampled.logprobs[: len(verdict.tokens)],
                kv_len=len(item.tokens) - 1,
                batch_sessions=shared.sessions,
                more=self._goes_on(item, stopped=stopped),
                queue_ns=queue_ns,
                compute_ns=compute_ns,
                linger_ns=linger_ns,
                row_ns=shared.row_ns,
                prefill_ns=shared.prefill_ns,
                plain_ns=max(0, compute_ns - shared.drafts_ns),
                batch_rows=shared.rows,
                kv_reused=item.take_reused(),
                batch_span=shared.span,
            ),
        )

    def _goes_on(self, item: ActiveRequest, *, stopped: bool) -> bool:
        return not (stopped or self._draining) and item.message.credit > 0 and item.position < item.limit

    def _respond(self, item: ActiveRequest, outcome: Outcome, *, preempted: bool = False) -> None:
        """Say it, unless the item was given up; close the item unless more follows."""
        answer = Response(item.id, outcome, preempted)
        if not item.cancelled:
            self._responses.append(answer)
        if answer.is_last:
            self._close(item)

    def _close(self, item: ActiveRequest) -> None:
        self._requests.pop(item.id, None)
        if item in (arriving := self._arriving.get(item.key, [])):
            arriving.remove(item)
        if self._active.get(item.key) is item:
            del self._active[item.key]
            self._table.make_idle(item.key)


def _age(item: ActiveRequest) -> tuple[int, int, int]:
    return item.age


def _checked(grant: Grant, sampled: Sampled) -> int:
    """How many draft tokens were: all, but those after which the logits were bad."""
    drafts, tokens = grant.draft_tokens, sampled.tokens
    return len(tokens) if tokens == drafts[: len(tokens)] else len(drafts)


def _has_stopped(request: VerifyRequest, position: int, tokens: Sequence[int]) -> bool:
    """Does the last of these tokens, confirmed from `position` on, end the answer?"""
    last = position + len(tokens) - 1 - request.prompt_len
    return bool(tokens) and tokens[-1] in request.stop_token_ids and last >= request.min_tokens
