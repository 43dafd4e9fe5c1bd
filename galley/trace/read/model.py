"""Model a trace as stories of sessions, requests and rounds. Pure.

A session is one story however often it was resumed: its requests are found by the session's id, or by the
link `continues` where the first of them never ended (its gateway died, so that only its rounds are there).
All times are of one clock, as far as `skew.py` can tell. What attributes hold is not to be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from galley.core import names
from galley.core.session.events import RoundParts
from galley.trace.read.skew import Shift
from galley.trace.read.spans import ERROR, Event, Span

COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Call:
    """A call to a replica or the store: the caller's span, and the server's if known."""

    span: Span
    served: Span | None = None

    @property
    def replica(self) -> str:
        """Return the called replica; empty for the store."""
        return self.span.text(names.REPLICA)

    @property
    def operation(self) -> str:
        """Return the store operation; empty for replicas."""
        return self.span.text(names.STORE_OPERATION)


@dataclass(frozen=True, slots=True)
class Batch:
    """The target's step behind a round, and the other ranks' parts of it."""

    span: Span
    ranks: tuple[Span, ...] = ()

    @property
    def sessions(self) -> int:
        """Return the number of sessions in the step."""
        return self.span.integer(names.BATCH_SESSIONS)

    @property
    def rows(self) -> int:
        """Return the rows of all sessions."""
        return self.span.integer(names.BATCH_ROWS)

    @property
    def prefill_rows(self) -> int:
        """Return the rows of prompts."""
        return self.span.integer(names.BATCH_PREFILL_ROWS)

    @property
    def prefill_share(self) -> float:
        """Return the share of prompt rows."""
        return self.prefill_rows / self.rows if self.rows else self.span.share(names.BATCH_PREFILL_SHARE)

    @property
    def free_blocks(self) -> int | None:
        """Return the free KV blocks."""
        return self.span.known(names.FREE_BLOCKS)

    @property
    def waiting(self) -> int:
        """Return the requests that waited and were not in the step."""
        return max(0, self.span.integer(names.QUEUE_DEPTH) - self.sessions)

    @property
    def rank_ns(self) -> tuple[int, ...]:
        """Return the nanoseconds of each rank's forward pass."""
        return self.span.integers(names.RANK_FORWARD_NS)


