"""A slow round, the medians of the other rounds of its story, and the rules that find its cause.

A rule checks one cause in the parts of a round that it can explain. It returns a clause with its numbers,
or an empty string. The first rule that applies gives the cause.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from galley.common.printable import one_line
from galley.core import names
from galley.trace.read.model import COMMIT, Request, Round, Story
from galley.trace.read.spans import Event
from galley.trace.show.summary import count, ms, percent

Interval = tuple[int, int]

# The least share of the lost time that a cause must account for.
_SHARE = 0.5
# A cache that lacks fewer tokens than one KV block is not cold.
_COLD_TOKENS = 32
# Prompts of other sessions make a step slow from this share of its rows on.
_PREFILL_SHARE = 0.25
# A step is full from this number of sessions on.
_FULL_SESSIONS = 4
# Steps are alike if the larger has at most this multiple of the other's rows; fewer have no usual time.
_ALIKE = 1.25
_FEW_STEPS = 3
# A step is slower than usual from this multiple of the usual time on.
_SLOW_STEP = 1.5
# A rank holds up a step if it takes this multiple of the others' median.
_RANK_SKEW = 1.5


class Part(enum.Enum):
    """The parts of the time that a client waits for a round's tokens."""

    BEFORE = "before"
    DRAFT = "draft"
    QUEUE = "queue"
    COMPUTE = "compute"
    WIRE = "wire"
    LOG = "log"


def times_of(one: Round) -> Mapping[Part, int]:
    return {
        Part.BEFORE: one.idle_ns,
        Part.DRAFT: one.parts.draft_ns,
        Part.QUEUE: one.parts.queue_ns,
        Part.COMPUTE: one.parts.compute_ns,
        Part.WIRE: one.parts.wire_ns,
        Part.LOG: one.commit_ns,
    }


@dataclass(frozen=True, slots=True)
class Medians:
    """Medians over rounds, in nanoseconds; 0 without rounds."""

    felt_ns: float = 0.0
    parts: Mapping[Part, float] = field(default_factory=lambda: dict.fromkeys(Part, 0.0))
    rounds: int = 0


def medians_of(rounds: Collection[Round]) -> Medians:
    if not rounds:
        return Medians()
    times = [times_of(one) for one in rounds]
    parts = {part: median(of_round[part] for of_round in times) for part in Part}
    return Medians(median(one.felt_ns for one in rounds), parts, len(rounds))


@dataclass(frozen=True, slots=True)
class Case:
    """A round to explain. `medians` are those of the other rounds, or 0 if it is not slow beside them."""

    story: Story
    request: Request
    round: Round
    medians: Medians

    @property
    def part(self) -> Part:
        """Return the part that exceeds its median by most; the first if several do."""
        times = times_of(self.round)
        return max(Part, key=lambda part: times[part] - self.medians.parts[part])

    @property
    def lost_ns(self) -> int:
        """Return the whole time of `part`, in nanoseconds."""
        return times_of(self.round)[self.part]

    def last_event(self, name: str, pool: str = "") -> Event | None:
        matches = (
            e for e in reversed(self.round.events) if e.name == name and pool in ("", e.text(names.POOL))
        )
        return next(matches, None)

    @property
    def is_evicted(self) -> bool:
        """Return True if other sessions took the session's KV blocks before this round ended."""
        events = (event for request in self.story.requests for event in request.all_events)
        return any(e.name == names.KV_EVICTED and e.time_ns <= self.round.span.end_ns for e in events)

    def stalled_ns(self) -> int:
        """Return for how long the client left the stream unread in the idle time before the round."""
        return self._within(self._stalls())

    def committing_ns(self) -> int:
        return self._within(self._commits())

    def longest_commit_ns(self) -> int:
        start, end = self._idle
        times = [e - s for s, e in self._commits() if s < end and e > start]
        return max(times, default=0)

    @property
    def is_commit_retried(self) -> bool:
        """Return True if the commit of the round's tokens was retried; only a slow one has a span."""
        ended_ns = self.round.span.end_ns
        commits = (call.span for call in self.request.all_calls if call.operation == COMMIT)
        later = (span for span in commits if span.start_ns >= ended_ns)
        own = min(later, key=lambda span: span.start_ns, default=None)
        if own is None or own.duration_ns > self.round.commit_ns:
            return False
        return any(event.name == names.STORE_RETRIED for event in own.events)

    @property
    def _idle(self) -> Interval:
        start_ns = self.round.span.start_ns
        return start_ns - self.round.idle_ns, start_ns

    def _stalls(self) -> Iterator[Interval]:
        for event in self.request.all_events:
            if event.name == names.CLIENT_STALLED:
                yield event.time_ns - event.integer(names.STALLED_NS), event.time_ns

    def _commits(self) -> Iterator[Interval]:
        for call in self.request.all_calls:
            if call.operation == COMMIT:
                yield call.span.start_ns, call.span.end_ns
        for one in self.request.rounds:
            yield one.span.end_ns, one.span.end_ns + one.commit_ns

    def _within(self, intervals: Iterator[Interval]) -> int:
        start, end = self._idle
        covered, reached = 0, start
        for first, last in sorted(intervals):
            first, last = max(first, reached), min(last, end)  # noqa: PLW2901  # cut to the idle time
            if last > first:
                covered += last - first
                reached = last
        return covered

    def store_calls_ns(self) -> int:
        """Return the sum of the request's store calls, commits excepted, that began before the round."""
        calls = (call.span for call in self.request.calls if call.operation and call.operation != COMMIT)
        return sum(span.duration_ns for span in calls if span.start_ns < self.round.span.start_ns)

    def usual_compute_ns(self) -> float | None:
        """Return the median of the target's other steps of about as many rows here; None if there are few."""
        one, rows = self.round, _rows_of(self.round)
        alike = [
            other.parts.compute_ns
            for other in self.story.rounds
            if other is not one and other.target == one.target and _are_alike(rows, _rows_of(other))
        ]
        return median(alike) if len(alike) >= _FEW_STEPS else None

    @property
    def missing_tokens(self) -> int | None:
        """Return how many of the tokens before the round the target's cache lacked; None if unknown."""
        reused = self.round.reused
        return None if reused is None else max(0, self.round.position - reused)


