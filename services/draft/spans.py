"""Record spans of a draft: one a request, and one a batch of steps between two arrivals of requests.

Requests that are not traced make no spans. A step may take less than a millisecond, so it has no own span.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from galley.common.tracing.item_spans import LINK_ITEM
from galley.common.tracing.light_spans import LightSpan, SpanScope
from galley.core import names
from services.draft.drafter import Done, Proposed, ProposeJob


def set_request(span: LightSpan | None, job: ProposeJob) -> None:
    """Set what a valid request asks for."""
    if span is not None:
        span.attributes |= {names.K: job.k, names.STRATEGY: job.strategy}


def set_result(span: LightSpan | None, done: Done) -> None:
    """Set what an answered request cost, and the size of its proposal."""
    if span is None:
        return
    span.attributes |= {
        names.QUEUE_NS: done.queue_ns,
        names.COMPUTE_NS: done.compute_ns,
        names.BATCH_SESSIONS: done.sessions,
    }
    if isinstance(done.outcome, Proposed):
        span.attributes |= {
            names.DRAFTED: len(done.outcome.draft_tokens),
            names.KV_LEN: done.outcome.kv_len,
        }


class BatchSpans:
    """The span of the current steps, until requests arrive or none are left."""

    def __init__(self, spans: SpanScope | None) -> None:
        """`spans` is None if traces are off."""
        self._spans = spans
        # The spans of the requests that took part, in order of arrival.
        self._items: dict[LightSpan, None] = {}
        self._began_ns = self._ended_ns = 0
        self._steps = 0
        self._sessions = 0

    def stepped(self, items: Sequence[LightSpan], took_ns: int, sessions: int, steps: int) -> None:
        """Add `steps` of `sessions` sessions that ended now; `items` are the traced requests."""
        self._ended_ns = time.time_ns()
        if not self._items:
            self._began_ns = self._ended_ns - took_ns
        self._items.update(dict.fromkeys(items))
        self._steps += steps
        self._sessions = max(self._sessions, sessions)

    def end(self) -> None:
        """End the batch; later steps are another."""
        if self._spans is None or not self._items:
            return
        # Created at its end, as nothing refers to it, in a trace of its own, as it belongs to several.
        span = self._spans.root(names.DRAFT_BATCH, self._began_ns)
        span.attributes |= {names.BATCH_SESSIONS: self._sessions, names.BATCH_STEPS: self._steps}
        span.link_to(self._items, LINK_ITEM)
        span.end(self._ended_ns)
        self._items = {}
        self._steps = self._sessions = 0
