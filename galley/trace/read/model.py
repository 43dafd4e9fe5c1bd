"""What a trace tells: stories of sessions, of requests, of rounds. Pure.

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
    """A call to a replica or the store: the caller's span and, where it is known, the other process's."""

    span: Span
    served: Span | None = None

    @property
    def replica(self) -> str:
        """Which one was called; empty for the store."""
        return self.span.text(names.REPLICA)

    @property
    def operation(self) -> str:
        """Of the store; empty for replicas."""
        return self.span.text(names.STORE_OPERATION)


@dataclass(frozen=True, slots=True)
class Batch:
    """The target's pass that a round's verdict came from, and the other ranks' parts of it."""

    span: Span
    ranks: tuple[Span, ...] = ()

    @property
    def sessions(self) -> int:
        """How many it served."""
        return self.span.integer(names.BATCH_SESSIONS)

    @property
    def rows(self) -> int:
        """Tokens that it fed, of all sessions."""
        return self.span.integer(names.BATCH_ROWS)

    @property
    def prefill_rows(self) -> int:
        """Those of prompts."""
        return self.span.integer(names.BATCH_PREFILL_ROWS)

    @property
    def prefill_share(self) -> float:
        """Of its rows."""
        return self.prefill_rows / self.rows if self.rows else self.span.share(names.BATCH_PREFILL_SHARE)

    @property
    def free_blocks(self) -> int | None:
        """KV blocks that nobody used."""
        return self.span.known(names.FREE_BLOCKS)

    @property
    def waiting(self) -> int:
        """Items that had work to do and were not in it."""
        return max(0, self.span.integer(names.QUEUE_DEPTH) - self.sessions)

    @property
    def rank_ns(self) -> tuple[int, ...]:
        """How long each rank's forward took."""
        return self.span.integers(names.RANK_FORWARD_NS)


