"""OpenTelemetry traces: W3C context over every hop, exported by OTLP where the environment asks for it.

Off (no OTEL_EXPORTER_OTLP_ENDPOINT) costs next to nothing: no provider, no interceptor, no thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common.otlp import exports, resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PROPAGATOR = TraceContextTextMapPropagator()
_FLUSH_S = 3.0


@dataclass(frozen=True)
class Telemetry:
    """The traces of one process; `provider` is None where they are off."""

    provider: TracerProvider | None = None

    @property
    def on(self) -> bool:
        """Are spans exported?"""
        return self.provider is not None

    def tracer(self, name: str) -> trace.Tracer:
        """A tracer of this process; its spans cost nothing where telemetry is off."""
        return self.provider.get_tracer(name) if self.provider else trace.NoOpTracer()

    def client_interceptors(self) -> list[Any]:
        """For `grpc.aio.insecure_channel(..., interceptors=)`."""
        if self.provider is None:
            return []
        from opentelemetry.instrumentation.grpc import aio_client_interceptors, filters  # noqa: PLC0415

        keep = filters.negate(filters.health_check())
        return list(aio_client_interceptors(tracer_provider=self.provider, filter_=keep))  # type: ignore[no-untyped-call]  # untyped

    def server_interceptors(self) -> list[Any]:
        """For `grpc.aio.server(interceptors=)`, before all others."""
        if self.provider is None:
            return []
        from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters  # noqa: PLC0415

        keep = filters.negate(filters.health_check())
        return [aio_server_interceptor(tracer_provider=self.provider, filter_=keep)]  # type: ignore[no-untyped-call]  # untyped

    def shutdown(self) -> None:
        """Send what is left, for at most 3 s; a collector that is away must not hold up an exit."""
        if self.provider is None:
            return
        worker = threading.Thread(target=self.provider.shutdown, name="telemetry-flush", daemon=True)
        worker.start()
        worker.join(_FLUSH_S)


def start_telemetry(service_name: str, *, as_global: bool = True) -> Telemetry:
    """Read the `OTEL_*` environment; `as_global` makes the provider the process's own, for libraries."""
    if not exports("traces"):
        return Telemetry()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    provider = TracerProvider(resource=resource_of(service_name), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    if as_global:
        trace.set_tracer_provider(provider)
    return Telemetry(provider)


def traceparent() -> str:
    """The W3C traceparent of the current span; empty where there is none."""
    if not trace.get_current_span().get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


def context_from(parent: str) -> Context:
    """The context that `traceparent` names; an empty one if it names none."""
    if not parent:
        return Context()
    return _PROPAGATOR.extract({"traceparent": parent}, context=Context())
