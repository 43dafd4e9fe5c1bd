"""Spans of rounds: each lasts from its first request to its verdict; under credit, from verdict to verdict.

Requests of a round name its span as their parent, so the span's id is drawn with the first request. A span
ends once the token log holds the round's tokens, so that it has the duration of the commit. Its other
attributes are computed by the exporting thread.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from opentelemetry.util.types import AnyValue, Attributes

from galley.common.tracing.light_spans import Completer, LightSpan, names_a_span
from galley.common.tracing.telemetry import fail
from galley.core import names
from galley.core.session.events import RoundEnded
from galley.core.session.machine import Session
from galley.core.session.ports import Replica
from services.gateway.telemetry.spans import RequestSpan, TraceOptions

_BATCH_LINK = {names.LINK: names.LINK_BATCH}


class RoundSpans:
    """Record the rounds of one stream, of which at most one is open."""

    def __init__(self, request: RequestSpan, options: TraceOptions, session: Session) -> None:
        self.slowest_ns = 0
        self.slowest_position = 0
        self.slowest_commit_ns = 0
        self.cached_tokens = 0
        self._request = request
        self._options = options
        self._session = session
        self._index = 0
        self._open = 0  # id of the open round's span, 0 while it has none
        self._opened_ns = 0
        self._is_new_request = False
        self._events: list[tuple[str, Attributes, int]] = []
        # Spans of rounds not yet committed: position after their last token, end time.
        self._uncommitted: deque[tuple[int, int, LightSpan]] = deque()

    def parent_id(self, now_ns: int) -> int:
        """Return the id of the open round's span; 0 if the round may not be recorded."""
        if not self._open and self._options.rounds == "all":
            self._open = self._request.new_id()
            self._opened_ns = now_ns
        return self._open

    def event(self, name: str, attributes: Attributes) -> None:
        """Add an event to the open round, or to the next."""
        self._events.append((name, attributes, self._request.now_ns()))

    def target_requested(self) -> None:
        """Note a new request to the target: its first verdict tells how many tokens were cached."""
        self._is_new_request = True

    def ended(self, done: RoundEnded, draft: Replica | None, target: Replica | None) -> None:
        took_ns = done.ended_ns - done.started_ns
        if took_ns > self.slowest_ns or not self._index:
            self.slowest_ns, self.slowest_position = took_ns, done.position
        if not self._index:
            self.cached_tokens = done.kv_reused
        offset_ns = self._request.offset_ns
        start_ns = done.started_ns + offset_ns
        span = None
        if self._is_recorded(took_ns):
            reused = done.kv_reused if self._is_new_request else None
            span = self._span(start_ns, partial(_set_attributes, done, self._index, draft, target, reused))
            if self._options.content:
                span.attributes[names.ROUND_TEXT] = self._text(done)
            self._uncommitted.append((done.position + done.confirmed, done.ended_ns + offset_ns, span))
        if self._events:
            self._place_events(span, start_ns)
        self._index += 1
        self._is_new_request = False

    def committed(self, length: int, took_ns: int) -> None:
        """End the spans of rounds within the first `length` tokens."""
        self.slowest_commit_ns = max(self.slowest_commit_ns, took_ns)
        while self._uncommitted and self._uncommitted[0][0] <= length:
            _, end_ns, span = self._uncommitted.popleft()
            span.attributes[names.COMMIT_NS] = took_ns
            span.end(end_ns)

    def stop(self, failure: str | None) -> None:
        """End all spans; `failure` is the error type if the session failed."""
        for _, end_ns, uncommitted in self._uncommitted:
            uncommitted.end(end_ns)
        self._uncommitted.clear()
        # A round that has an id has children, which would be orphans without it.
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

    def _is_recorded(self, took_ns: int) -> bool:
        if self._options.rounds == "slow":
            return took_ns > self._options.slow_ns
        return self._options.rounds == "all"

    def _span(self, start_ns: int, completer: Completer | None = None) -> LightSpan:
        span_id, self._open = self._open, 0
        return self._request.child(names.ROUND, start_ns, span_id=span_id, completer=completer)

    def _place_events(self, span: LightSpan | None, start_ns: int) -> None:
        """Give events from before the round, or from one that is not recorded, to the request."""
        for name, attributes, at_ns in self._events:
            if span is None or at_ns < start_ns:
                self._request.event(name, attributes, at_ns)
            else:
                span.add_event(name, attributes, at_ns)
        self._events.clear()

    def _text(self, done: RoundEnded) -> AnyValue:
        first = done.position - len(self._session.spec.prompt)
        return self._session.answer.texts(first, first + done.confirmed)


def _set_attributes(
    done: RoundEnded,
    index: int,
    draft: Replica | None,
    target: Replica | None,
    reused: int | None,
    span: LightSpan,
) -> None:
    """`reused` is None unless the round is the first of its request."""
    parts, attributes = done.parts, span.attributes
    attributes |= {
        names.ROUND_INDEX: index,
        names.ROUND_POSITION: done.position,
        names.ROUND_K: done.k,
        names.ROUND_DRAFTED: done.drafted,
        names.ROUND_VERIFIED: done.verified,
        names.ROUND_ACCEPTED: done.accepted,
        names.ROUND_CONFIRMED: done.confirmed,
        names.DRAFT_PART: parts.draft_ns,
        names.QUEUE_PART: parts.queue_ns,
        names.COMPUTE_PART: parts.compute_ns,
        names.WIRE_PART: parts.wire_ns,
        names.LINGER_NS: done.target.linger_ns,
        names.DRAFT_COMPUTE_NS: done.draft.compute_ns,
        names.BATCH_SESSIONS: done.batch_sessions,
        names.ROUND_STRATEGY: done.strategy,
        names.ROUND_OVERLAP: done.overlap,
    }
    if draft is not None and (done.k or done.drafted):
        attributes[names.DRAFT_REPLICA] = draft.address
    if target is not None:
        attributes[names.TARGET_REPLICA] = target.address
    if reused is not None:
        attributes[names.KV_REUSED] = reused
    if names_a_span(done.batch_span):
        span.link_to((done.batch_span,), _BATCH_LINK)
