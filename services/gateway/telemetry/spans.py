"""Spans of one request, of its rounds and of the calls that it makes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Literal, Self

from opentelemetry import context as current
from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AnyValue, Attributes

from galley.common.tracing.light_spans import Completer, LightSpan, SpanScope, names_a_span
from galley.common.tracing.telemetry import fail, traceparent_of
from galley.common.wire.status import error_type
from galley.core import names
from galley.core.errors import StoreUnavailable
from galley.core.session.events import Clock, Replica, RoundEnded, SourceTokens
from galley.core.session.machine import Session

COMMIT = "commit"
RENEW = "renew"

SLOW_COMMIT_NS = 5_000_000
"""Faster commits that succeed at once get no span: the span of their round has their duration."""

_BATCH_LINK = {names.LINK: names.LINK_BATCH}
_SPAN_ID_INDEX = len("00-") + 32 + len("-")


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The recorded rounds (`slow` means longer than `slow_ns`), and whether text is recorded."""

    rounds: Literal["all", "slow", "none"] = "all"
    slow_ns: int = 250_000_000
    content: bool = False


@dataclass(frozen=True, slots=True)
class TraceStart:
    """The start of a request's trace: `context` is its span's, `parent` the caller's.

    `offset_ns` is Unix time minus the clock's time. `start_ns` is in Unix time. `transport` gets
    `http.response.status_code` when that is sent.
    """

    scope: SpanScope
    options: TraceOptions
    context: SpanContext
    parent: SpanContext | None
    clock: Clock
    offset_ns: int
    start_ns: int
    attributes: dict[str, AnyValue] = field(default_factory=dict)
    transport: Mapping[str, AnyValue] = field(default_factory=dict)

    def now_ns(self) -> int:
        return self.clock.now_ns() + self.offset_ns


class RequestSpan:
    """The span of a sampled request. Times are Unix nanoseconds."""

    def __init__(self, start: TraceStart, span: trace.Span) -> None:
        """Make `span` the current one."""
        self.span = span
        self.context = span.get_span_context()
        self.traceparent = traceparent_of(self.context)
        self.clock_ns = start.clock.now_ns
        self.offset_ns = start.offset_ns
        self.new_id = start.scope.new_span_id
        self._begin = start.scope.begin
        self._trace_id, self._id = self.context.trace_id, self.context.span_id
        self._state = self.context.trace_state
        self._traceparent_prefix = self.traceparent[:_SPAN_ID_INDEX]
        current.attach(trace.set_span_in_context(span))  # each call runs in a context of its own

    def now_ns(self) -> int:
        return self.clock_ns() + self.offset_ns

    def event(self, name: str, attributes: Attributes = None, at_ns: int | None = None) -> None:
        self.span.add_event(name, attributes, self.now_ns() if at_ns is None else at_ns)

    def child(
        self,
        name: str,
        start_ns: int,
        *,
        span_id: int = 0,
        parent_id: int = 0,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: dict[str, AnyValue] | None = None,
        completer: Completer | None = None,
    ) -> LightSpan:
        """Start a span below this one, or below `parent_id`; with `span_id` if it was drawn before."""
        span_id = span_id or self.new_id()
        span = self._begin(
            name, kind, self._trace_id, span_id, parent_id or self._id, start_ns, completer, attributes
        )
        if self._state:
            span.trace_state = self._state
        return span

    def child_traceparent(self, span: LightSpan) -> str:
        return f"{self._traceparent_prefix}{span.span_id:016x}-01"


class CallSpan:
    """The span of a request to a replica; `traceparent` is sent with it."""

    __slots__ = ("_failed", "_request", "_span", "traceparent")

    def __init__(
        self, traceparent: str = "", span: LightSpan | None = None, request: RequestSpan | None = None
    ) -> None:
        """Record nothing if `span` is None."""
        self.traceparent = traceparent
        self._span = span
        self._request = request
        self._failed = False

    def failed(self, kind: str) -> None:
        """Record a gRPC status in lower case; only the first counts."""
        if self._span is not None and not self._failed:
            self._failed = True
            fail(self._span, kind)

    def end(self) -> None:
        if self._span is not None and self._request is not None:
            self._span.end(self._request.now_ns())


