"""Record spans of a draft: one a request, and one a batch of steps between two arrivals of requests.

Requests that are not traced make no spans. A step may take less than a millisecond, so it has no own span.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from galley.common.tracing.item_spans import LINK_ITEM, RESULT, SUPERSEDED, ItemSpan
from galley.common.tracing.light_spans import LightSpan, SpanScope
from galley.core import names
from galley.core.content import Miss
from galley.core.errors import GalleyError
from galley.core.scheduler.messages import Superseded
from galley.pb.galley.v1 import galley_pb2 as pb
from services.draft.drafter import Done, ProposeJob

POOL = "draft"


class ProposeSpan(ItemSpan):
    """The span of a request for a proposal."""

    def __init__(self, spans: SpanScope | None, item: pb.ProposeItem) -> None:
        super().__init__(spans, names.PROPOSE, item.slice.traceparent, item.slice.session_id)
        # k and strategy only: the job holds a session's tokens.
        self._request: tuple[int, str] | None = None
        self._done: Done | None = None

    def requested(self, job: ProposeJob) -> None:
        """Keep k and strategy of a valid request."""
        self._request = job.k, job.strategy

    def answered(self, job: ProposeJob, done: Done) -> None:
        """Keep the outcome; errors are for `failed`."""
        if self.span is None:
            return
        self._done, outcome = done, done.outcome
        if isinstance(outcome, Miss):
            self.missed(POOL, outcome, job.slice.start)
        elif isinstance(outcome, Superseded):
            self.outcome = SUPERSEDED
        elif not isinstance(outcome, GalleyError):
            self.outcome = RESULT

    def end(self) -> None:
        """End the span of an answered or cancelled request."""
        if self.span is not None:
            self.close(partial(_set_item_attributes, self._request, self._done))


def _set_item_attributes(request: tuple[int, str] | None, done: Done | None, span: LightSpan) -> None:
    attributes = span.attributes
    if request is not None:
        attributes[names.K], attributes[names.STRATEGY] = request
    if done is None:
        return
    attributes[names.QUEUE_NS] = done.queue_ns
    attributes[names.COMPUTE_NS] = done.compute_ns
    attributes[names.BATCH_SESSIONS] = done.sessions
    if not isinstance(done.outcome, Miss | Superseded | GalleyError):
        attributes[names.DRAFTED] = len(done.outcome.draft_tokens)
        attributes[names.KV_LEN] = done.outcome.kv_len


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
        completer = partial(_set_batch_attributes, self._items, self._sessions, self._steps)
        self._spans.root(names.DRAFT_BATCH, self._began_ns, completer).end(self._ended_ns)
        self._items = {}
        self._steps = self._sessions = 0


def _set_batch_attributes(items: dict[LightSpan, None], sessions: int, steps: int, span: LightSpan) -> None:
    span.attributes |= {names.BATCH_SESSIONS: sessions, names.BATCH_STEPS: steps}
    span.link_to(items, LINK_ITEM)
