"""The span of each round, begun with its first request and ended with its verdict.

Under credit, a round that asks for nothing begins where the one before ended.

Calls to the pools are made while the round's span is current, so that theirs are its children.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.core.events import RoundEnded

_tracer = trace.get_tracer("galley.gateway")


class RoundSpans:
    """At most one round is open at a time."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._span: trace.Span | None = None
        self._last_end_ns: int | None = None

    def begin(self) -> None:
        """Open a round unless one is open."""
        if self._span is None:
            self._span = _tracer.start_span("round")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within, the round's span is the current one."""
        if self._span is None:
            yield
            return
        with trace.use_span(self._span):
            yield

    def end(self, done: RoundEnded) -> None:
        """Close the round with what came of it."""
        if self._span is None:
            self._span = _tracer.start_span("round", start_time=self._last_end_ns)
        self._last_end_ns = time.time_ns()
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "galley.session_id": self._session_id,
                    "galley.position": done.position,
                    "galley.drafted": done.drafted,
                    "galley.verified": done.verified,
                    "galley.accepted": done.accepted,
                    "galley.confirmed": done.confirmed,
                    "galley.draft.wait_ns": done.draft_wait_ns,
                    "galley.verify.wait_ns": done.verify_wait_ns,
                    "galley.draft.compute_ns": done.draft.compute_ns,
                    "galley.verify.queue_ns": done.target.queue_ns,
                    "galley.verify.compute_ns": done.target.compute_ns,
                }
            )
        self._span.end(self._last_end_ns)
        self._span = None

    def abandon(self) -> None:
        """Close a round that came to nothing."""
        if self._span is not None:
            self._span.set_attribute("galley.abandoned", value=True)
            self._span.end()
            self._span = None
