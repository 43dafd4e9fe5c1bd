"""Where spans leave the process: the SDK's exporter with an encoder that costs less.

Imports the SDK: to be imported where traces are on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.common.otlp_encoding import encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan


class LeanExporter(OTLPSpanExporter):
    """As the `OTEL_EXPORTER_OTLP_*` environment says. An SDK that encodes elsewhere does it itself."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return ExportTraceServiceRequest.FromString(encoded(data))
