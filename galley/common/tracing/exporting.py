"""Export of spans by OTLP, as the `OTEL_EXPORTER_OTLP_*` environment says.

Imports the SDK: import this module only where traces are on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from galley.common.tracing.light_spans import LightSpan, readable
from galley.common.tracing.otlp_tls import ReloadingExporter

_LOG = logging.getLogger(f"opentelemetry.{__name__}")  # a family whose lines are logged once a minute


class LightSpanExporter(ReloadingExporter, OTLPSpanExporter):
    """Exports light spans and the SDK's own."""

    signal = "traces"

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Complete the spans and send them; called by the thread of the SDK's processor."""
        return super().export(list(_readable(spans)))


def _readable(spans: Sequence[Any]) -> Iterator[ReadableSpan]:
    for span in spans:
        if not isinstance(span, LightSpan):
            yield span
            continue
        try:
            yield readable(span)
        except Exception:  # noqa: BLE001  # one broken span must not lose its batch
            _LOG.exception("span could not be completed: %s", span.name)
