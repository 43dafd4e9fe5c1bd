"""Model a trace as stories of sessions, requests and rounds. Pure.

A session is one story however often it was resumed. Its requests are found by the session's id, or by the
link `continues` if the first of them has no span (its gateway died, so that only its rounds are there). All
times are of one clock, as far as `skew.py` can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from galley.core import names
from galley.core.session.events import RoundParts
from galley.trace.read.skew import Shift
from galley.trace.read.spans import ERROR, Event, Span

COMMIT = "commit"

T = TypeVar("T")


class _Attribute(Generic[T]):
    def __init__(self, read: Callable[[Span, str], T], key: str) -> None:
        self._read = read
        self._key = key

    def __get__(self, instance: Any, _owner: type) -> T:
        return self._read(instance.span, self._key)


@dataclass(frozen=True, slots=True)
class Call:
    """A call to a replica or the store: the caller's span, and the server's if known."""

    span: Span
    served: Span | None = None

    replica = _Attribute(Span.text, names.REPLICA)  # empty for the store
    operation = _Attribute(Span.text, names.STORE_OPERATION)  # empty for replicas


@dataclass(frozen=True, slots=True)
class Batch:
    """The step of the target that ended a round, and the spans of ranks other than 0 in it."""

    span: Span
    ranks: tuple[Span, ...] = ()

    sessions = _Attribute(Span.integer, names.BATCH_SESSIONS)
    rows = _Attribute(Span.integer, names.BATCH_ROWS)
    prefill_rows = _Attribute(Span.integer, names.BATCH_PREFILL_ROWS)
    free_blocks = _Attribute(Span.known, names.FREE_BLOCKS)

    @property
    def prefill_share(self) -> float:
        return self.prefill_rows / self.rows if self.rows else self.span.share(names.BATCH_PREFILL_SHARE)

    @property
    def waiting(self) -> int:
        """Return the number of requests that waited and were not in the step."""
        return max(0, self.span.integer(names.QUEUE_DEPTH) - self.sessions)

    @property
    def rank_ns(self) -> tuple[int, ...]:
        values = self.span.values(names.RANK_FORWARD_NS)
        return tuple(value for value in values if isinstance(value, int) and value >= 0)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a request, with the events of all processes that fall into it.

    `idle_ns` is the time since the previous round ended or, for the first, the request began; 0 if unknown.
    """

    span: Span
    parts: RoundParts
    idle_ns: int = 0
    batch: Batch | None = None
    events: tuple[Event, ...] = ()
    calls: tuple[Call, ...] = ()

    index = _Attribute(Span.integer, names.ROUND_INDEX)  # among the request's rounds
    position = _Attribute(Span.integer, names.ROUND_POSITION)  # of its first confirmed token
    confirmed = _Attribute(Span.integer, names.ROUND_CONFIRMED)
    drafted = _Attribute(Span.integer, names.ROUND_DRAFTED)
    verified = _Attribute(Span.integer, names.ROUND_VERIFIED)
    strategy = _Attribute(Span.text, names.ROUND_STRATEGY)
    sources = _Attribute(Span.texts, names.ROUND_SOURCES)  # "source accepted/verified"
    depth = _Attribute(Span.integer, names.ROUND_DEPTH)  # of a tree; 0 of a chain
    ranks = _Attribute(Span.texts, names.ROUND_RANKS)  # of a tree: "rank accepted/verified"
    commit_ns = _Attribute(Span.integer, names.COMMIT_NS)  # not part of the duration
    target = _Attribute(Span.text, names.TARGET_REPLICA)
    draft = _Attribute(Span.text, names.DRAFT_REPLICA)
    reused = _Attribute(Span.known, names.KV_REUSED)  # on the first round of a verify request
    text = _Attribute(Span.texts, names.ROUND_TEXT)  # of each token, if traced

    @property
    def accepted(self) -> int:
        return min(self.span.integer(names.ROUND_ACCEPTED), self.confirmed)

    @property
    def felt_ns(self) -> int:
        """Return the time that a client waited: idle time, duration, and time to commit the tokens."""
        return self.idle_ns + self.span.duration_ns + self.commit_ns

    @property
    def sessions(self) -> int:
        """Return the number of sessions in the step, this one included."""
        return self.span.integer(names.BATCH_SESSIONS) or (self.batch.sessions if self.batch else 0)


