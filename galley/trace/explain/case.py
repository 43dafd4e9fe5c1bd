"""One round to explain, and the medians of the other rounds of its story."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from galley.core import names
from galley.trace.read.model import COMMIT, Request, Round, Story
from galley.trace.read.spans import Event

Interval = tuple[int, int]


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
    """`round` of `request`, and the medians of the other rounds."""

    story: Story
    request: Request
    round: Round
    medians: Medians

    @property
    def part(self) -> Part:
        """Return the part that exceeds its median by most; of equals, the first."""
        times = times_of(self.round)
        return max(Part, key=lambda part: times[part] - self.medians.parts[part])

    @property
    def lost_ns(self) -> int:
        """Return the nanoseconds of that part."""
        return times_of(self.round)[self.part]

    def last_event(self, name: str, pool: str = "") -> Event | None:
        matches = (
            e for e in reversed(self.round.events) if e.name == name and pool in ("", e.text(names.POOL))
        )
        return next(matches, None)

    @property
    def is_evicted(self) -> bool:
        """Return True if other sessions took the session's KV blocks before this round."""
        events = (event for request in self.story.requests for event in request.events)
        return any(e.name == names.KV_EVICTED and e.time_ns <= self.round.span.end_ns for e in events)

    def stalled_ns(self) -> int:
        """Return the nanoseconds of the round during which the client left the stream unread."""
        return self._within(self._stalls())

    def committing_ns(self) -> int:
        return self._within(self._commits())

    def longest_commit_ns(self) -> int:
        start, end = self._window
        times = [e - s for s, e in self._commits() if s < end and e > start]
        return max(times, default=0)

    @property
    def _window(self) -> Interval:
        span = self.round.span
        return span.start_ns - self.round.idle_ns, span.end_ns

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
        start, end = self._window
        covered, reached = 0, start
        for first, last in sorted(intervals):
            first, last = max(first, reached), min(last, end)  # noqa: PLW2901  # cut to the window
            if last > first:
                covered += last - first
                reached = last
        return covered

    def store_calls_ns(self) -> int:
        """Return the nanoseconds of store calls other than commits before the round."""
        calls = (call.span for call in self.request.calls if call.operation and call.operation != COMMIT)
        return sum(span.duration_ns for span in calls if span.start_ns < self.round.span.start_ns)

    @property
    def missing_tokens(self) -> int | None:
        """Return the confirmed tokens that were not in the target's cache; None if unknown."""
        reused = self.round.reused
        return None if reused is None else max(0, self.round.position - reused)