@dataclass(frozen=True, slots=True)
class Round:
    """One round. `idle_ns` is the known time before it without a round under way.

    `events` are those in its time, of any process.
    """

    span: Span
    parts: RoundParts
    idle_ns: int = 0
    batch: Batch | None = None
    events: tuple[Event, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def index(self) -> int:
        """Return the index among the request's rounds."""
        return self.span.integer(names.ROUND_INDEX)

    @property
    def position(self) -> int:
        """Return the position of its first confirmed token, prompt included."""
        return self.span.integer(names.ROUND_POSITION)

    @property
    def confirmed(self) -> int:
        """Return the number of confirmed tokens."""
        return self.span.integer(names.ROUND_CONFIRMED)

    @property
    def accepted(self) -> int:
        """Return the number of accepted draft tokens."""
        return min(self.span.integer(names.ROUND_ACCEPTED), self.confirmed)

    @property
    def drafted(self) -> int:
        """Return the number of draft tokens sent to the target."""
        return self.span.integer(names.ROUND_DRAFTED)

    @property
    def verified(self) -> int:
        """Return the number of verified draft tokens."""
        return self.span.integer(names.ROUND_VERIFIED)

    @property
    def strategy(self) -> str:
        """Return the draft strategy."""
        return self.span.text(names.ROUND_STRATEGY)

    @property
    def duration_ns(self) -> int:
        """Return the duration of the round's span."""
        return self.span.duration_ns

    @property
    def commit_ns(self) -> int:
        """Return the time to log its tokens, which the round did not wait for; 0 if unknown."""
        return self.span.integer(names.COMMIT_NS)

    @property
    def felt_ns(self) -> int:
        """Return the time that a client waited: idle time, duration, and time to log the tokens."""
        return self.idle_ns + self.duration_ns + self.commit_ns

    @property
    def target(self) -> str:
        """Return the target replica."""
        return self.span.text(names.TARGET_REPLICA)

    @property
    def draft(self) -> str:
        """Return the draft replica."""
        return self.span.text(names.DRAFT_REPLICA)

    @property
    def sessions(self) -> int:
        """Return the number of sessions in the step, this one included."""
        reported = self.span.integer(names.BATCH_SESSIONS)
        return reported or (self.batch.sessions if self.batch else 0)

    @property
    def reused(self) -> int | None:
        """Return the cached tokens of the prefix, on the first round of a verify request."""
        return self.span.known(names.KV_REUSED)

    @property
    def text(self) -> tuple[str, ...]:
        """Return the text of each token, if traced."""
        return self.span.texts(names.ROUND_TEXT)

    def last_event(self, name: str) -> Event | None:
        """Return the last event of this name."""
        return next((event for event in reversed(self.events) if event.name == name), None)


@dataclass(frozen=True, slots=True)
class Request:
    """One `Generate` or `Resume`; `span` is None if it is not in the trace.

    `events` and `calls` are those outside its rounds.
    """

    trace_id: str
    span: Span | None
    rounds: tuple[Round, ...]
    events: tuple[Event, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def start_ns(self) -> int:
        """Return the time of its span, else of its rounds and calls."""
        return self.span.start_ns if self.span else min(_times(self, first=True), default=0)

    @property
    def end_ns(self) -> int:
        """Return the time of its span, else of its rounds and calls."""
        return self.span.end_ns if self.span else max(_times(self, first=False), default=0)

    @property
    def duration_ns(self) -> int:
        """Return its duration, at least 0."""
        return max(0, self.end_ns - self.start_ns)

    @property
    def session_id(self) -> str:
        """Return the session's id; empty without a span."""
        return self.span.text(names.SESSION_ID) if self.span else ""

    @property
    def failed(self) -> bool:
        """Return True if it ended with an error."""
        return self.span is not None and self.span.status == ERROR

    @property
    def resumed(self) -> bool:
        """Return True if it resumed a session."""
        return self.span is not None and self.span.attributes.get(names.RESUMED) is True

    @property
    def missing_rounds(self) -> int:
        """Return the rounds that the trace lacks (`--round-spans`, or lost spans)."""
        return max(0, self.integer(names.ROUNDS) - len(self.rounds))

    def integer(self, key: str) -> int:
        """Return an integer attribute of its span; 0 without a span."""
        return self.span.integer(key) if self.span else 0

    def text(self, key: str) -> str:
        """Return a text attribute of its span; empty without a span."""
        return self.span.text(key) if self.span else ""

    @property
    def all_calls(self) -> tuple[Call, ...]:
        """Return all calls, those of its rounds included."""
        return (*self.calls, *(call for one in self.rounds for call in one.calls))


@dataclass(frozen=True, slots=True)
class Story:
    """All requests of one session, in order. `session_id` is empty if no request span names it.

    `company` returns the other traced sessions of a step.
    """

    session_id: str
    requests: tuple[Request, ...]
    shifts: tuple[Shift, ...] = ()
    cut: bool = False
    company: Callable[[Batch], Collection[str]] = field(default=lambda _: ())

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Return the rounds of all requests."""
        return tuple(one for request in self.requests for one in request.rounds)

    @property
    def start_ns(self) -> int:
        """Return the start of the first request."""
        return min(request.start_ns for request in self.requests)

    @property
    def end_ns(self) -> int:
        """Return the end of the last request."""
        return max(request.end_ns for request in self.requests)

    @property
    def prompt_tokens(self) -> int | None:
        """Return the prompt's length; None if unknown."""
        reported = max((request.integer(names.INPUT_TOKENS) for request in self.requests), default=0)
        if reported:
            return reported
        first = self.requests[0]
        starts = (one.position for one in first.rounds if one.index == 0)
        return None if first.resumed else next(starts, None)

    def output_index(self, position: int) -> int | None:
        """Return the index of the output token at `position`, from 0."""
        prompt = self.prompt_tokens
        return position - prompt if prompt is not None and position >= prompt else None


def _times(request: Request, *, first: bool) -> list[int]:
    spans = [one.span for one in request.rounds] + [call.span for call in request.calls]
    return [span.start_ns if first else span.end_ns for span in spans]
