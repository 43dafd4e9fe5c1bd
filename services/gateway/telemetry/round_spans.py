"""The span of each round: from its first request to its verdict, under credit from verdict to verdict.

What is asked for a round names it as its parent, so its id is drawn when that is asked; all else is known
when it has ended. It is handed over once the log holds its tokens, and says how long that took; what it says
besides is worked out by whoever exports it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from opentelemetry.util.types import AnyValue, Attributes

from galley.common.tracing.light_spans import LeanSpan, Tell
from galley.common.tracing.span_names import names_a_span
from galley.common.tracing.telemetry import fail
from galley.core import names
from galley.core.session.events import RoundEnded
from galley.core.session.machine import Session
from galley.core.session.ports import Replica

if TYPE_CHECKING:
    from services.gateway.telemetry.own_span import RequestSpan

_BATCH_LINK = {names.LINK: names.LINK_BATCH}
_NUMBERS = (
    names.ROUND_INDEX,
    names.ROUND_POSITION,
    names.ROUND_K,
    names.ROUND_DRAFTED,
    names.ROUND_VERIFIED,
    names.ROUND_ACCEPTED,
    names.ROUND_CONFIRMED,
    names.DRAFT_PART,
    names.QUEUE_PART,
    names.COMPUTE_PART,
    names.WIRE_PART,
    names.LINGER_NS,
    names.DRAFT_COMPUTE_NS,
    names.BATCH_SESSIONS,
)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Which rounds become spans, `slow` being longer than `slow_ns`; whether spans tell what was said."""

    rounds: Literal["all", "slow", "none"] = "all"
    slow_ns: int = 250_000_000
    content: bool = False


class Rounds:
    """Of one stream; at most one is under way."""

    def __init__(self, request: RequestSpan, options: TraceOptions, session: Session) -> None:
        self.slowest_ns = 0
        self.slowest_position = 0
        self.slowest_commit_ns = 0
        self.cached_tokens = 0
        self._request = request
        self._options = options
        self._session = session
        self._index = 0
        # The id of the span of the round that is under way, if it is known.
        self._open = 0
        self._opened_ns = 0
        self._asked_anew = False
        self._events: list[tuple[str, Attributes, int]] = []
        # Spans that wait for their tokens to be logged: up to where, and when the round ended.
        self._unlogged: deque[tuple[int, int, LeanSpan]] = deque()

    def parent_id(self, now_ns: int) -> int:
        """Of what is asked now: the round, unless it may turn out to be none that is told (0)."""
        if not self._open and self._options.rounds == "all":
            self._open = self._request.new_id()
            self._opened_ns = now_ns
        return self._open

    def event(self, name: str, attributes: Attributes) -> None:
        """Of the round that is under way, or the next."""
        self._events.append((name, attributes, self._request.now_ns()))

    def asked_target(self) -> None:
        """A new item: what it finds cached is said with its first verdict."""
        self._asked_anew = True

    def ended(self, done: RoundEnded, draft: Replica | None, target: Replica | None) -> None:
        """With its verdict."""
        took_ns = done.ended_ns - done.started_ns
        if took_ns > self.slowest_ns or not self._index:
            self.slowest_ns, self.slowest_position = took_ns, done.position
        if not self._index:
            self.cached_tokens = done.kv_reused
        offset_ns = self._request.offset_ns
        start_ns = done.started_ns + offset_ns
        span = None
        if self._is_told(took_ns):
            reused = done.kv_reused if self._asked_anew else None
            span = self._span(start_ns, partial(_tell, done, self._index, draft, target, reused))
            if self._options.content:
                span.attributes[names.ROUND_TEXT] = self._text(done)
            self._unlogged.append((done.position + done.confirmed, done.ended_ns + offset_ns, span))
        if self._events:
            self._place_events(span, start_ns)
        self._index += 1
        self._asked_anew = False

    def committed(self, length: int, took_ns: int) -> None:
        """The log holds `length` tokens now."""
        self.slowest_commit_ns = max(self.slowest_commit_ns, took_ns)
        while self._unlogged and self._unlogged[0][0] <= length:
            _, end_ns, span = self._unlogged.popleft()
            span.attributes[names.COMMIT_NS] = took_ns
            span.end(end_ns)

    def stop(self, failure: str | None) -> None:
        """No verdict comes any more, and no commit; `failure` is why, where that is one."""
        for _, end_ns, unlogged in self._unlogged:
            unlogged.end(end_ns)
        self._unlogged.clear()
        # One whose id is known has children, and must not be missed.
        span = self._span(self._opened_ns) if self._open else None
        self._place_events(span, self._opened_ns)
        if span is not None:
            span.attributes = {
                names.ROUND_INDEX: self._index,
                names.ROUND_POSITION: len(self._session.answer.tokens),
                names.ROUND_CONFIRMED: 0,
            }
            if failure is not None:
                fail(span, failure)
            span.end(self._request.now_ns())

    def _is_told(self, took_ns: int) -> bool:
        if self._options.rounds == "slow":
            return took_ns > self._options.slow_ns
        return self._options.rounds == "all"

    def _span(self, start_ns: int, tell: Tell | None = None) -> LeanSpan:
        span_id, self._open = self._open, 0
        return self._request.child(names.ROUND, start_ns, span_id=span_id, tell=tell)

    def _place_events(self, span: LeanSpan | None, start_ns: int) -> None:
        """What came before a round began, or in one that is not told, is the request's."""
        for name, attributes, at_ns in self._events:
            if span is None or at_ns < start_ns:
                self._request.event(name, attributes, at_ns)
            else:
                span.add_event(name, attributes, at_ns)
        self._events.clear()

    def _text(self, done: RoundEnded) -> AnyValue:
        first = done.position - len(self._session.spec.prompt)
        return self._session.answer.texts(first, first + done.confirmed)


def _tell(
    done: RoundEnded,
    index: int,
    draft: Replica | None,
    target: Replica | None,
    reused: int | None,
    span: LeanSpan,
) -> None:
    """`reused` is None of a round that is not the first of its item."""
    parts, told = done.parts, span.attributes
    span.numbers = (
        _NUMBERS,
        (
            index,
            done.position,
            done.k,
            done.drafted,
            done.verified,
            done.accepted,
            done.confirmed,
            parts.draft_ns,
            parts.queue_ns,
            parts.compute_ns,
            parts.wire_ns,
            done.target.linger_ns,
            done.draft.compute_ns,
            done.batch_sessions,
        ),
    )
    told[names.ROUND_STRATEGY] = done.strategy
    told[names.ROUND_OVERLAP] = done.overlap
    if draft is not None and (done.k or done.drafted):
        told[names.DRAFT_REPLICA] = draft.address
    if target is not None:
        told[names.TARGET_REPLICA] = target.address
    if reused is not None:
        told[names.KV_REUSED] = reused
    if names_a_span(done.batch_span):
        span.link_to((done.batch_span,), _BATCH_LINK)
