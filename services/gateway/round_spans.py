"""The span of each round: from its first request to its verdict, under credit from verdict to verdict.

What is asked for a round names it as its parent, so its id is drawn when that is asked; all else is known
when it has ended. It is handed over once the log holds its tokens, and says how long that took.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from services.common.item_spans import unpacked
from services.common.telemetry import fail
from services.core import trace_names as names

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext
    from opentelemetry.util.types import AnyValue, Attributes

    from services.common.lean_spans import LeanSpan
    from services.core.ports import Replica
    from services.core.rounds import RoundEnded
    from services.core.session import Session
    from services.gateway.request_span import RequestSpan

_BATCH_LINK = {names.LINK: names.LINK_BATCH}


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
        self._open: SpanContext | None = None
        self._opened_ns = 0
        self._asked_anew = False
        self._events: list[tuple[str, Attributes, int]] = []
        # Spans that wait for their tokens to be logged: up to where, and when the round ended.
        self._unlogged: deque[tuple[int, int, LeanSpan]] = deque()

    def parent(self) -> SpanContext:
        """Of what is asked now: the round, unless it may turn out to be none that is told."""
        if self._options.rounds != "all":
            return self._request.context
        if self._open is None:
            self._open = self._request.new_context()
            self._opened_ns = self._request.now_ns()
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
        start_ns, end_ns = self._request.at(done.started_ns), self._request.at(done.ended_ns)
        span = self._span(start_ns) if self._is_told(took_ns) else None
        self._place_events(span, start_ns)
        if span is not None:
            span.attributes = self._attributes(done, draft, target)
            if done.batch_span and (batch := unpacked(done.batch_span)).is_valid:
                span.add_link(batch, _BATCH_LINK)
            self._unlogged.append((done.position + done.confirmed, end_ns, span))
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
        span = None if self._open is None else self._span(self._opened_ns)
        self._place_events(span, self._opened_ns)
        if span is not None:
            span.attributes = {
                names.ROUND_INDEX: self._index,
                names.ROUND_POSITION: len(self._session.answer.tokens),
                names.ROUND_CONFIRMED: 0,
            }
            if failure is not None:
                fail(span, failure)
            span.end()

    def _is_told(self, took_ns: int) -> bool:
        if self._options.rounds == "slow":
            return took_ns > self._options.slow_ns
        return self._options.rounds == "all"

    def _span(self, start_ns: int) -> LeanSpan:
        context, self._open = self._open, None
        return self._request.child(names.ROUND, start_ns, context=context)

    def _place_events(self, span: LeanSpan | None, start_ns: int) -> None:
        """What came before a round began, or in one that is not told, is the request's."""
        for name, attributes, at_ns in self._events:
            if span is None or at_ns < start_ns:
                self._request.event(name, attributes, at_ns)
            else:
                span.add_event(name, attributes, at_ns)
        self._events.clear()

    def _attributes(
        self, done: RoundEnded, draft: Replica | None, target: Replica | None
    ) -> dict[str, AnyValue]:
        attributes = _attributes_of(done, self._index)
        if draft is not None and (done.k or done.drafted):
            attributes[names.DRAFT_REPLICA] = draft.address
        if target is not None:
            attributes[names.TARGET_REPLICA] = target.address
        if self._asked_anew:
            attributes[names.KV_REUSED] = done.kv_reused
        if self._options.content:
            first = done.position - len(self._session.spec.prompt)
            attributes[names.ROUND_TEXT] = self._session.answer.texts(first, first + done.confirmed)
        return attributes


def _attributes_of(done: RoundEnded, index: int) -> dict[str, AnyValue]:
    parts = done.parts
    return {
        names.ROUND_INDEX: index,
        names.ROUND_POSITION: done.position,
        names.ROUND_K: done.k,
        names.ROUND_DRAFTED: done.drafted,
        names.ROUND_VERIFIED: done.verified,
        names.ROUND_ACCEPTED: done.accepted,
        names.ROUND_CONFIRMED: done.confirmed,
        names.ROUND_STRATEGY: done.strategy,
        names.ROUND_OVERLAP: done.overlap,
        names.DRAFT_PART: parts.draft_ns,
        names.QUEUE_PART: parts.queue_ns,
        names.COMPUTE_PART: parts.compute_ns,
        names.WIRE_PART: parts.wire_ns,
        names.LINGER_NS: done.target.linger_ns,
        names.DRAFT_COMPUTE_NS: done.draft.compute_ns,
        names.BATCH_SESSIONS: done.batch_sessions,
    }
