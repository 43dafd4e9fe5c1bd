"""Spans of a target: one a request, one a step, one a rank.

The span of a step is in the trace of the first traced request in it, and links to all. Requests that are not
traced make no span, nor do steps without a traced request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from operator import add

from opentelemetry import trace

from galley.common.tracing.item_spans import LINK_ITEM, ItemSpan
from galley.common.tracing.light_spans import LightSpan, SpanScope, packed, unpacked
from galley.common.tracing.telemetry import fail
from galley.common.wire.status import error_type
from galley.core import names
from galley.core.errors import GalleyError
from galley.core.scheduler.messages import BatchInfo, Confirmed, Response
from galley.core.step import StepTrace
from galley.pb.galley.v1 import galley_pb2 as pb
from services.target.engine.protocol import TargetEngine

# The counts of a request's results, in the order of their attributes.
_COUNTS = (names.VERDICTS, names.CONFIRMED, names.VERIFIED, names.ACCEPTED, names.KV_REUSED)


class VerifySpan(ItemSpan):
    """The span of a verify request: its credit, the number of its verdicts, and sums of their tokens."""

    def __init__(self, spans: SpanScope | None, item: pb.VerifyItem) -> None:
        super().__init__(spans, names.VERIFY, "target", item.slice)
        self._credit = item.credit
        self._counts = [0] * len(_COUNTS)

    def responded(self, response: Response) -> None:
        """Count a response; errors are for `failed`."""
        if self.span is None:
            return
        outcome = response.outcome
        if not isinstance(outcome, Confirmed):
            self.answered(outcome, preempted=response.preempted)
            return
        counts = (1, len(outcome.tokens), outcome.verified, outcome.accepted, outcome.kv_reused)
        self._counts = list(map(add, self._counts, counts))
        if not outcome.more:
            self.answered(outcome)

    def end(self) -> None:
        if self.span is not None:
            self.span.attributes |= {
                names.CREDIT: self._credit,
                **dict(zip(_COUNTS, self._counts, strict=True)),
            }
        super().end()


class BatchSpans:
    """The traced requests that are open, and the spans of the steps that they take part in."""

    def __init__(self, spans: SpanScope | None) -> None:
        self._spans = spans
        self._items: dict[int, LightSpan] = {}

    def joins(self, item: int, span: LightSpan | None) -> None:
        if span is not None:
            self._items[item] = span

    def leaves(self, item: int) -> None:
        if self._items:
            self._items.pop(item, None)

    def begin(self, engine: TargetEngine) -> Batch | None:
        """Return the span of the planned step; None if no request in it is traced."""
        if self._spans is None or not self._items:
            return None
        facts = engine.current_batch
        items = [span for item in facts.request_ids if (span := self._items.get(item)) is not None]
        if not items:
            return None
        return Batch(self._spans.step_of(items[0], names.VERIFY_BATCH, time.time_ns()), items, facts)


class Batch:
    """The span of a step; `packed` names it in messages."""

    def __init__(self, span: LightSpan, items: Sequence[LightSpan], facts: BatchInfo) -> None:
        self.packed = packed(span.trace_id, span.span_id)
        self.watch = StepTrace(self.packed)
        self._span = span
        self._items = items
        self._facts = facts
        self._rank_ns: Sequence[int] = ()
        self._ended_ns: int | None = None

    def ran(self) -> None:
        """Note the end of the step, on the thread that ran it."""
        self._ended_ns = time.time_ns()
        self._rank_ns = self.watch.rank_ns()

    def concluded(self, info: BatchInfo) -> None:
        """Note what the engine fed, which may be less than planned."""
        self._facts = replace(
            self._facts,
            request_ids=info.request_ids,
            rows=info.rows,
            draft_rows=info.draft_rows,
            prefill_rows=info.prefill_rows,
        )

    def failed(self, error: GalleyError) -> trace.Span:
        """Note that the step failed with the error that its sessions get; return the span, for the log."""
        fail(self._span, error_type(error))
        return self._span

    def end(self) -> None:
        """Close the span, at the time at which the step ended."""
        span, facts = self._span, self._facts
        span.link_to(self._items, LINK_ITEM)
        span.attributes |= {
            names.BATCH_SESSIONS: len(facts.request_ids),
            names.BATCH_ROWS: facts.rows,
            names.BATCH_DRAFT_ROWS: facts.draft_rows,
            names.BATCH_PREFILL_ROWS: facts.prefill_rows,
            names.BATCH_PREFILL_SHARE: facts.prefill_rows / max(1, facts.rows),
            names.FREE_BLOCKS: facts.free_blocks,
            names.QUEUE_DEPTH: facts.queue_depth,
        }
        for name, sessions in ((names.KV_PREEMPTED, facts.preempted), (names.KV_EVICTED, facts.evicted)):
            for session_id in sessions:
                span.add_event(name, {names.SESSION_ID: session_id}, span.start_ns)
        if self._ended_ns is not None:
            span.attributes[names.FORWARD_NS] = self.watch.forward_ns
            span.attributes[names.RANK_FORWARD_NS] = tuple(self._rank_ns)
            if self.watch.mask_wait_ns:
                span.attributes[names.MASK_WAIT_NS] = self.watch.mask_wait_ns
        span.end(self._ended_ns)


def record_rank(spans: SpanScope | None, rank: int, watch: StepTrace) -> None:
    """Record the span of a rank other than 0 in the step of `watch`, which has ended."""
    batch = unpacked(watch.span)
    if spans is None or not batch.is_valid:
        return
    if not spans.keeps(names.RANK_FORWARD, batch.trace_id, batch.span_id):
        return
    ended_ns = time.time_ns()
    ids = batch.trace_id, spans.new_span_id(), batch.span_id
    span = spans.begin(names.RANK_FORWARD, trace.SpanKind.INTERNAL, *ids, ended_ns - watch.forward_ns)
    span.has_remote_parent = True
    span.attributes |= {names.RANK: rank, names.RANK_WAITED_NS: watch.forward_ns - watch.rank_ns()[0]}
    span.end(ended_ns)