class StoreCall:
    """The span of a call to the session store with its retries; keys and values are not recorded.

    Record nothing if `request` is None.
    """

    __slots__ = ("_operation", "_request", "_retries", "_start_ns")

    def __init__(self, request: RequestSpan | None, operation: str, start_ns: int) -> None:
        self._request = request
        self._operation = operation
        self._start_ns = start_ns
        self._retries: list[tuple[int, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def retried(self, error: StoreUnavailable) -> None:
        if self._request is not None:
            self._retries.append((self._request.now_ns(), error.public_message))

    def end(self, error: BaseException | None = None) -> None:
        """End the span; a cancelled call did not fail."""
        request, failed = self._request, isinstance(error, Exception)
        if request is None:
            return
        end_ns = request.now_ns()
        if not self._is_recorded(end_ns - self._start_ns, failed=failed):
            return
        span = request.child(
            f"{names.EVALSHA} {self._operation}",
            self._start_ns,
            kind=SpanKind.CLIENT,
            attributes={
                names.DB_SYSTEM: names.REDIS,
                names.DB_OPERATION: names.EVALSHA,
                names.STORE_OPERATION: self._operation,
            },
        )
        if self._retries:
            span.set_attribute(names.STORE_ATTEMPTS, len(self._retries) + 1)
        for at_ns, why in self._retries:
            span.add_event(names.STORE_RETRIED, {names.REASON: why}, at_ns)
        if error is not None and failed:
            fail(span, error_type(error))
        span.end(end_ns)

    def _is_recorded(self, took_ns: int, *, failed: bool) -> bool:
        if self._operation == RENEW:
            return failed
        return failed or bool(self._retries) or took_ns > SLOW_COMMIT_NS or self._operation != COMMIT


class RoundSpans:
    """Record the rounds of one stream, of which at most one is open.

    A round lasts from its first request to its verdict; under credit, from verdict to verdict. Its requests
    name its span as their parent, so the span's id is drawn with the first one. The span ends once the token
    log holds the round's tokens, so that it has the duration of the commit.
    """

    def __init__(self, request: RequestSpan, options: TraceOptions, session: Session) -> None:
        self.slowest_ns = 0
        self.slowest_position = 0
        self.slowest_commit_ns = 0
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
        took_ns, verdict = done.ended_ns - done.started_ns, done.verdict
        if took_ns > self.slowest_ns or not self._index:
            self.slowest_ns, self.slowest_position = took_ns, verdict.position
        offset_ns = self._request.offset_ns
        start_ns = done.started_ns + offset_ns
        span = None
        if self._is_recorded(took_ns):
            reused = verdict.kv_reused if self._is_new_request else None
            span = self._span(start_ns, partial(_set_attributes, done, self._index, draft, target, reused))
            if self._options.content:
                span.attributes[names.ROUND_TEXT] = self._text(done)
            self._uncommitted.append((verdict.position + done.confirmed, done.ended_ns + offset_ns, span))
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
        """Add the pending events to `span`, or to the request if there is none or they precede the round."""
        for name, attributes, at_ns in self._events:
            if span is None or at_ns < start_ns:
                self._request.event(name, attributes, at_ns)
            else:
                span.add_event(name, attributes, at_ns)
        self._events.clear()

    def _text(self, done: RoundEnded) -> AnyValue:
        first = done.verdict.position - len(self._session.spec.prompt)
        return self._session.answer.texts(first, first + done.confirmed)


def describe_sources(sources: Iterable[SourceTokens]) -> tuple[str, ...]:
    """Return accepted and verified draft tokens by source, such as `ngram 3/4`."""
    return tuple([f"{of.source} {of.accepted}/{of.verified}" for of in sources if of.verified])


def describe_counts(accepted: Sequence[int], verified: Sequence[int]) -> tuple[str, ...]:
    """Return accepted and verified counts by their index, such as `0 3/4`."""
    pairs = enumerate(zip_longest(accepted, verified, fillvalue=0))
    return tuple([f"{index} {right}/{of}" for index, (right, of) in pairs])


def _set_attributes(
    done: RoundEnded,
    index: int,
    draft: Replica | None,
    target: Replica | None,
    reused: int | None,
    span: LightSpan,
) -> None:
    """Set the attributes of a round's `span`; `reused` is None unless the round is its request's first."""
    verdict, parts, attributes = done.verdict, done.parts, span.attributes
    attributes |= {
        names.ROUND_INDEX: index,
        names.ROUND_POSITION: verdict.position,
        names.ROUND_K: done.k,
        names.ROUND_DRAFTED: done.drafted,
        names.ROUND_VERIFIED: verdict.verified,
        names.ROUND_ACCEPTED: done.accepted,
        names.ROUND_CONFIRMED: done.confirmed,
        names.DRAFT_PART: parts.draft_ns,
        names.QUEUE_PART: parts.queue_ns,
        names.COMPUTE_PART: parts.compute_ns,
        names.WIRE_PART: parts.wire_ns,
        names.LINGER_NS: verdict.timing.linger_ns,
        names.DRAFT_COMPUTE_NS: done.draft.compute_ns,
        names.BATCH_SESSIONS: verdict.sessions,
        names.ROUND_STRATEGY: done.strategy,
        names.ROUND_OVERLAP: done.overlap,
    }
    if draft is not None and (done.k or done.drafted):
        attributes[names.DRAFT_REPLICA] = draft.address
    if target is not None:
        attributes[names.TARGET_REPLICA] = target.address
    if reused is not None:
        attributes[names.KV_REUSED] = reused
    if verdict.verified:
        attributes[names.ROUND_SOURCES] = describe_sources(done.sources)
    if (tree := done.tree) is not None:
        attributes[names.ROUND_DEPTH] = tree.depth
        attributes[names.ROUND_RANKS] = describe_counts(tree.accepted_by_rank, tree.verified_by_rank)
    if names_a_span(verdict.batch_span):
        span.link_to((verdict.batch_span,), _BATCH_LINK)
