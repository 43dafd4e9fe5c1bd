"""An OTLP collector that counts exports and drops them: `python -m bench.loops.otlp_sink --ready-fd N`.

It shares the cores with what is measured, so it reads no spans. A few requests are kept, and parsed only when
the counts are fetched, to compute the bytes of a span.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

from galley.common.server.process import Readiness

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
COUNTS = "/galley.bench.Sink/Counts"
_KEPT = 64
_GRACE_S = 0.5


def spans_in(requests: Iterable[bytes]) -> int:
    """Count the spans of serialized export requests."""
    read = map(otlp.ExportTraceServiceRequest.FromString, requests)
    return sum(
        len(scope.spans)
        for sent in read
        for resource in sent.resource_spans
        for scope in resource.scope_spans
    )


class Sink(grpc.GenericRpcHandler):
    """A gRPC handler that counts exports and their bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exports = self._bytes = 0
        self._kept: deque[bytes] = deque(maxlen=_KEPT)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return the handler of a method; requests and responses are raw bytes."""
        served = {EXPORT: self._export, COUNTS: self._counts}.get(handler_call_details.method)
        return None if served is None else grpc.unary_unary_rpc_method_handler(served)

    def _export(self, request: bytes, _: grpc.ServicerContext) -> bytes:
        with self._lock:
            self._exports += 1
            self._bytes += len(request)
            self._kept.append(request)
        return b""  # an ExportTraceServiceResponse that rejects nothing

    def _counts(self, _request: bytes, _: grpc.ServicerContext) -> bytes:
        with self._lock:
            counts = {"exports": self._exports, "bytes": self._bytes}
            kept = list(self._kept)
        counts |= {"kept_bytes": sum(map(len, kept)), "kept_spans": spans_in(kept)}
        return json.dumps(counts).encode()


def main() -> None:
    """Serve on a free port until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m bench.loops.otlp_sink", description=__doc__)
    parser.add_argument("--ready-fd", type=int)
    ready = Readiness(parser.parse_args().ready_fd)
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before gRPC has threads, which take it over
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Sink(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready.ready(f"127.0.0.1:{port}")
    signal.sigwait(ends)
    server.stop(_GRACE_S).wait()


if __name__ == "__main__":
    main()
