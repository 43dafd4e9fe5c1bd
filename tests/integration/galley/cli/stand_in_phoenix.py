"""Acts as Arize Phoenix does, as far as its documents say: `phoenix.server.main serve`, told by PHOENIX_*.

It serves a page on PHOENIX_HOST:PHOENIX_PORT, takes OTLP on PHOENIX_GRPC_PORT of all interfaces, as Phoenix
does, and keeps what it got in PHOENIX_WORKING_DIR: here, the names of the spans.
"""

from __future__ import annotations

import os
import sys
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_rpc


class Spans(otlp_rpc.TraceServiceServicer):
    def __init__(self, path: Path) -> None:
        self._path = path

    def Export(self, request: Any, context: Any) -> Any:
        with self._path.open("a", encoding="utf-8") as file:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    file.writelines(f"{span.name}\n" for span in scope.spans)
        return otlp.ExportTraceServiceResponse()


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"Phoenix")


def main() -> None:
    if sys.argv[1:] != ["serve"]:
        raise SystemExit(f"unknown arguments: {sys.argv[1:]}")
    if os.environ.get("STAND_IN_PHOENIX_FAILS"):
        raise SystemExit("cannot open its database")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    spans = Spans(Path(os.environ["PHOENIX_WORKING_DIR"]) / "spans")
    otlp_rpc.add_TraceServiceServicer_to_server(spans, server)  # type: ignore[no-untyped-call]  # untyped
    server.add_insecure_port(f"[::]:{os.environ['PHOENIX_GRPC_PORT']}")
    server.start()
    HTTPServer((os.environ["PHOENIX_HOST"], int(os.environ["PHOENIX_PORT"])), Page).serve_forever()


if __name__ == "__main__":
    main()