def _rows_of(one: Round) -> int:
    """Return the rows of a round's step; those of its session alone, per session, if the step is unknown."""
    if one.batch is not None and one.batch.rows:
        return one.batch.rows
    # The first round reads the prompt, and how many rows that took is not known.
    return max(1, one.sessions) * (one.verified + 1) if one.index else 0


def _are_alike(rows: int, others: int) -> bool:
    return max(rows, others) <= _ALIKE * min(rows, others)


def cause_of(case: Case) -> str:
    clauses = (rule(case) for parts, rule in _RULES if case.part in parts)
    return next(filter(None, clauses), "the trace does not show why")


def _no_verdict(case: Case) -> str:
    if case.round.confirmed or names.COMPUTE_PART in case.round.span.attributes:
        return ""
    error = one_line(case.round.span.text(names.ERROR_TYPE))
    return "the target sent no response" + (f" ({error})" if error else " before the request ended")


def _stalled_client(case: Case) -> str:
    if not case.stalled_ns() >= _SHARE * case.lost_ns > 0:
        return ""
    return f"the client read nothing for {ms(case.stalled_ns())} ms of it while its buffer was full"


def _slow_log(case: Case) -> str:
    again = " after a retry" if case.is_commit_retried else ""
    took = f"the session store took {ms(case.lost_ns)} ms for the commit{again}"
    return f"{took}, and tokens are sent only after it"


def _store_held_up(case: Case) -> str:
    committing_ns = case.committing_ns()
    if not committing_ns >= _SHARE * case.lost_ns > 0:
        return ""
    return (
        f"a commit to the session store was under way for {ms(committing_ns)} ms of it "
        f"(it took {ms(case.longest_commit_ns())} ms), and the number of unlogged tokens is bounded"
    )


def _lost_replica(case: Case) -> str:
    passed = f"{ms(case.lost_ns)} ms passed until the"
    if moved := case.last_event(names.SESSION_MOVED, "target"):
        source, to, missing = _text(moved, names.SOURCE), _text(moved, names.TO), case.missing_tokens or 0
        recomputed = f", which recomputed {count(missing, 'token')} in {ms(case.round.parts.compute_ns)} ms"
        return (
            f"{passed} session moved from target {source} to target {to}{_because(moved)}"
            f"{recomputed if missing >= _COLD_TOKENS else ''}"
        )
    if retried := case.last_event(names.REQUEST_RETRIED, "target"):
        return f"{passed} request to the target was retried{_because(retried)}"
    return ""


def _slow_draft(case: Case) -> str:
    computed_ns = case.round.span.integer(names.DRAFT_COMPUTE_NS)
    draft = f"draft {one_line(case.round.draft)}" if case.round.draft else "the draft"
    if computed_ns >= _SHARE * case.lost_ns:
        did = f", which computed for {ms(computed_ns)} ms"
    else:
        did = f", which computed for only {ms(computed_ns)} ms; the rest is its queue or the network"
    degraded = case.last_event(names.DRAFT_DEGRADED)
    then = f"; drafting then fell back to {_text(degraded, names.TO)}{_because(degraded)}" if degraded else ""
    return f"it waited {ms(case.lost_ns)} ms for {draft}{did}{then}"


def _no_blocks(case: Case) -> str:
    free = case.round.batch.free_blocks if case.round.batch else None
    preempted = case.last_event(names.KV_PREEMPTED)
    if free != 0 and preempted is None:
        return ""
    why = "an older session had taken its KV blocks" if preempted else "KV blocks were short"
    left = f" ({free:,} were free)" if free is not None else ""
    return f"it queued for {ms(case.lost_ns)} ms at the target because {why}{left}"


