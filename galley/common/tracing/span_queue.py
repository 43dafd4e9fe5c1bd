"""Where spans wait to be exported: a bounded queue, and the thread that sends what is in it.

To hand a span over costs next to nothing and never waits. While nobody takes them, the oldest go.

Imports the SDK: to be imported where traces are on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter

from galley.common.tracing.light_spans import LeanSpan

_LOG = logging.getLogger(f"opentelemetry.{__name__}")  # of the family that is heard once a minute
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Spans that wait, spans of one request, and how long one waits at most while there are few."""

    most: int = 8192  # some tens of MiB
    at_once: int = 1024
    delay_s: float = 5.0

    @classmethod
    def told(cls) -> QueueLimits:
        """What `OTEL_BSP_*` says in place of these; what cannot be is logged and passed over."""
        default = cls()
        most = max(1, round(_told("OTEL_BSP_MAX_QUEUE_SIZE", default.most)))
        at_once = max(1, round(_told("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", default.at_once)))
        delay_s = _told("OTEL_BSP_SCHEDULE_DELAY", default.delay_s * 1e3) / 1e3
        return cls(most, min(at_once, most), delay_s)


def _told(name: str, default: float) -> float:
    said = os.environ.get(name, "")
    try:
        value = float(said) if said else default
    except ValueError:
        value = 0.0
    if 0 < value < float("inf"):
        return value
    _LOG.warning("%s must be a number above 0, is %s; taken as %s", name, said, default)
    return default


class SpanQueue(SpanProcessor):
    """Takes our spans by `put` and the SDK's by `on_end`, from any thread."""

    def __init__(self, exporter: SpanExporter, limits: QueueLimits | None = None) -> None:
        self._exporter = exporter
        self._limits = limits or QueueLimits()
        self._at_once = self._limits.at_once
        self._queue: deque[Any] = deque(maxlen=self._limits.most)
        self._wake = threading.Event()
        self._sending = threading.Lock()
        self._stopped = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, span: LeanSpan | ReadableSpan) -> None:
        """One that has ended."""
        queue = self._queue
        waiting = len(queue)
        queue.append(span)
        if waiting + 1 >= self._at_once:
            self._press(waiting)

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`."""
        if span.context is not None and span.context.trace_flags.sampled:
            self.put(span)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002  # the exporter has its own
        """Send what is there now."""
        self._send(1)
        return True

    def shutdown(self) -> None:
        """Send what is there and no more; once."""
        if self._stopped:
            return
        self._stopped = True
        self._wake.set()
        self._thread.join(_STOP_S)
        self._exporter.shutdown()

    def _press(self, waiting: int) -> None:
        """There is enough for a request, at least."""
        if waiting == self._limits.most:
            self._dropped += 1
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            woken = self._wake.wait(self._limits.delay_s)
            self._wake.clear()
            self._send(self._at_once if woken else 1)
        self._send(1)

    def _send(self, least: int) -> None:
        """All that there is, as long as it is at least so many."""
        with self._sending, suppress_instrumentation():
            while len(self._queue) >= least:
                count = min(len(self._queue), self._at_once)
                self._export([self._queue.popleft() for _ in range(count)])

    def _export(self, spans: list[Any]) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            _LOG.warning("%s spans were dropped: no more than %s wait", dropped, self._limits.most)
        try:
            self._exporter.export(spans)
        except Exception:  # noqa: BLE001  # whatever it is, spans are to be sent on
            _LOG.exception("spans cannot be exported")