@dataclass(frozen=True, slots=True)
class Round:
    """One verdict. `idle_ns`: how long before it the request had no round open, as far as is known.

    `events` are those of its time, whichever process saw them.
    """

    span: Span
    parts: RoundParts
    idle_ns: int = 0
    batch: Batch | None = None
    events: tuple[Event, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def index(self) -> int:
        """Of the request's rounds."""
        return self.span.integer(names.ROUND_INDEX)

    @property
    def position(self) -> int:
        """Of the first token that it confirmed, the prompt's counted."""
        return self.span.integer(names.ROUND_POSITION)

    @property
    def confirmed(self) -> int:
        """How many tokens."""
        return self.span.integer(names.ROUND_CONFIRMED)

    @property
    def accepted(self) -> int:
        """How many of them the draft had guessed."""
        return min(self.span.integer(names.ROUND_ACCEPTED), self.confirmed)

    @property
    def drafted(self) -> int:
        """How many draft tokens the target was sent."""
        return self.span.integer(names.ROUND_DRAFTED)

    @property
    def verified(self) -> int:
        """How many of them it verified."""
        return self.span.integer(names.ROUND_VERIFIED)

    @property
    def strategy(self) -> str:
        """How they were guessed."""
        return self.span.text(names.ROUND_STRATEGY)

    @property
    def duration_ns(self) -> int:
        """From its beginning to its verdict."""
        return self.span.duration_ns

    @property
    def commit_ns(self) -> int:
        """How long it took to log its tokens, which the round did not wait for; 0 if that is not known."""
        return self.span.integer(names.COMMIT_NS)

    @property
    def felt_ns(self) -> int:
        """What a client may have felt: the time before it, its own, and until its tokens were logged."""
        return self.idle_ns + self.duration_ns + self.commit_ns

    @property
    def target(self) -> str:
        """The replica that gave the verdict."""
        return self.span.text(names.TARGET_REPLICA)

    @property
    def draft(self) -> str:
        """The replica that guessed."""
        return self.span.text(names.DRAFT_REPLICA)

    @property
    def sessions(self) -> int:
        """How many the pass served, this one among them."""
        told = self.span.integer(names.BATCH_SESSIONS)
        return told or (self.batch.sessions if self.batch else 0)

    @property
    def reused(self) -> int | None:
        """On an item's first round: how many tokens of its prefix the target had in its cache."""
        return self.span.known(names.KV_REUSED)

    @property
    def text(self) -> tuple[str, ...]:
        """Of each token, where it was traced."""
        return self.span.texts(names.ROUND_TEXT)

    def happened(self, name: str) -> Event | None:
        """The last event of this name."""
        return next((event for event in reversed(self.events) if event.name == name), None)


@dataclass(frozen=True, slots=True)
class Request:
    """One `Generate` or `Resume`; `span` is None if it is not in the trace.

    `events` are those that are no round's, `calls` all but the rounds'.
    """

    trace_id: str
    span: Span | None
    rounds: tuple[Round, ...]
    events: tuple[Event, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def start_ns(self) -> int:
        """Of its span, or of what is there of it."""
        return self.span.start_ns if self.span else min(_times(self, first=True), default=0)

    @property
    def end_ns(self) -> int:
        """Of its span, or of what is there of it."""
        return self.span.end_ns if self.span else max(_times(self, first=False), default=0)

    @property
    def duration_ns(self) -> int:
        """At least 0."""
        return max(0, self.end_ns - self.start_ns)

    @property
    def session_id(self) -> str:
        """Empty if its span is not there."""
        return self.span.text(names.SESSION_ID) if self.span else ""

    @property
    def failed(self) -> bool:
        """Did it end in an error?"""
        return self.span is not None and self.span.status == ERROR

    @property
    def resumed(self) -> bool:
        """Did it go on with a session that had begun before?"""
        return self.span is not None and self.span.attributes.get(names.RESUMED) is True

    @property
    def missing_rounds(self) -> int:
        """How many of its rounds are not in the trace (`--round-spans`, or lost on the way)."""
        return max(0, self.integer(names.ROUNDS) - len(self.rounds))

    def integer(self, key: str) -> int:
        """An attribute of its span; 0 if that is not there."""
        return self.span.integer(key) if self.span else 0

    def text(self, key: str) -> str:
        """An attribute of its span; empty if that is not there."""
        return self.span.text(key) if self.span else ""

    @property
    def all_calls(self) -> tuple[Call, ...]:
        """With those of its rounds."""
        return (*self.calls, *(call for one in self.rounds for call in one.calls))


@dataclass(frozen=True, slots=True)
class Story:
    """All requests of one session, in order. `session_id` is empty if no request span is there to tell it.

    `company` says of a pass which other sessions it served, as far as they are traced.
    """

    session_id: str
    requests: tuple[Request, ...]
    shifts: tuple[Shift, ...] = ()
    cut: bool = False
    company: Callable[[Batch], Collection[str]] = field(default=lambda _: ())

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Of all its requests."""
        return tuple(one for request in self.requests for one in request.rounds)

    @property
    def start_ns(self) -> int:
        """Of the first request."""
        return min(request.start_ns for request in self.requests)

    @property
    def end_ns(self) -> int:
        """Of the last to end."""
        return max(request.end_ns for request in self.requests)

    @property
    def prompt_tokens(self) -> int | None:
        """How long the prompt is; None if that is not known."""
        told = max((request.integer(names.INPUT_TOKENS) for request in self.requests), default=0)
        if told:
            return told
        first = self.requests[0]
        begun = (one.position for one in first.rounds if one.index == 0)
        return None if first.resumed else next(begun, None)

    def output_index(self, position: int) -> int | None:
        """Which token of the answer is at `position`, from 0."""
        prompt = self.prompt_tokens
        return position - prompt if prompt is not None and position >= prompt else None


def _times(request: Request, *, first: bool) -> list[int]:
    spans = [one.span for one in request.rounds] + [call.span for call in request.calls]
    return [span.start_ns if first else span.end_ns for span in spans]
