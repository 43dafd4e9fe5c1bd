"""A round that is to be explained, beside what the others of its story are like."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from galley.core import names
from galley.trace.read.model import COMMIT, Request, Round, Story
from galley.trace.read.spans import Event

Interval = tuple[int, int]


class Part(enum.Enum):
    """What a client waits for."""

    BEFORE = "before"
    DRAFT = "draft"
    QUEUE = "queue"
    COMPUTE = "compute"
    WIRE = "wire"
    LOG = "log"


class Cause(enum.StrEnum):
    """Why a round was slow."""

    NO_VERDICT = "no verdict"
    STALLED_CLIENT = "stalled client"
    SLOW_STORE = "slow store"
    LOST_REPLICA = "lost replica"
    SLOW_DRAFT = "slow draft"
    NO_BLOCKS = "no KV blocks"
    QUEUE = "queue"
    PROMPT = "prompt"
    COLD_CACHE = "cold cache"
    SLOW_RANK = "slow rank"
    PREFILL = "prefill of others"
    FULL_BATCH = "full batch"
    COMPUTE = "compute"
    WIRE = "wire"
    BEGINNING = "beginning"
    IDLE = "idle"


def times_of(one: Round) -> Mapping[Part, int]:
    """What each part took of a round, in nanoseconds."""
    return {
        Part.BEFORE: one.idle_ns,
        Part.DRAFT: one.parts.draft_ns,
        Part.QUEUE: one.parts.queue_ns,
        Part.COMPUTE: one.parts.compute_ns,
        Part.WIRE: one.parts.wire_ns,
        Part.LOG: one.commit_ns,
    }


class Usual:
    """What rounds are like: medians, in nanoseconds; 0 where there are none."""

    def __init__(
        self, felt_ns: float = 0.0, times: Mapping[Part, float] | None = None, rounds: int = 0
    ) -> None:
        self.felt_ns = felt_ns
        self.rounds = rounds
        self._times = times or {}

    def of(self, part: Part) -> float:
        """What this part usually takes."""
        return self._times.get(part, 0.0)


def usual(rounds: Collection[Round]) -> Usual:
    """Of these."""
    if not rounds:
        return Usual()
    times = [times_of(one) for one in rounds]
    medians = {part: median(found[part] for found in times) for part in Part}
    return Usual(median(one.felt_ns for one in rounds), medians, len(rounds))


@dataclass(frozen=True, slots=True)
class Case:
    """`round` of `request`, beside what is `usual`."""

    story: Story
    request: Request
    round: Round
    usual: Usual

    @property
    def part(self) -> Part:
        """The one that exceeds what it usually is by most; of equals, the first."""
        times = times_of(self.round)
        return max(Part, key=lambda part: times[part] - self.usual.of(part))

    @property
    def lost_ns(self) -> int:
        """How long that part took."""
        return times_of(self.round)[self.part]

    def happened(self, name: str, pool: str = "") -> Event | None:
        """The last event of this name, of this pool if one is named."""
        found = (
            e for e in reversed(self.round.events) if e.name == name and pool in ("", e.text(names.POOL))
        )
        return next(found, None)

    @property
    def evicted(self) -> bool:
        """Had the session lost KV blocks to others while it was idle before?"""
        events = (event for request in self.story.requests for event in request.events)
        return any(e.name == names.KV_EVICTED and e.time_ns <= self.round.span.end_ns for e in events)

    def stalled_ns(self) -> int:
        """For how much of its time its client had left the stream unread."""
        return self._within(self._stalls())

    def committing_ns(self) -> int:
        """For how much of its time something of the same session was being logged."""
        return self._within(self._commits())

    def longest_commit_ns(self) -> int:
        """Of those that took some of its time."""
        start, end = self._window
        times = [e - s for s, e in self._commits() if s < end and e > start]
        return max(times, default=0)

    @property
    def _window(self) -> Interval:
        span = self.round.span
        return span.start_ns - self.round.idle_ns, span.end_ns

    def _stalls(self) -> Iterator[Interval]:
        for event in (*self.request.events, *(e for one in self.request.rounds for e in one.events)):
            if event.name == names.CLIENT_STALLED:
                yield event.time_ns - event.integer(names.STALLED_NS), event.time_ns

    def _commits(self) -> Iterator[Interval]:
        for call in self.request.all_calls:
            if call.operation == COMMIT:
                yield call.span.start_ns, call.span.end_ns
        for one in self.request.rounds:
            yield one.span.end_ns, one.span.end_ns + one.commit_ns

    def _within(self, intervals: Iterator[Interval]) -> int:
        """How much of its time they cover together."""
        start, end = self._window
        covered, reached = 0, start
        for begun, ended in sorted(intervals):
            begun, ended = max(begun, reached), min(ended, end)  # noqa: PLW2901  # cut to the window
            if ended > begun:
                covered += ended - begun
                reached = ended
        return covered

    def store_calls_ns(self) -> int:
        """How long the request's other calls to the store took, that were made before its first round."""
        calls = (call.span for call in self.request.calls if call.operation and call.operation != COMMIT)
        return sum(span.duration_ns for span in calls if span.start_ns < self.round.span.start_ns)

    @property
    def missing_tokens(self) -> int | None:
        """Confirmed tokens before it that the target did not find in its cache; None if that is not known."""
        reused = self.round.reused
        if reused is None:
            return None
        return max(0, self.round.position - reused)