@dataclass(frozen=True, slots=True)
class Request:
    """One `Generate` or `Resume`; `span` is None if lost. `events` and `calls` are not those of rounds."""

    trace_id: str
    span: Span | None
    rounds: tuple[Round, ...]
    events: tuple[Event, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def _spans(self) -> list[Span]:
        own = [one.span for one in self.rounds] + [call.span for call in self.calls]
        return [self.span] if self.span else own

    @property
    def start_ns(self) -> int:
        return min((span.start_ns for span in self._spans), default=0)

    @property
    def end_ns(self) -> int:
        return max((span.end_ns for span in self._spans), default=0)

    @property
    def duration_ns(self) -> int:
        return max(0, self.end_ns - self.start_ns)

    @property
    def session_id(self) -> str:
        return self.span.text(names.SESSION_ID) if self.span else ""

    @property
    def has_failed(self) -> bool:
        return self.span is not None and self.span.status == ERROR

    @property
    def problem(self) -> str:
        return self.span.problem if self.span else ""

    @property
    def is_resumed(self) -> bool:
        return self.span is not None and self.span.attributes.get(names.RESUMED) is True

    @property
    def missing_rounds(self) -> int:
        """Return the number of rounds that the trace lacks (`--round-spans`, or lost spans)."""
        return max(0, self.integer(names.ROUNDS) - len(self.rounds))

    def integer(self, key: str) -> int:
        return self.span.integer(key) if self.span else 0

    def text(self, key: str) -> str:
        return self.span.text(key) if self.span else ""

    @property
    def all_events(self) -> tuple[Event, ...]:
        return (*(event for one in self.rounds for event in one.events), *self.events)

    @property
    def all_calls(self) -> tuple[Call, ...]:
        return (*self.calls, *(call for one in self.rounds for call in one.calls))


@dataclass(frozen=True, slots=True)
class Story:
    """The requests of a session in order; `session_id` is empty if unknown. `cut`: not all spans are read."""

    session_id: str
    requests: tuple[Request, ...]
    shifts: tuple[Shift, ...] = ()
    cut: bool = False
    sessions_of: Callable[[str], Collection[str]] = field(default=lambda _: ())

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple(one for request in self.requests for one in request.rounds)

    @property
    def missing_rounds(self) -> int:
        return sum(request.missing_rounds for request in self.requests)

    @property
    def refusal(self) -> Request | None:
        """Return the call if it was refused before it had a session."""
        first = self.requests[0]
        return first if first.has_failed and not (first.session_id or first.rounds) else None

    @property
    def start_ns(self) -> int:
        return min(request.start_ns for request in self.requests)

    @property
    def end_ns(self) -> int:
        return max(request.end_ns for request in self.requests)

    @property
    def prompt_tokens(self) -> int | None:
        reported = max((request.integer(names.INPUT_TOKENS) for request in self.requests), default=0)
        if reported:
            return reported
        first = self.requests[0]
        starts = (one.position for one in first.rounds if one.index == 0)
        return None if first.is_resumed else next(starts, None)

    def company(self, batch: Batch) -> Collection[str]:
        """Return the other sessions of a step; "one of trace ID" if a trace does not hold exactly one."""
        ours = {request.trace_id for request in self.requests}
        found: dict[str, None] = {}
        for link in batch.span.links:
            if link.trace_id not in ours and link.text(names.LINK) == names.LINK_ITEM:
                others = sorted(self.sessions_of(link.trace_id))
                found[others[0] if len(others) == 1 else f"one of trace {link.trace_id}"] = None
        return tuple(found)

    def output_index(self, position: int) -> int | None:
        """Return the output index of `position`, from 0; None in the prompt or if its length is unknown."""
        prompt = self.prompt_tokens
        return position - prompt if prompt is not None and position >= prompt else None
