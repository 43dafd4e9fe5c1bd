"""A real OTLP collector over gRPC, which hands each export to a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_rpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces_rpc

TRACES, METRICS = "traces", "metrics"
Take: TypeAlias = Callable[[str, Any, Any], None]
"""A function that gets the signal, the request and its context, on a thread of the collector."""


class _Traces(traces_rpc.TraceServiceServicer):
    def __init__(self, take: Take) -> None:
        self._take = take

    def Export(self, request: Any, context: Any) -> Any:
        self._take(TRACES, request, context)
        return traces.ExportTraceServiceResponse()


class _Metrics(metrics_rpc.MetricsServiceServicer):
    def __init__(self, take: Take) -> None:
        self._take = take

    def Export(self, request: Any, context: Any) -> Any:
        self._take(METRICS, request, context)
        return metrics.ExportMetricsServiceResponse()


@contextmanager
def collecting(take: Take, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    traces_rpc.add_TraceServiceServicer_to_server(_Traces(take), server)  # type: ignore[no-untyped-call]  # untyped
    metrics_rpc.add_MetricsServiceServicer_to_server(_Metrics(take), server)  # type: ignore[no-untyped-call]  # untyped
    address = f"127.0.0.1:{port}"
    bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(None).wait()
