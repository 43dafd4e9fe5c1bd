"""What a target says to a trace: a span of each item, one of each pass that links to those, one of each rank.

Nothing is made of an item, or of a pass, that nobody traces.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context

from services.common.item_spans import (
    CACHE_MISS,
    RESULT,
    SUPERSEDED,
    ItemSpan,
    packed,
    tell_failure,
    unpacked,
)
from services.core import trace_names as names
from services.core.content import Miss
from services.core.step import Watch
from services.core.verify_items import Confirmed, Overtaken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.common.pb.galley.v1 import galley_pb2 as pb
    from services.core.errors import GalleyError
    from services.core.scheduler import Scheduler
    from services.core.verify_items import Answer, PassFacts

POOL = "target"


class VerifySpan(ItemSpan):
    """Of an item to verify: it counts what came of it."""

    def __init__(self, tracer: trace.Tracer, item: pb.VerifyItem) -> None:
        super().__init__(tracer, names.VERIFY, item.slice.traceparent, item.slice.session_id)
        self._start = item.slice.start
        self._credit = item.credit
        self._verdicts = 0
        self._confirmed = 0
        self._verified = 0
        self._accepted = 0
        self._reused = 0

    def answered(self, answer: Answer) -> None:
        """One more answer; what it raises as an error is for `failed`."""
        if not self.traced:
            return
        outcome = answer.outcome
        if isinstance(outcome, Confirmed):
            self._count(outcome)
        elif isinstance(outcome, Miss) and answer.preempted:
            self.outcome = CACHE_MISS
            self.span.add_event(names.KV_PREEMPTED, {names.POOL: POOL, names.HAVE: outcome.have})
        elif isinstance(outcome, Miss):
            self.missed(POOL, outcome, self._start)
        elif isinstance(outcome, Overtaken):
            self.outcome = SUPERSEDED

    def _count(self, verdict: Confirmed) -> None:
        self._verdicts += 1
        self._confirmed += len(verdict.tokens)
        self._verified += verdict.verified
        self._accepted += verdict.accepted
        self._reused += verdict.kv_reused
        if not verdict.more:
            self.outcome = RESULT

    def end(self) -> None:
        """It stands no more."""
        if self.traced:
            self.close(
                {
                    names.CREDIT: self._credit,
                    names.VERDICTS: self._verdicts,
                    names.CONFIRMED: self._confirmed,
                    names.VERIFIED: self._verified,
                    names.ACCEPTED: self._accepted,
                    names.KV_REUSED: self._reused,
                }
            )


class BatchSpans:
    """Which of the items that stand are traced, and the spans of the passes that they take part in."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._links: dict[int, trace.Link] = {}

    def joins(self, item: int, link: trace.Link | None) -> None:
        """An item stands, of whose span this is the link, if it has one."""
        if link is not None:
            self._links[item] = link

    def leaves(self, item: int) -> None:
        """It stands no more."""
        if self._links:
            self._links.pop(item, None)

    def begin(self, scheduler: Scheduler) -> Batch | None:
        """Of the pass that is under way; None where no item in it is traced."""
        if not self._links:
            return None
        facts = scheduler.under_way
        links = [link for item in facts.items if (link := self._links.get(item)) is not None]
        if not links:
            return None
        # A trace of its own, as it belongs to several; the sampler goes by the link.
        span = self._tracer.start_span(names.VERIFY_BATCH, Context(), links=links[:1])
        return Batch(span, links[1:], facts) if span.is_recording() else None


class Batch:
    """The span of a pass; `packed` is its name in messages."""

    def __init__(self, span: trace.Span, links: Sequence[trace.Link], facts: PassFacts) -> None:
        """`links` are those that the span does not have yet."""
        self.span = span
        self.packed = packed(span.get_span_context())
        self.watch = Watch(self.packed)
        self._links = links
        self._facts: PassFacts | None = facts
        self._rank_ns: Sequence[int] = ()
        self._ended_ns: int | None = None

    def describe(self) -> None:
        """Say what the pass consists of; to be called while it runs, when there is time."""
        facts, self._facts = self._facts, None
        if facts is None:
            return
        for link in self._links:
            self.span.add_link(link.context, link.attributes)
        self.span.set_attributes(
            {
                names.BATCH_SESSIONS: len(facts.items),
                names.BATCH_ROWS: facts.rows,
                names.BATCH_DRAFT_ROWS: facts.draft_rows,
                names.BATCH_PREFILL_ROWS: facts.prefill_rows,
                names.BATCH_PREFILL_SHARE: facts.prefill_rows / facts.rows,
                names.FREE_BLOCKS: facts.free_blocks,
                names.QUEUE_DEPTH: facts.queue_depth,
            }
        )
        for name, sessions in ((names.KV_PREEMPTED, facts.preempted), (names.KV_EVICTED, facts.evicted)):
            for session_id in sessions:
                self.span.add_event(name, {names.SESSION_ID: session_id})

    def ran(self) -> None:
        """On the thread of the pass: it is over."""
        self._ended_ns = time.time_ns()
        self._rank_ns = self.watch.rank_ns()

    def failed(self, error: GalleyError) -> None:
        """The pass came to nothing; this is what its sessions are told."""
        tell_failure(self.span, error)

    def end(self) -> None:
        """Close the span, at the time at which the pass was over."""
        self.describe()
        if self._ended_ns is not None:
            self.span.set_attributes(
                {names.FORWARD_NS: self.watch.forward_ns, names.RANK_FORWARD_NS: tuple(self._rank_ns)}
            )
        self.span.end(self._ended_ns)


def tell_rank(tracer: trace.Tracer, rank: int, watch: Watch) -> None:
    """A span of what a rank other than the first did in the pass of this watch, which is over."""
    ended_ns = time.time_ns()
    pass_span = trace.NonRecordingSpan(unpacked(watch.span))
    span = tracer.start_span(
        names.RANK_FORWARD,
        trace.set_span_in_context(pass_span, Context()),
        attributes={
            names.RANK: rank,
            names.RANK_WAITED_NS: watch.forward_ns - watch.rank_ns()[0],
        },
        start_time=ended_ns - watch.forward_ns,
    )
    span.end(ended_ns)
