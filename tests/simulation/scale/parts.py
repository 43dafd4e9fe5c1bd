"""Targets, drafts and cores of a fleet on virtual time: real schedulers over given costs.

Each session's answer is known beforehand, and so is which of its tokens a draft proposes right.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from galley.core.content import prefix_hash
from galley.core.cost.model import StepTimes
from galley.core.kv.table import KvTable
from galley.core.routing.choice import DraftLease, TargetLease
from galley.core.scheduler.messages import Confirmed, Extend, VerifyRequest
from galley.core.scheduler.scheduler import Linger, Scheduler
from galley.core.session import events as ev
from galley.core.step import Sampled, StepChunk, StepOutcome, StepPlan

if TYPE_CHECKING:
    from tests.simulation.scale.fleet import Stream

VOCAB = 1 << 16
HOP_NS = 200_000
BLOCK_TOKENS = 32
WRONG = 0
"""A token that no answer has."""
_MAX_LINGER_NS = 50_000_000
_MODEL = {"incarnation": "1", "model": "m", "tokenizer_hash": "t", "vocab_size": VOCAB}


class Events:
    """What happens next, in the order of time and then of its making; `now` in nanoseconds."""

    def __init__(self) -> None:
        self.now = 0
        self._order = count()
        self._heap: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, when: int, call: Callable[..., object], *args: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._order), call, args))

    def later(self, delay_ns: int, call: Callable[..., object], *args: Any) -> None:
        self.at(self.now + delay_ns, call, *args)

    def run(self) -> None:
        """Run until nothing is left to happen."""
        while self._heap:
            self.now, _, call, args = heapq.heappop(self._heap)
            call(*args)


class Core:
    """One core that does one thing after the other; `busy_ns` is what it has done."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._free_at = 0
        self.busy_ns = 0.0

    def work(self, cost_ns: float) -> int:
        """Take `cost_ns` once all before it is done; return when that will be."""
        self.busy_ns += cost_ns
        self._free_at = max(self._free_at, self._events.now) + round(cost_ns)
        return self._free_at

    def do(self, cost_ns: float, call: Callable[..., object], *args: Any) -> None:
        self._events.at(self.work(cost_ns), call, *args)


@dataclass(frozen=True, slots=True)
class Costs:
    """The times of replicas; `draft_ns` is a draft's step of so many sessions."""

    times: StepTimes
    draft_ns: Callable[[int], int]
    kv_tokens: int
    max_sessions: int
    max_rows: int


class Target:
    """A target replica: the real scheduler, and an engine that knows the answers."""

    def __init__(self, events: Events, costs: Costs, address: str) -> None:
        self.address = address
        self.busy_ns = 0
        self._events = events
        self._costs = costs
        self._table = KvTable(costs.kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS, costs.max_sessions)
        self._scheduler = Scheduler(
            self._table, costs.times, max_rows=costs.max_rows, max_linger_ns=_MAX_LINGER_NS
        )
        self._streams: dict[int, Stream] = {}
        self._by_key: dict[str, Stream] = {}
        self._stepping = False
        self._linger_ns = 0

    def lease(self) -> TargetLease:
        return TargetLease(
            address=self.address,
            fingerprint="f",
            context_window=VOCAB,
            kv_block_tokens=BLOCK_TOKENS,
            kv_blocks_total=self._table.total,
            kv_blocks_free=self._table.free,
            queue_depth=self._scheduler.queue_depth,
            **_MODEL,  # type: ignore[arg-type]  # a mapping of several types
        )

    def receive(self, stream: Stream, effect: ev.Verify | ev.ExtendVerify | ev.CancelVerify) -> None:
        match effect:
            case ev.Verify():
                item = self._scheduler.submit(_request(stream, effect), self._events.now)
                self._streams[item] = self._by_key[stream.name] = stream
                stream.items[effect.request_id] = item
            case ev.ExtendVerify() if (item_id := stream.items.get(effect.request_id)) is not None:
                extension = Extend(effect.limit, effect.hint, effect.hint_due)
                self._scheduler.extend(item_id, extension, self._events.now)
            case ev.CancelVerify() if (item_id := stream.items.pop(effect.request_id, None)) is not None:
                self._scheduler.cancel(item_id)
                self._streams.pop(item_id, None)
        self._plan()

    def forget(self, stream: Stream) -> None:
        self._by_key.pop(stream.name, None)

    def _plan(self) -> None:
        if self._stepping:
            return
        plan = self._scheduler.plan(self._events.now)
        if isinstance(plan, Linger):
            self._linger_ns = plan.until_ns
            self._events.at(max(self._events.now, plan.until_ns), self._lingered, plan.until_ns)
        elif plan is not None:
            self._stepping = True
            took_ns = self._costs.times(plan.rows)
            self.busy_ns += took_ns
            self._events.later(took_ns, self._stepped, plan)
        self._respond()

    def _lingered(self, until_ns: int) -> None:
        if until_ns == self._linger_ns:
            self._plan()

    def _stepped(self, plan: StepPlan) -> None:
        self._stepping = False
        outcomes = [self._outcome(chunk) for chunk in plan.chunks]
        self._scheduler.conclude(plan, outcomes, self._events.now)
        self._respond()
        self._plan()

    def _outcome(self, chunk: StepChunk) -> StepOutcome:
        if chunk.draw is None:
            return None
        truth, drafts = self._by_key[chunk.key[1]].truth, chunk.draw.draft_tokens
        first = len(chunk.draw.history)
        count = 0
        while count < len(drafts) and first + count < len(truth) and drafts[count] == truth[first + count]:
            count += 1
        tokens = truth[first : first + count + 1] or [WRONG + 1]
        return Sampled(tuple(tokens))

    def _respond(self) -> None:
        for response in self._scheduler.take_responses():
            stream = self._streams[response.request_id]
            if response.is_last:
                del self._streams[response.request_id]
            self._events.later(HOP_NS, stream.verified, response)


