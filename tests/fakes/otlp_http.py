"""A real OTLP collector over HTTP with protobuf, which hands each export to a function."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from ssl import SSLContext
from typing import Any

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces

from tests.fakes.http_server import serving_http
from tests.fakes.otlp_collector import METRICS, TRACES, Take

_PATHS: dict[str, tuple[str, Any, Any]] = {
    "/v1/traces": (TRACES, traces.ExportTraceServiceRequest, traces.ExportTraceServiceResponse),
    "/v1/metrics": (METRICS, metrics.ExportMetricsServiceRequest, metrics.ExportMetricsServiceResponse),
}


@contextmanager
def collecting_http(take: Take, port: int = 0, tls: SSLContext | None = None) -> Iterator[str]:
    """Run the collector; `take` gets the handler as context, which has the request's headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            signal, request, response = _PATHS[self.path]
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers["content-encoding"] == "gzip":
                body = gzip.decompress(body)
            take(signal, request.FromString(body), self)
            answer = response().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with serving_http(Handler, port, tls) as address:
        yield address
