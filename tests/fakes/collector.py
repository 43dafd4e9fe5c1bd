"""An OTLP collector that keeps what a process exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_rpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.fakes.waiting import Watch


class Collector(otlp_rpc.TraceServiceServicer):
    def __init__(self, directory: Path) -> None:
        self.endpoint = f"unix:{directory / 'otlp'}"
        self.spans: list[Span] = []
        self.exported = b""
        self._watch = Watch()

    async def Export(self, request: otlp.ExportTraceServiceRequest, context: Any) -> Any:
        self.exported += request.SerializeToString()
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self._watch.changed()
        return otlp.ExportTraceServiceResponse()

    async def has(self, *names: str, trace_id: bytes | None = None) -> None:
        def came() -> set[str]:
            spans = self.spans if trace_id is None else self.in_trace(trace_id)
            return {span.name for span in spans}

        await self._watch.until(lambda: set(names) <= came())

    def in_trace(self, trace_id: bytes) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    async def __aenter__(self) -> Collector:
        self._server = grpc.aio.server()
        otlp_rpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # untyped
        self._server.add_insecure_port(self.endpoint)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
