"""A small OTLP collector that receives spans by gRPC and appends them to a file.

An export is answered once it is written. The bytes that wait to be written are bounded: beyond the bound an
export is refused with RESOURCE_EXHAUSTED and a retry time, as OTLP requires, and the exporter sends it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path  # a setting's type is read
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_rpc
from pydantic import Field

from galley.common.config.settings import ServiceSettings, settings_config
from galley.core.errors import Overloaded
from galley.trace.read.otlp_file import DEFAULT_MAX_BYTES, OtlpFile

if TYPE_CHECKING:
    from galley.common.server.server import Parts, Service

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_MAX_WAITING_BYTES = 64 * 2**20
_RETRY_AFTER_S = 1.0


class CollectorSettings(ServiceSettings):
    """Settings of the collector: flags and GALLEY_TRACING_* environment variables."""

    model_config = settings_config("GALLEY_TRACING_")

    file: Path = Field(description="File to append to; the previous file is kept beside it as .1.")
    max_file_mb: int = Field(
        default=DEFAULT_MAX_BYTES // 2**20, ge=1, le=4096, description="Largest size of either file, in MiB."
    )
    # OTLP recommends up to 20 MiB a request; the SDK's batches are well below 4.
    max_message_bytes: int = Field(
        default=16 * 2**20, ge=1024, le=64 * 2**20, description="Largest request message accepted, in bytes."
    )


class Collector(otlp_rpc.TraceServiceServicer):
    """OTLP's trace service; a thread of its own encodes and writes."""

    grpc_services = (SERVICE,)

    def __init__(self, file: OtlpFile, max_waiting_bytes: int = _MAX_WAITING_BYTES) -> None:
        self._file = file
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="traces")
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def Export(  # noqa: N802  # the name of the RPC
        self, request: otlp.ExportTraceServiceRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> otlp.ExportTraceServiceResponse:
        """Write the spans of one export. Raises Overloaded if too many bytes wait to be written."""
        size = request.ByteSize()
        if self._waiting_bytes and self._waiting_bytes + size > self._max_waiting_bytes:
            raise Overloaded(
                f"waiting spans: must be at most {self._max_waiting_bytes} bytes", _RETRY_AFTER_S
            )
        self._waiting_bytes += size
        try:
            dropped = await asyncio.get_running_loop().run_in_executor(
                self._writer, self._file.append, request
            )
        finally:
            self._waiting_bytes -= size
        return _response(dropped)

    async def drain(self) -> None:
        """Return at once; the server waits for exports that are being written."""

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.shutdown)
        self._file.close()


def _response(dropped: int) -> otlp.ExportTraceServiceResponse:
    if not dropped:
        return otlp.ExportTraceServiceResponse()
    partial = otlp.ExportTracePartialSuccess(
        rejected_spans=dropped,
        error_message="spans must have ids of the right length and fit into a line",
    )
    return otlp.ExportTraceServiceResponse(partial_success=partial)


def build(settings: CollectorSettings) -> Callable[[grpc.aio.Server, Parts], Awaitable[Service]]:
    async def build_collector(server: grpc.aio.Server, _parts: Parts) -> Service:
        file = await asyncio.to_thread(OtlpFile, settings.file, settings.max_file_mb * 2**20)
        collector = Collector(file)
        otlp_rpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]  # untyped
        return collector

    return build_collector
