"""Where spans leave the process: the SDK's exporter, given our own spans as the bytes that they are sent as.

Imports the SDK: to be imported where traces are on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from galley.common.tracing.light_spans import LeanSpan
from galley.common.tracing.otlp_encoding import encoded
from galley.common.tracing.otlp_tls import ReloadingExporter

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class LeanExporter(ReloadingExporter, OTLPSpanExporter):
    """As the `OTEL_EXPORTER_OTLP_*` environment says. Spans of the SDK's own may be among ours."""

    signal = "traces"

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()
        self._client: Any = _BytesStub(cast("grpc.Channel", self._channel))

    def _translate_data(self, data: Sequence[Any]) -> Any:
        """Requests may be joined as they stand: all that they hold is repeated."""
        ours = encoded(span for span in data if isinstance(span, LeanSpan))
        others = [span for span in data if not isinstance(span, LeanSpan)]
        return ours + super()._translate_data(others).SerializeToString() if others else ours


class _BytesStub:
    """Sends requests that are bytes already."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Export: Any = channel.unary_unary(_EXPORT, None, ExportTraceServiceResponse.FromString)
