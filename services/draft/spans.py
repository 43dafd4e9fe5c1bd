"""What a draft says to a trace: a span of each item, and one of the steps between two comings of items.

Nothing is made of an item that nobody traces. A step may take less than a millisecond: none has its own span.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry.context import Context

from services.common.item_spans import RESULT, SUPERSEDED, ItemSpan
from services.core import trace_names as names
from services.core.content import Miss
from services.core.errors import GalleyError
from services.core.verify_items import Overtaken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.trace import Link, Tracer

    from services.common.pb.galley.v1 import galley_pb2 as pb
    from services.draft.drafter import ProposeJob
    from services.draft.loop import Done

POOL = "draft"


class ProposeSpan(ItemSpan):
    """Of an item to propose for."""

    def __init__(self, tracer: Tracer, item: pb.ProposeItem) -> None:
        super().__init__(tracer, names.PROPOSE, item.slice.traceparent, item.slice.session_id)
        self._attributes: dict[str, str | int] = {}

    def asked(self, job: ProposeJob) -> None:
        """It is valid, and asks for this."""
        if self.traced:
            self._attributes |= {names.K: job.k, names.STRATEGY: job.strategy}

    def answered(self, job: ProposeJob, done: Done) -> None:
        """What came of it; what it raises as an error is for `failed`."""
        if not self.traced:
            return
        self._attributes |= {
            names.QUEUE_NS: done.queue_ns,
            names.COMPUTE_NS: done.compute_ns,
            names.BATCH_SESSIONS: done.sessions,
        }
        outcome = done.outcome
        if isinstance(outcome, Miss):
            self.missed(POOL, outcome, job.slice.start)
        elif isinstance(outcome, Overtaken):
            self.outcome = SUPERSEDED
        elif not isinstance(outcome, GalleyError):
            self.outcome = RESULT
            self._attributes |= {names.DRAFTED: len(outcome.draft_tokens), names.KV_LEN: outcome.kv_len}

    def end(self) -> None:
        """It is answered, or given up."""
        if self.traced:
            self.close(self._attributes)


class BatchSpans:
    """The span of the steps under way, kept as what it will say, until items come or none are left."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        # Of the items that took part, in the order in which they came.
        self._links: dict[Link, None] = {}
        self._began_ns = self._ended_ns = 0
        self._steps = 0
        self._sessions = 0

    def stepped(self, links: Sequence[Link], took_ns: int, sessions: int, steps: int) -> None:
        """So many sessions were opened, or took so many steps, until now; `links` are to those traced."""
        self._ended_ns = time.time_ns()
        if not self._links:
            self._began_ns = self._ended_ns - took_ns
        self._links.update(dict.fromkeys(links))
        self._steps += steps
        self._sessions = max(self._sessions, sessions)

    def end(self) -> None:
        """What steps from here on is another batch."""
        if not self._links:
            return
        # Made when all is known: nothing refers to it. A trace of its own, as it belongs to several.
        self._tracer.start_span(
            names.DRAFT_BATCH,
            Context(),
            attributes={names.BATCH_SESSIONS: self._sessions, names.BATCH_STEPS: self._steps},
            links=list(self._links),
            start_time=self._began_ns,
        ).end(self._ended_ns)
        self._links = {}
        self._steps = self._sessions = 0