def _request(stream: Stream, verify: ev.Verify) -> VerifyRequest:
    spec = stream.session.spec
    return VerifyRequest(
        key=(b"", spec.session_id),
        start=verify.slice.start,
        tokens=verify.slice.tokens,
        prefix_hash=verify.slice.prefix_hash,
        prompt_len=len(spec.prompt),
        max_position=spec.max_position,
        sampling=spec.sampling,
        draft_tokens=verify.draft_tokens,
        survival=verify.survival,
        credit=verify.credit,
        hint_due=verify.hint_due,
        max_verified=verify.max_verified,
        arrival_ns=stream.began_ns,
    )


def verified_event(request_id: int, outcome: Confirmed) -> ev.Verified:
    return ev.Verified(
        request_id=request_id,
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
        plain_ns=outcome.plain_ns,
    )


@dataclass(eq=False, slots=True)
class Job:
    """A proposal that is being drafted."""

    stream: Stream
    request: ev.Propose
    tokens: list[int] = field(default_factory=list)
    compute_ns: int = 0
    sessions: int = 0


class Draft:
    """A draft replica: each step drafts a token of each of its jobs."""

    def __init__(self, events: Events, costs: Costs, address: str) -> None:
        self.address = address
        self.busy_ns = 0
        self.homes = 0
        self._events = events
        self._costs = costs
        self._jobs: dict[int, Job] = {}
        self._stepping = False

    def lease(self) -> DraftLease:
        return DraftLease(
            address=self.address,
            strategies=("any",),
            queue_depth=len(self._jobs),
            sessions=self.homes,
            **_MODEL,  # type: ignore[arg-type]  # a mapping of several types
        )

    def receive(self, job: Job) -> None:
        if job.stream.job is job:  # else cancelled on the way
            self._jobs[id(job)] = job
            if not self._stepping:
                self._step()

    def drop(self, job: Job) -> None:
        self._jobs.pop(id(job), None)

    def _step(self) -> None:
        jobs = deque(self._jobs.values())
        self._stepping = bool(jobs)
        if jobs:
            took_ns = self._costs.draft_ns(len(jobs))
            self.busy_ns += took_ns
            self._events.later(took_ns, self._stepped, jobs, took_ns)

    def _stepped(self, jobs: deque[Job], took_ns: int) -> None:
        for job in jobs:
            job.tokens.append(job.stream.guess(job))
            job.compute_ns += took_ns
            job.sessions += len(jobs)
            if len(job.tokens) >= job.request.k:
                self.drop(job)
                self._events.later(HOP_NS, job.stream.proposed, job)
        self._step()


def proposed_event(job: Job) -> ev.Proposed:
    part = job.request.slice
    tokens = [*job.stream.truth[: part.start], *part.tokens]
    return ev.Proposed(
        request_id=job.request.request_id,
        position=len(tokens),
        prefix_hash=prefix_hash(tokens),
        tokens=tuple(job.tokens),
        cache_len=len(tokens),
        timing=ev.Timing(0, job.compute_ns),
        sessions=max(1, round(job.sessions / len(job.tokens))),
        strategy="any",
    )
