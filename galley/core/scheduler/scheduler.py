"""Choose the next step of a target replica: which tokens of which sessions go into the coming forward pass.

Pure: it knows tokens, blocks and costs. Time is an argument, in nanoseconds of one monotonic clock. Rules:

1. A request is active from `submit` to its last response. A session has one active request; a newer one
   supersedes it.
2. One step runs at a time: `plan` begins it, `conclude` or `fail` ends it. Requests that arrive meanwhile for
   a session of the batch wait for its end; others are admitted at once and join the next step.
3. In a step, every active session whose KV reaches its position gets one row, and draft rows as far as they
   pay (`batch.py`). Prompts fill the rest of the row budget, the oldest session first, as far as the other
   streams of the step can wait (`prefill.py`).
4. A higher priority counts as older. Blocks are reserved oldest first, so the oldest session always gets
   them: the youngest loses its own and gets a cache miss that says how much of its prefix is cached. If too
   many requests wait, the youngest is refused. The caller sets the arrival time and repeats it in retries.
5. A request with credit continues after its first result, step after step, until its limit or a stop token.
6. The keys and values of an accepted path of a tree are moved to where those of a chain are, before anything
   else in the next step: also if their session has ended, because their blocks may be found by their content.

Responses are collected; take them with `take_responses` after any call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import attrgetter

from galley.core.acceptance import confirm
from galley.core.audit import AUDIT_PRIORITY
from galley.core.content import BlockChain, Miss, SessionKey
from galley.core.cost.model import LiveStepTimes, StepTimes
from galley.core.errors import Broken, DeadlinePassed, GalleyError, InvalidField, Overloaded
from galley.core.features import MAX_FEATURE_TOKENS, NO_STATES, States, state_bytes
from galley.core.kv.compaction import compaction
from galley.core.kv.table import Reservation
from galley.core.lru import LruCache
from galley.core.scheduler.batch import ActiveBatch, BatchTimes, Grant, SchedulerCounts, grant_rows
from galley.core.scheduler.grammars import SessionGrammars
from galley.core.scheduler.linger import LingerPolicy
from galley.core.scheduler.memory import KvMemory
from galley.core.scheduler.messages import (
    BatchInfo,
    Confirmed,
    Extend,
    Outcome,
    Response,
    Superseded,
    VerifyRequest,
)
from galley.core.scheduler.prefill import PrefillBudget, PromptTurns
from galley.core.scheduler.request import ActiveRequest, SessionStatistics
from galley.core.step import (
    Computed,
    Draw,
    GrowingTokens,
    Sampled,
    StepChunk,
    StepOutcome,
    StepPlan,
    TokenMove,
    TokenRange,
)
from galley.core.trees import follow

MAX_ROWS = 256
_RETRY_AFTER_S = 0.5
# Sessions whose statistics are kept, a few numbers each.
_MEMORIES = 4096
# After so many blocks, one call of `plan` opens and evicts no further session; about a millisecond's.
_MOST_MOVED = 1024
# Preempted sessions that one batch names.
_NAMED = 16
_age = attrgetter("age")


@dataclass(frozen=True, slots=True)
class Linger:
    """Call `plan` again at `until_ns`, maybe now, or once anything is submitted, extended or cancelled."""

    until_ns: int


class Scheduler:
    max_draft_tokens: int | None = None
    """The most draft tokens of a session that a step of this engine verifies; None: as many as pay."""
    takes_trees = False
    """Whether this engine verifies trees; of others it is given the main path, a chain."""
    feature_size = 0
    """Numbers of a token's state after one layer; 0: this engine returns no states."""

    def __init__(
        self,
        kv: KvMemory,
        times: StepTimes,
        *,
        max_rows: int = MAX_ROWS,
        max_waiting: int = 1024,
        max_linger_ns: int = 0,
        max_itl_ns: int = 0,
        divides_prompts: bool = False,
    ) -> None:
        """Let `max_waiting` requests wait for a first row; a `max_linger_ns` of 0 never waits for hints.

        Beside streams, prompts are read in parts that keep a step below `max_itl_ns`, unless that is 0.
        If the engine `divides_prompts` over steps itself, every active request is granted all its tokens, and
        the engine says how many it fed (`Computed`).
        `queue_times_ns` are the queue times, in ns, of the requests that started in the last step.
        """
        self.counts = SchedulerCounts()
        self.queue_times_ns: Sequence[int] = ()
        self.kv = kv
        self._times = LiveStepTimes(times)
        self._max_rows = max_rows
        self._divides_prompts = divides_prompts
        self._max_waiting = max_waiting
        self._lingering = LingerPolicy(max_linger_ns, self._times)
        self._prefill = PrefillBudget(max_itl_ns, self._times)
        self._turns = PromptTurns()
        self._requests: dict[int, ActiveRequest] = {}
        self._active: dict[SessionKey, ActiveRequest] = {}
        self._arriving: dict[SessionKey, list[ActiveRequest]] = {}
        self._memories: LruCache[SessionKey, SessionStatistics] = LruCache(SessionStatistics, _MEMORIES)
        self._overall = SessionStatistics()
        self._grammars = SessionGrammars(kv.max_sessions)
        self._batch: ActiveBatch | None = None
        self._moves: list[TokenMove] = []
        self._preempted: deque[str] = deque(maxlen=_NAMED)
        self._responses: list[Response] = []
        self._last_id = 0
        self._draining = False

    @property
    def queue_depth(self) -> int:
        return len(self._requests)

    @property
    def current_batch(self) -> BatchInfo:
        """Return a description of the step in progress. Raises Broken if there is none."""
        now = self._batch
        if now is None:
            raise Broken("scheduler: no step is in progress")
        return now.info(self.kv.free, self.queue_depth)

    def take_responses(self) -> list[Response]:
        answers, self._responses = self._responses, []
        return answers

    def submit(self, message: VerifyRequest, now: int) -> int:
        """Take a request; return the number that names it in responses.

        Raises Overloaded if too many wait, InvalidField if the KV memory could never hold its tokens.
        """
        capacity = self.kv.total * self.kv.block_tokens
        if message.position > capacity:
            raise InvalidField(
                "slice.tokens",
                f"must be at most the {capacity} tokens that KV memory holds, got {message.position}",
            )
        self._last_id += 1
        memory = self._memory(message)
        request = ActiveRequest(
            self._last_id, message, memory, now, self.max_draft_tokens, takes_trees=self.takes_trees
        )
        self._make_room(request)
        self._requests[request.id] = request
        if self._is_busy(request.key):
            self._arriving.setdefault(request.key, []).append(request)
        else:
            self._admit(request)
        return request.id

    def block_chain(self, key: SessionKey, start: int, prefix_hash: bytes) -> BlockChain | None:
        """Return the hashes of the session's first `start` tokens, to which those of a request can be added.

        None if the cache does not hold this prefix.
        """
        if isinstance(self.kv.look_up(key, start, (), prefix_hash), Miss):
            return None
        chain = BlockChain(key[0], self.kv.block_tokens, self._hashes_before(key, start))
        chain.add(self.kv.tokens_of(key)[len(chain.hashes) * self.kv.block_tokens : start])
        return chain

    def _hashes_before(self, key: SessionKey, start: int) -> Sequence[bytes]:
        """Return the known hashes of the session's full blocks within its first `start` tokens."""
        return self.kv.hashes_of(key)[: start // self.kv.block_tokens]

    def _make_room(self, request: ActiveRequest) -> None:
        """Refuse the youngest waiting request if too many wait. Raise Overloaded if that is this one.

        One that an engine has in its step without feeding it yet ends with the step.
        """
        waiting = [other for other in self._requests.values() if not other.has_started]
        if len(waiting) < self._max_waiting:
            return
        refused = Overloaded(f"{self._max_waiting} requests are waiting", _RETRY_AFTER_S)
        youngest = max(waiting, key=_age)
        if youngest.age <= request.age:
            raise refused
        self._responses.append(Response(youngest.id, refused))
        self.cancel(youngest.id)

    def extend(self, request_id: int, extension: Extend, now: int) -> None:
        """Add credit or a hint to a request; ignored if it is no longer active."""
        if (request := self._requests.get(request_id)) is not None:
            request.extend(extension, now)

    def cancel(self, request_id: int) -> None:
        """Give a request up: no response follows. Its session keeps its KV until the blocks are needed."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if self._takes_part(request):
            request.cancelled = True
            del self._requests[request_id]
        else:
            self._close(request)

    def expire(self, now: int) -> None:
        """Refuse the requests whose deadline passed before any work was done for them."""
        late = [
            request
            for request in self._requests.values()
            if request.message.deadline_ns is not None
            and request.message.deadline_ns <= now
            and not request.has_started
            and not self._takes_part(request)
        ]
        for request in late:
            self._respond(request, DeadlinePassed("the deadline passed before the work began"))

    def record_fed(self, key: SessionKey, kv_len: int, drafts: int) -> None:
        """Note what the engine fed for a session of the step in progress, where it decides that itself.

        It began after `kv_len` tokens: it may have found more in its cache than planned, or have lost KV that
        was planned with. It verified `drafts` draft tokens. Call it before `conclude`.
        """
        request = self._active[key]
        request.kv_len = kv_len
        if not request.has_started:  # what it finds again after a preemption is not counted again
            request.kv_reused = kv_len
        if self._batch is not None:
            self._batch.correct(key, drafts)

    def drain(self) -> None:
        """End every request with its next result from now on, whatever its credit."""
        self._draining = True

    def abandon(self, error: GalleyError) -> None:
        """Respond with `error` to all requests after a fault, and forget all KV. No step may be running."""
        self._responses += [Response(request_id, error) for request_id in self._requests]
        self._requests.clear()
        self._active.clear()
        self._arriving.clear()
        self._batch = None
        self._moves.clear()
        self.kv.clear()

    def _admit(self, request: ActiveRequest) -> None:
        """Make the request active for its session, if the cache holds the prefix that it names."""
        if (before := self._active.get(request.key)) is not None:
            self._respond(before, Superseded(before.position, before.prefix_hash()))
        message = request.message
        found = self.kv.look_up(request.key, message.start, message.tokens, message.prefix_hash)
        if isinstance(found, Miss):
            self.counts.missed += 1
            self._respond(request, found)
            return
        request.tokens = GrowingTokens([*self.kv.tokens_of(request.key)[: message.start], *message.tokens])
        request.block_hashes = message.block_hashes or self._hashes_before(request.key, message.start)
        request.grammar = self._grammars.follow(message, request.tokens)
        self._active[request.key] = request

    def _memory(self, message: VerifyRequest) -> SessionStatistics:
        # The draft tokens of audits are those of token logs, which say nothing of drafts.
        overall = None if message.priority == AUDIT_PRIORITY else self._overall
        return self._memories.get(message.key, lambda: SessionStatistics(overall))

    def _is_busy(self, key: SessionKey) -> bool:
        return self._batch is not None and key in self._batch.grants

    def _takes_part(self, request: ActiveRequest) -> bool:
        return self._is_busy(request.key) and self._active.get(request.key) is request

    def plan(self, now: int) -> StepPlan | Linger | None:
        """Begin and return the next step; or return until when to linger, or None if there is no work.

        To open or evict many long sessions takes several calls: until then, linger until `now`.
        """
        if self._batch is not None:
            raise Broken("scheduler: a step is in progress")
        most_moved = self.kv.moved + _MOST_MOVED
        while requests := self._opened(most_moved):
            if self.kv.moved >= most_moved:
                return Linger(now)
            for request in requests:
                request.update_hint()
            until_ns = self._lingering.until(requests, now)
            if until_ns is not None:
                return Linger(until_ns)
            self._turns.give(requests)
            granted = grant_rows(
                requests,
                self._times,
                self._max_rows,
                self._prefill,
                divides_prompts=self._divides_prompts,
            )
            if not self.kv.make_room({grant.request.key: grant.end for grant in granted}, most_moved):
                return Linger(now)
            grants, copies = self._reserve(granted)
            if grants:
                return self._begin(grants, copies, now)
        self._lingering.forget()
        return None

    def _opened(self, most_moved: int) -> list[ActiveRequest]:
        """Return the active requests, oldest first; open their blocks until `most_moved` is reached."""
        for request in sorted(self._active.values(), key=_age):
            if self.kv.moved >= most_moved:
                break
            # It may have been preempted for an older one meanwhile.
            if request.kv_len is None and self._active.get(request.key) is request:
                self._open(request)
        return sorted(self._active.values(), key=_age)

    def _open(self, request: ActiveRequest) -> None:
        """Open a session's blocks, in place of the youngest session's if no slot is left."""
        try:
            self._hold(request)
        except Overloaded as error:
            opened = (other for other in self._active.values() if other.kv_len is not None)
            youngest = max(opened, key=_age, default=request)
            if youngest.age <= request.age:
                self._respond(request, error)
                return
            self._preempt(youngest)
            self._hold(request)

    def _hold(self, request: ActiveRequest) -> None:
        """Allocate the session and find its cached tokens. Raises Overloaded."""
        message, request.is_new = request.message, not self.kv.has_blocks(request.key)
        request.kv_len = request.kv_reused = self.kv.open(
            request.key, message.arrival_ns, request.tokens, message.priority, request.block_hashes
        )

    def _reserve(self, requested: Sequence[Grant]) -> tuple[dict[SessionKey, Grant], list[tuple[int, int]]]:
        """Reserve blocks for the grants, oldest first; respond to the requests that get none."""
        grants: dict[SessionKey, Grant] = {}
        copies: list[tuple[int, int]] = []
        for grant in requested:
            request = grant.request
            if self._active.get(request.key) is not request:
                continue  # preempted by an older one
            try:
                granted, reservation = self._reserve_for(grant, grants)
            except Overloaded as error:
                self.counts.out_of_blocks += 1
                # Its computed KV stays until the blocks are needed; a retry continues from there.
                if request.has_started:
                    self._preempt(request)
                else:
                    self._respond(request, error)
                continue
            self.counts.out_of_blocks += len(reservation.preempted)
            for key in reservation.preempted:
                self._preempt(self._active[key])
            grants[request.key] = granted
            copies += reservation.copies
        return grants, copies

    def _preempt(self, request: ActiveRequest) -> None:
        """End the request with a cache miss that says how much of its prefix is still cached."""
        self._count_preempted(request)
        self._respond(request, self.kv.cached_prefix(request.key), preempted=True)

    def _count_preempted(self, request: ActiveRequest) -> None:
        self.counts.preempted += 1
        self._preempted.append(request.key[1])

    def _reserve_for(self, grant: Grant, busy: Container[SessionKey]) -> tuple[Grant, Reservation]:
        """Reserve blocks, without the draft tokens if only these do not fit. Raises Overloaded."""
        request = grant.request
        if grant.draft_tokens:
            try:
                return grant, self.kv.reserve(request.key, grant.end, busy)
            except Overloaded:
                grant = Grant(request, grant.rows)
        return grant, self.kv.reserve(request.key, grant.end, busy)

    def _begin(
        self, grants: dict[SessionKey, Grant], copies: Sequence[tuple[int, int]], now: int
    ) -> StepPlan:
        requests = [grant.request for grant in grants.values()]
        if not self._divides_prompts:
            self._start(requests, now)
        self.counts.linger_ns += self._lingering.waited_ns
        for request in requests:
            request.linger_ns += self._lingering.waited_ns
        chunks = tuple(self._chunk(grant, self.kv.blocks_of(key)) for key, grant in grants.items())
        plan = StepPlan(chunks, tuple(copies), tuple(self._moves))
        self._moves.clear()
        preempted, evicted = tuple(self._preempted), self.kv.take_evicted()
        self._batch = ActiveBatch(plan, grants, now, preempted, evicted)
        self._preempted.clear()
        return plan

    def _start(self, requests: Sequence[ActiveRequest], now: int) -> None:
        """Note that a step, which began at `now`, fed these requests; cancelled ones are not counted."""
        self.queue_times_ns = [
            now - request.arrived_ns
            for request in requests
            if not request.has_started and not request.cancelled
        ]
        for request in requests:
            if request.is_new and not request.has_started:
                self.counts.prompt_tokens += len(request.tokens)
                self.counts.reused_tokens += request.kv_reused
            request.has_started = True

    def _chunk(self, grant: Grant, blocks: Sequence[int]) -> StepChunk:
        """Return the chunk of the granted rows, which draws after the last if they reach the position."""
        request, message, drafts = grant.request, grant.request.message, grant.draft_tokens
        start = request.kv_len or 0
        tokens: Sequence[int] = TokenRange(request.tokens, start, start + grant.rows, drafts)
        if not self._divides_prompts:  # else whole prompts would be copied in each step
            tokens = tokens[:]
        if not grant.is_final:
            return StepChunk(start, tokens, blocks, want_logits=0, key=request.key)
        certain, drawn, parents = drafts[: grant.certain], drafts[grant.certain :], grant.drawn_parents
        history: Sequence[int] = request.tokens
        if certain:
            history = TokenRange(history, 0, len(history), certain)
        draw = Draw(
            params=message.sampling,
            history=history,
            prompt_len=message.prompt_len,
            stop_token_ids=message.stop_token_ids,
            min_tokens=message.min_tokens,
            draft_tokens=drawn,
            parents=parents,
            logprobs=message.logprobs,
            grammar=None if request.grammar is None else request.grammar.state,
        )
        layers = message.feature_layers
        feature_rows = _feature_rows(grant) if layers else 0
        return StepChunk(
            start, tokens, blocks, 1 + len(drawn), draw, request.key, parents, layers, feature_rows
        )

    def conclude(
        self, plan: StepPlan, outcomes: Sequence[StepOutcome], now: int, batch_span: bytes = b""
    ) -> BatchInfo:
        """End the step: confirm, cut and respond. Return what it was, with the rows that the engine fed.

        Raise Broken unless `outcomes` fit the step in progress.
        """
        done = self._end(plan)
        if len(outcomes) != len(plan.chunks):
            raise Broken(f"scheduler: a step of {len(plan.chunks)} chunks had {len(outcomes)} outcomes")
        done.settle(outcomes)
        took_ns = now - done.started_ns
        shared = done.record(self._times, self._prefill, took_ns, batch_span)
        if self._divides_prompts:  # only now is it known which requests the engine fed
            self._start(done.fed_requests, done.started_ns)
        for request in done.fed_requests:
            request.compute_ns += took_ns
        for grant, outcome in zip(done.grants.values(), outcomes, strict=True):
            self._settle(grant, _with_certain(grant, outcome), shared, now)
        self._admit_arrived(done)
        return done.info(self.kv.free, self.queue_depth)

    def fail(self, plan: StepPlan, error: GalleyError) -> None:
        """End a step that failed: its sessions get `error` and keep the KV that they had before it.

        Blocks within which it was to move tokens are forgotten.
        """
        done = self._end(plan)
        for grant in done.grants.values():
            self._respond(grant.request, error)
        if plan.moves:
            self.kv.distrust({move.to_block for move in plan.moves})
            for request in self._active.values():
                if request.kv_len is not None:
                    request.kv_len = min(request.kv_len, len(self.kv.tokens_of(request.key)))
        self._admit_arrived(done)

    def _end(self, plan: StepPlan) -> ActiveBatch:
        done = self._batch
        if done is None or done.plan is not plan:
            raise Broken("scheduler: this step is not in progress")
        self._batch = None
        return done

    def _admit_arrived(self, done: ActiveBatch) -> None:
        for key in done.grants:
            for request in self._arriving.pop(key, ()):
                self._admit(request)

    def _settle(self, grant: Grant, outcome: StepOutcome, shared: BatchTimes, now: int) -> None:
        """Handle one session's outcome. After an error, only that session loses what was computed."""
        request = grant.request
        if grant.is_final and (outcome is None or (isinstance(outcome, Sampled) and not outcome.tokens)):
            outcome = Broken("the engine drew no token where the plan has one")
        if isinstance(outcome, Computed) and not 0 <= outcome.kv_len < request.position:
            outcome = Broken(
                f"the engine computed {outcome.kv_len} of {request.position} tokens, drawing none"
            )
        if isinstance(outcome, GalleyError):
            self._grammars.forget(request.key)
            self._respond(request, outcome)
            return
        if isinstance(outcome, Sampled) and grant.is_final and not request.cancelled:
            self._confirm(grant, outcome, shared, now)
            return
        # Part of a prompt, or the tokens of a cancelled request: only their KV is kept.
        start = request.kv_len or 0
        length = outcome.kv_len if isinstance(outcome, Computed) else start + grant.rows
        if length < start:  # the engine preempted it, and goes on with it once there is room
            self.counts.out_of_blocks += 1
            self._count_preempted(request)
        self._computed(request, length)
        if request.cancelled:
            self._close(request)

    def _computed(self, request: ActiveRequest, length: int) -> None:
        self.kv.append_computed(request.key, request.tokens[request.kv_len or 0 : length])
        self.kv.truncate(request.key, length)
        request.kv_len = length

    def _confirm(self, grant: Grant, sampled: Sampled, shared: BatchTimes, now: int) -> None:
        request, message, position = grant.request, grant.request.message, grant.request.position
        verdict = confirm(
            grant.draft_tokens,
            sampled.tokens,
            parents=grant.parents,
            position=position,
            max_position=message.max_position,
            stop_token_ids=message.stop_token_ids,
            output_len=position - message.prompt_len,
            min_tokens=message.min_tokens,
        )
        queue_ns, compute_ns, linger_ns = request.confirm(verdict.tokens, now)
        is_over = self._draining or message.credit == 0 or request.position >= request.limit
        # The last confirmed token has no KV yet: the next step feeds it.
        if grant.parents:
            self._compact(grant, position, verdict.tokens[:-1])
        self._computed(request, len(request.tokens) - 1)
        self._respond(
            request,
            Confirmed(
                position=position,
                tokens=verdict.tokens,
                accepted=verdict.accepted,
                verified=_verified(grant, sampled.tokens),
                logprobs=sampled.logprobs[: len(verdict.tokens)],
                kv_len=len(request.tokens) - 1,
                batch_sessions=shared.sessions,
                more=not (is_over or verdict.stopped),
                queue_ns=queue_ns,
                compute_ns=compute_ns,
                linger_ns=linger_ns,
                row_ns=shared.row_ns,
                prefill_ns=shared.prefill_ns,
                plain_ns=max(0, compute_ns - shared.drafts_ns),
                batch_rows=shared.rows,
                kv_reused=request.take_reused(),
                batch_span=shared.span,
                states=self._states(request, sampled, position, len(verdict.tokens)),
            ),
        )

    def _states(self, request: ActiveRequest, sampled: Sampled, position: int, confirmed: int) -> States:
        """Return the states of the tokens before the last of the `confirmed` ones from `position` on."""
        if not sampled.states:
            return NO_STATES
        each = state_bytes(len(request.message.feature_layers), self.feature_size)
        tokens = len(sampled.states) // each
        drawn = States(position + len(sampled.tokens) - 1 - tokens, tokens, sampled.states)
        end = position + confirmed - 1
        return drawn.until(end).since(end - MAX_FEATURE_TOKENS)

    def _compact(self, grant: Grant, root: int, computed: Sequence[int]) -> None:
        """Have the KV of these tokens, which follow `root`, moved to where it belongs by the next step."""
        path = follow(grant.draft_tokens, grant.parents, computed)
        blocks = self.kv.blocks_of(grant.request.key)
        self._moves += compaction(blocks, self.kv.block_tokens, root, path)

    def _respond(self, request: ActiveRequest, outcome: Outcome, *, preempted: bool = False) -> None:
        """Add a response unless the request was cancelled; close the request unless more follows."""
        answer = Response(request.id, outcome, preempted)
        if not request.cancelled:
            self._responses.append(answer)
        if answer.is_last:
            self._close(request)

    def _close(self, request: ActiveRequest) -> None:
        self._requests.pop(request.id, None)
        if request in (arriving := self._arriving.get(request.key, [])):
            arriving.remove(request)
        if self._active.get(request.key) is request:
            del self._active[request.key]
            self.kv.make_idle(request.key)


def _with_certain(grant: Grant, outcome: StepOutcome) -> StepOutcome:
    """Return the outcome with the tokens that were not drawn before it.

    An error is that of the token after them: it comes again in the next step, as without draft tokens.
    """
    certain = grant.draft_tokens[: grant.certain]
    if certain and isinstance(outcome, GalleyError):
        return Sampled(certain)
    if certain and isinstance(outcome, Sampled) and outcome.tokens:
        return Sampled((*certain, *outcome.tokens), states=outcome.states)
    return outcome


def _feature_rows(grant: Grant) -> int:
    """Return of how many last rows to take states: all draft rows, and as many before as a message has."""
    drafts = len(grant.draft_tokens)
    return drafts + min(grant.rows, max(1, MAX_FEATURE_TOKENS - drafts))


def _verified(grant: Grant, tokens: tuple[int, ...]) -> int:
    """Return how many draft tokens were verified: all, or those of a chain before the first bad logits."""
    drafts = grant.draft_tokens
    return len(tokens) if tokens == drafts[: len(tokens)] and not grant.parents else len(drafts)