def _queue(case: Case) -> str:
    waiting = case.round.batch.waiting if case.round.batch else 0
    others = f" with {count(waiting, 'other request')}" if waiting else ""
    return f"it queued for {ms(case.lost_ns)} ms at the target{others}"


def _cold_cache(case: Case) -> str:
    missing, one = case.missing_tokens, case.round
    if missing is None or missing < _COLD_TOKENS:
        return ""
    had = f"{one.reused or 0:,} of {count(one.position, 'token')}"
    if one.index == 0 and not case.request.is_resumed and case.last_event(names.SESSION_MOVED) is None:
        return f"it read the prompt, of which the cache held {had}, and computed for {ms(case.lost_ns)} ms"
    if moved := case.last_event(names.SESSION_MOVED, "target"):
        why = f"after the session moved from target {_text(moved, names.SOURCE)}{_because(moved)}, "
    else:
        why = "after other sessions had taken the session's KV blocks, " if case.is_evicted else ""
    recomputing = f"recomputing the other {missing:,} took {ms(case.lost_ns)} ms"
    return f"{why}the target's cache held {had}, and {recomputing}"


def _slow_rank(case: Case) -> str:
    times = case.round.batch.rank_ns if case.round.batch else ()
    if len(times) < 2:
        return ""
    slowest = max(times)
    rank = times.index(slowest)
    others = median(times[:rank] + times[rank + 1 :])
    if slowest < _RANK_SKEW * others or slowest - others < _SHARE * case.lost_ns:
        return ""
    return f"rank {rank} took {ms(slowest)} ms for its part of the step, the others {ms(others)} ms"


def _busy_machine(case: Case) -> str:
    usual_ns, took_ns = case.usual_compute_ns(), case.lost_ns
    if usual_ns is None or took_ns < _SLOW_STEP * usual_ns:
        return ""
    batch = case.round.batch
    rows = f" of {count(batch.rows, 'row')}" if batch is not None and batch.rows else ""
    return f"its step{rows} computed for {ms(took_ns)} ms, usually {ms(usual_ns)}: the machine was busy"


def _prefill_of_others(case: Case) -> str:
    batch = case.round.batch
    if batch is None or case.round.sessions == 1 or batch.prefill_share < _PREFILL_SHARE:
        return ""
    if (case.missing_tokens or 0) >= _COLD_TOKENS:
        return ""
    return (
        f"it computed for {ms(case.lost_ns)} ms in a step with prompts of other sessions: "
        f"{batch.prefill_rows:,} of its {count(batch.rows, 'row')} ({percent(batch.prefill_share, 1)})"
    )


def _full_batch(case: Case) -> str:
    sessions, batch = case.round.sessions, case.round.batch
    if sessions < _FULL_SESSIONS:
        return ""
    rows = f" and {count(batch.rows, 'row')}" if batch is not None and batch.rows else ""
    return f"it computed for {ms(case.lost_ns)} ms in a step of {sessions:,} sessions{rows}"


def _compute(case: Case) -> str:
    usual_ns = case.usual_compute_ns()
    usual = "" if usual_ns is None else f", usually {ms(usual_ns)}"
    return f"its step computed for {ms(case.lost_ns)} ms{usual}, and nothing else delayed it"


def _wire(case: Case) -> str:
    return f"{ms(case.lost_ns)} ms of it passed on the network to the target, or in the gateway"


def _beginning(case: Case) -> str:
    if case.round is not case.request.rounds[0]:
        return ""
    store_ns = case.store_calls_ns()
    if store_ns >= _SHARE * case.lost_ns > 0:
        return f"opening the session in the store took {ms(store_ns)} ms of it"
    return "the gateway admitted the request, read it and opened its session"


# Only BEFORE waits for the log or the client: a round starts once both have room for its tokens. QUEUE and
# COMPUTE are measured by the last target.
_RULES: tuple[tuple[Collection[Part], Callable[[Case], str]], ...] = (
    (tuple(Part), _no_verdict),
    ((Part.BEFORE,), _stalled_client),
    ((Part.LOG,), _slow_log),
    ((Part.BEFORE,), _store_held_up),
    ((Part.BEFORE, Part.WIRE), _lost_replica),
    ((Part.DRAFT,), _slow_draft),
    ((Part.QUEUE,), _no_blocks),
    ((Part.QUEUE,), _queue),
    ((Part.COMPUTE,), _cold_cache),
    ((Part.COMPUTE,), _slow_rank),
    ((Part.COMPUTE,), _busy_machine),
    ((Part.COMPUTE,), _prefill_of_others),
    ((Part.COMPUTE,), _full_batch),
    ((Part.COMPUTE,), _compute),
    ((Part.WIRE,), _wire),
    ((Part.BEFORE,), _beginning),
)


def _text(event: Event, key: str) -> str:
    return one_line(event.text(key)) or "unknown"


def _because(event: Event) -> str:
    reason = one_line(event.text(names.REASON))
    return f" ({reason})" if reason else ""
