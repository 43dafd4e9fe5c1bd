"""Gateway, draft pool and target on virtual time: real session machines, a real scheduler, given costs.

A scenario determines, by session and position, which draft tokens are right; the machines do not know it, and
it may drift. Tokens after a wrong one in the same proposal are wrong too. The draft computes in parallel with
the target: in a step a token of each of its sessions, or the nodes of a tree for one position. Messages take
a given time. Where both share cores, the draft's work slows the target's.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from galley.core.answer.answer import Answer, SessionSpec
from galley.core.content import prefix_hash
from galley.core.cost.model import StepTimes
from galley.core.kv.table import KvTable
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Confirmed, Extend, VerifyRequest
from galley.core.scheduler.scheduler import Linger, Scheduler
from galley.core.session import events as ev
from galley.core.session.draft_statistics import SharedStatistics
from galley.core.session.machine import Session, SessionLimits
from galley.core.session.sources import LocalSources
from galley.core.step import StepPlan
from galley.core.trees import CHAIN, MAX_WIDTH, ROOT, depths, simplified
from tests.fakes.engine import StrictEngine

MS = 1_000_000
_VOCAB = 1 << 16
_BLOCK = 32
_COMMIT_NS = 200_000
_MAX_LINGER_NS = 50 * MS
_CONTENTION_NS = 1000
"""A step ends if the draft has taken less than this from it."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`alpha(i)` is the chance that output token i is drafted right, `draft_ns(n)` the step of n sessions.

    Each stream has several `answers`, one after the other, whose tokens `alpha` counts through; each is a new
    session of a new workload. The draft reads a prompt token in `read_ns`. A nanosecond of its work takes
    `contention` of one from a step of the target. `sources` makes the session's own ones from its output.
    `side` is the chance that the next candidate for a position is right if all before it are wrong; None: the
    draft makes no trees. `width` is that of the requests.
    """

    alpha: Callable[[int], float]
    times: StepTimes
    draft_ns: Callable[[int], int]
    sessions: int = 1
    tokens: int = 400
    hop_ns: int = 200_000
    credit: int = 32
    seed: int = 1
    copies: bool = False
    most: int = 64
    prompt: int = 4
    answers: int = 1
    read_ns: int = 0
    contention: float = 0.0
    side: float | None = None
    width: int = 0
    sources: Callable[[Sequence[int]], LocalSources | None] = lambda output: None


@dataclass(frozen=True, slots=True)
class _Shape:
    """The nodes of the best tree: their parents, ranks among their siblings, and survival."""

    parents: list[int]
    ranks: list[int]
    survival: list[float]

    @property
    def depths(self) -> list[int]:
        return depths(self.parents, len(self.parents))

    @classmethod
    def best(cls, alpha: float, side: float, width: int, count: int) -> _Shape:
        chances = [alpha, *((1 - alpha) * side * (1 - side) ** rank for rank in range(width - 1))]
        shape = cls([], [], [])
        ready = [(-chance, ROOT, rank) for rank, chance in enumerate(chances)]
        heapq.heapify(ready)
        for node in range(count):
            negative, parent, rank = heapq.heappop(ready)
            shape.parents.append(parent)
            shape.ranks.append(rank)
            shape.survival.append(-negative)
            for further, chance in enumerate(chances):
                heapq.heappush(ready, (negative * chance, node, further))
        return shape


@dataclass(slots=True)
class _Job:
    stream: _Stream
    asked: ev.Propose
    tokens: list[int] = field(default_factory=list)
    compute_ns: int = 0
    shared: int = 0
    steps: int = 0
    tree: _Shape | None = None

    def advance(self) -> bool:
        """Draft a token, or the nodes of a tree for one position; return True if that was the last."""
        self.steps += 1
        if self.tree is not None:
            return self.steps > max(self.tree.depths)
        self.tokens.append(self.stream.guess(self))
        return len(self.tokens) >= min(self.asked.k, self.stream.pool.scenario.most)

    def read(self) -> int:
        """Read what the draft lacks; return how many tokens that is beside the last, which a step feeds."""
        stream, sent = self.stream, self.asked.slice
        before, stream.read_to = stream.read_to, sent.start + len(sent.tokens) + len(self.tokens)
        return max(0, stream.read_to - before - 1)


class _Stream:
    def __init__(self, pool: Pool, index: int, k: int, *, auto: bool) -> None:
        self.pool = pool
        self.item: int | None = None
        self.request_id = 0
        self.job: _Job | None = None
        self.ended_ns = 0
        self.read_to = 0
        self.answers = pool.scenario.answers
        self.sessions: list[Session] = []
        self._index, self._k, self._auto = index, k, auto

    @property
    def session(self) -> Session:
        return self.sessions[-1]

    def start(self) -> None:
        """Start the next answer."""
        scenario, answer = self.pool.scenario, len(self.sessions)
        name = f"s{self._index}" if self.answers == 1 else f"s{self._index}-{answer}"
        chance = random.Random(f"{scenario.seed}{name}")
        number = len(self.pool.truths)
        spec = SessionSpec(
            name,
            (*range(1, scenario.prompt), number),
            SamplingParams(),
            scenario.prompt + scenario.tokens,
            _VOCAB,
            k=self._k,
            auto=self._auto,
            width=self.pool.scenario.width,
            workload="" if self.answers == 1 else name,
        )
        self.read_to = 0
        self.truth = [*spec.prompt, *(chance.randrange(1, _VOCAB) for _ in range(scenario.tokens))]
        first = answer * scenario.tokens - scenario.prompt
        self.right = [chance.random() < scenario.alpha(first + i) for i in range(len(self.truth))]
        self.ranks = [0 if right else self._side_rank(chance) for right in self.right]
        self.pool.truths[number] = self.truth
        self.sessions.append(
            Session(
                Answer(spec, lambda tokens: "x" * len(tokens)),
                SessionLimits(credit=scenario.credit, buffer=scenario.tokens),
                shared=self.pool.book,
                sources=scenario.sources(self.truth[scenario.prompt :]),
            )
        )
        self._carry_out(self.session.start(self.pool.now))

    def _side_rank(self, chance: random.Random) -> int | None:
        side = self.pool.scenario.side
        if side is None:
            return None
        return next((rank for rank in range(1, MAX_WIDTH) if chance.random() < side), None)

    def handle(self, event: ev.Event) -> None:
        self._carry_out(self.session.step(event, now=self.pool.now))

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        pool = self.pool
        for effect in effects:
            match effect:
                case ev.Propose():
                    pool.proposals_ns.append(pool.now)
                    self.job = _Job(self, effect)
                    pool.later(pool.scenario.hop_ns, self._to_draft, self.job)
                case ev.CancelPropose():
                    pool.drop(self.job)
                    self.job = None
                case ev.Verify() | ev.ExtendVerify() | ev.CancelVerify():
                    pool.later(pool.scenario.hop_ns, pool.to_target, self, effect)
                case ev.Commit():
                    length = effect.expected_len + len(effect.tokens)
                    pool.later(_COMMIT_NS, self.handle, ev.Committed(length))
                case ev.Emit():
                    pool.later(0, self.handle, ev.Sent(effect.end))
                case ev.StoreFinish():
                    pool.later(_COMMIT_NS, self.handle, ev.FinishStored())
                case ev.End():
                    assert effect.error is None, effect.error
                    assert self.session.answer.tokens == self.truth
                    if len(self.sessions) < self.answers:
                        pool.later(0, self.start)
                    else:
                        self.ended_ns = pool.now

    def _to_draft(self, job: _Job) -> None:
        if job is self.job:
            scenario, width = self.pool.scenario, job.asked.width
            if scenario.side is not None and width > 1:
                alpha = sum(self.right) / len(self.right)
                job.tree = _Shape.best(alpha, scenario.side, width, min(job.asked.k, scenario.most))
            self.pool.draft(job)

    def _nodes(self, job: _Job, tree: _Shape) -> list[int]:
        """Return the tokens of the nodes of a tree."""
        request = job.asked
        before = request.slice.start + len(request.slice.tokens)
        is_right = [list(request.slice.tokens) == self.truth[request.slice.start : before]]
        tokens: list[int] = []
        for parent, rank, depth in zip(tree.parents, tree.ranks, tree.depths, strict=True):
            position = before + depth
            true = self.truth[position] if position < len(self.truth) else 0
            right = is_right[parent + 1] and position < len(self.truth) and self.ranks[position] == rank
            is_right.append(right)
            tokens.append(true if right else (true + 1 + rank) % _VOCAB)
        return tokens

    def guess(self, job: _Job) -> int:
        request = job.asked
        known = [*request.slice.tokens, *job.tokens]
        position = request.slice.start + len(known)
        if position >= len(self.truth):
            return 0
        whole = self.pool.scenario.copies or known == self.truth[request.slice.start : position]
        return self.truth[position] if whole and self.right[position] else 0

    def proposed(self, job: _Job) -> None:
        if job is not self.job:
            return
        self.job = None
        request = job.asked
        tokens = [*self.truth[: request.slice.start], *request.slice.tokens]
        tree, drafted, parents = job.tree, job.tokens, CHAIN
        if tree is not None:
            drafted, parents = self._nodes(job, tree), simplified(tree.parents)
        self.handle(
            ev.Proposed(
                request_id=request.request_id,
                position=len(tokens),
                prefix_hash=prefix_hash(tokens),
                tokens=tuple(drafted),
                cache_len=len(tokens),
                timing=ev.Timing(0, job.compute_ns),
                survival=() if tree is None else tuple(tree.survival),
                sessions=round(job.shared / job.steps),
                max_tokens=self.pool.scenario.most,
                parents=parents,
            )
        )


class _Engine(StrictEngine):
    def __init__(self, pool: Pool) -> None:
        super().__init__(kv_block_tokens=_BLOCK)
        self._pool = pool

    def token(self, seed: int, position: int, history: Sequence[int]) -> int:
        truth = self._pool.truths[history[self._pool.scenario.prompt - 1]]
        return truth[min(position, len(truth) - 1)]


class Pool:
    """All streams of a scenario; proposals were requested at `proposals_ns`."""

    def __init__(self, scenario: Scenario, k: int, *, auto: bool) -> None:
        self.scenario = scenario
        self.now = 0
        self.proposals_ns: list[int] = []
        self.truths: dict[int, list[int]] = {}
        self.book = SharedStatistics()
        self.book.contention = scenario.contention
        self._order = count()
        self._events: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        blocks = scenario.sessions * (2 + (scenario.prompt + scenario.tokens) // _BLOCK + 4)
        self._engine = _Engine(self)
        table = KvTable(blocks, _BLOCK, max_sessions=scenario.sessions)
        self._scheduler = Scheduler(table, scenario.times, max_linger_ns=_MAX_LINGER_NS)
        self._scheduler.takes_trees = True
        self._by_item: dict[int, _Stream] = {}
        self._passing = False
        self._linger = 0
        self._jobs: list[_Job] = []
        self._drafting = False
        self._draft_since_ns = self._drafted_ns = 0
        self.streams = [_Stream(self, i, k, auto=auto) for i in range(scenario.sessions)]

    def goodput(self) -> float:
        for stream in self.streams:
            stream.start()
        while self._events:
            self.now, _, call, args = heapq.heappop(self._events)
            call(*args)
        assert all(stream.ended_ns for stream in self.streams), "a session never ended"
        total = sum(session.answer.output_len for stream in self.streams for session in stream.sessions)
        return total / max(stream.ended_ns for stream in self.streams) * 1e9

    def later(self, delay_ns: int, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (self.now + delay_ns, next(self._order), call, args))

    def draft(self, job: _Job) -> None:
        self._jobs.append(job)
        if not self._drafting:
            self._draft_step()

    def drop(self, job: _Job | None) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    @property
    def draft_busy_ns(self) -> int:
        """Return how long the draft has worked."""
        return self._drafted_ns + (self.now - self._draft_since_ns if self._drafting else 0)

    def _draft_step(self) -> None:
        jobs = list(self._jobs)
        self._drafting, self._draft_since_ns = bool(jobs), self.now
        if jobs:
            unread = sum(job.read() for job in jobs)
            took_ns = self.scenario.draft_ns(len(jobs)) + unread * self.scenario.read_ns
            self.later(took_ns, self._drafted, jobs, took_ns)

    def _drafted(self, jobs: list[_Job], took_ns: int) -> None:
        self._drafted_ns += took_ns
        self._drafting = False
        for job in jobs:
            job.compute_ns += took_ns
            job.shared += len(jobs)
            if job.advance():
                self.drop(job)
                self.later(self.scenario.hop_ns, job.stream.proposed, job)
        self._draft_step()

    def to_target(self, stream: _Stream, effect: ev.Verify | ev.ExtendVerify | ev.CancelVerify) -> None:
        match effect:
            case ev.Verify():
                stream.request_id = effect.request_id
                stream.item = self._scheduler.submit(self._request(stream, effect), self.now)
                self._by_item[stream.item] = stream
            case ev.ExtendVerify() if stream.item is not None:
                extension = Extend(effect.limit, effect.hint, effect.hint_due)
                self._scheduler.extend(stream.item, extension, self.now)
            case ev.CancelVerify() if stream.item is not None:
                self._scheduler.cancel(stream.item)
        self._plan()

    def _request(self, stream: _Stream, request: ev.Verify) -> VerifyRequest:
        spec = stream.session.spec
        return VerifyRequest(
            key=(b"", spec.session_id),
            start=request.slice.start,
            tokens=request.slice.tokens,
            prefix_hash=request.slice.prefix_hash,
            prompt_len=self.scenario.prompt,
            max_position=spec.max_position,
            sampling=spec.sampling,
            draft_tokens=request.draft_tokens,
            survival=request.survival,
            credit=request.credit,
            hint_due=request.hint_due,
            max_verified=request.max_verified,
            parents=request.parents,
        )

    def _plan(self) -> None:
        if self._passing:
            return
        plan = self._scheduler.plan(self.now)
        if isinstance(plan, Linger):
            self._linger = plan.until_ns
            self.later(max(0, plan.until_ns - self.now), self._lingered, plan.until_ns)
        elif plan is not None:
            self._passing = True
            due_ns = self.now + self.scenario.times(plan.rows)
            self.later(due_ns - self.now, self._step, plan, due_ns, self.draft_busy_ns)
        self._answer()

    def _lingered(self, until_ns: int) -> None:
        if until_ns == self._linger:
            self._plan()

    def _step(self, plan: StepPlan, due_ns: int, busy_before_ns: int) -> None:
        """End the step, or later by what the draft has taken from it since it began."""
        late_ns = int(self.scenario.contention * (self.draft_busy_ns - busy_before_ns)) + due_ns - self.now
        if late_ns > _CONTENTION_NS:
            self.later(late_ns, self._step, plan, due_ns, busy_before_ns)
        else:
            self._passed(plan)

    def _passed(self, plan: StepPlan) -> None:
        self._passing = False
        self._scheduler.conclude(plan, self._engine.run(plan), self.now)
        self._answer()
        self._plan()

    def _answer(self) -> None:
        for answer in self._scheduler.take_responses():
            stream = self._by_item[answer.request_id]
            outcome = answer.outcome
            assert isinstance(outcome, Confirmed), outcome
            if answer.is_last:
                stream.item = None
            self.later(
                self.scenario.hop_ns,
                stream.handle,
                ev.Verified(
                    request_id=stream.request_id,
                    position=outcome.position,
                    tokens=outcome.tokens,
                    accepted=outcome.accepted,
                    verified=outcome.verified,
                    cache_len=outcome.kv_len,
                    fingerprint="f",
                    timing=ev.Timing(outcome.queue_ns, outcome.compute_ns, outcome.linger_ns),
                    more=outcome.more,
                    sessions=outcome.batch_sessions,
                    row_ns=outcome.row_ns,
                    prefill_ns=outcome.prefill_ns,
                ),
            )
