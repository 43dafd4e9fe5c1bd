"""OpenTelemetry traces: W3C context over every hop, exported by OTLP if the environment configures it.

Without OTEL_EXPORTER_OTLP_ENDPOINT there is no provider, no interceptor and no thread. With it, the SDK's
`BatchSpanProcessor` exports spans in its own thread; a slow or unreachable collector loses spans only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from galley.common.tracing.light_spans import SpanScope
from galley.common.tracing.otlp import FLUSH_S, is_exported
from galley.core import names

if TYPE_CHECKING:  # the SDK is slow to load, and needed only where traces are on
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

_PROPAGATOR = TraceContextTextMapPropagator()

# Many sessions share such a stream; their requests have spans of their own.
_ITEM_STREAMS = frozenset({"VerifyStream", "ProposeStream"})
# The gateway makes the spans of requests itself.
_REQUESTS = frozenset({"Generate", "Resume"})
# Called repeatedly by peers that check a replica.
_POLLED = frozenset({"GetTargetInfo", "GetDraftInfo"})


@dataclass(frozen=True)
class Telemetry:
    """Traces of one process; `provider` and `processor` are None where they are off."""

    provider: TracerProvider | None = None
    processor: SpanProcessor | None = None

    @property
    def is_on(self) -> bool:
        return self.provider is not None

    def tracer(self, name: str) -> trace.Tracer:
        """Return a tracer; it records nothing where traces are off."""
        return self.provider.get_tracer(name) if self.provider else trace.NoOpTracer()

    def scope(self, name: str, schema_url: str = "") -> SpanScope | None:
        """Return a scope that makes light spans; None where traces are off."""
        if self.provider is None or self.processor is None:
            return None
        from galley.common.tracing.exporting import scope_to  # noqa: PLC0415  # the SDK

        return scope_to(self.provider, self.processor, name, schema_url)

    def client_interceptors(self) -> list[Any]:
        """Return interceptors that trace the calls of a channel, except those that stream requests.

        Requests in streams have spans of their own, and gRPC does not always release a stream that breaks
        below an interceptor.
        """
        if self.provider is None:
            return []
        from grpc.aio import UnaryStreamClientInterceptor, UnaryUnaryClientInterceptor  # noqa: PLC0415
        from opentelemetry.instrumentation.grpc import aio_client_interceptors  # noqa: PLC0415

        made = aio_client_interceptors(tracer_provider=self.provider, filter_=_is_client_span)  # type: ignore[no-untyped-call]  # untyped
        kinds = (UnaryUnaryClientInterceptor, UnaryStreamClientInterceptor)
        return [interceptor for interceptor in made if isinstance(interceptor, kinds)]

    def server_interceptors(self) -> list[Any]:
        """Return interceptors that trace unary calls of a server; put them before all others."""
        if self.provider is None:
            return []
        from opentelemetry.instrumentation.grpc import aio_server_interceptor  # noqa: PLC0415

        return [aio_server_interceptor(tracer_provider=self.provider, filter_=_is_server_span)]  # type: ignore[no-untyped-call]  # untyped

    def shutdown(self) -> None:
        """Export the remaining spans, for at most FLUSH_S."""
        if self.provider is None:
            return
        worker = threading.Thread(target=self.provider.shutdown, name="telemetry-flush", daemon=True)
        worker.start()
        worker.join(FLUSH_S)


def start_telemetry(service_name: str, *, as_global: bool = True) -> Telemetry:
    """Start traces by the `OTEL_*` environment; `as_global` sets the provider for libraries."""
    if not is_exported("traces"):
        return Telemetry()
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  # the SDK

    from galley.common.tracing.exporting import LightSpanExporter  # noqa: PLC0415  # the SDK

    telemetry = telemetry_to(BatchSpanProcessor(LightSpanExporter()), service_name)
    if as_global and telemetry.provider is not None:
        trace.set_tracer_provider(telemetry.provider)
    return telemetry


def telemetry_to(processor: SpanProcessor, service_name: str) -> Telemetry:
    """Return traces that `processor` takes, sampled by the `OTEL_TRACES_SAMPLER*` environment."""
    from galley.common.tracing.exporting import provider_to  # noqa: PLC0415  # the SDK

    return Telemetry(provider_to(processor, service_name), processor)


def context_from(parent: str) -> Context:
    """Return the context of a traceparent; an empty one for an empty string."""
    return context_of({"traceparent": parent}) if parent else Context()


def context_of(metadata: Mapping[str, str]) -> Context:
    """Return the W3C context in the metadata of a call; an empty one if there is no valid one."""
    if "traceparent" not in metadata:
        return Context()
    return _PROPAGATOR.extract(metadata, context=Context())


def traceparent_of(span: SpanContext) -> str:
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def fail(span: trace.Span, kind: str, message: str = "") -> None:
    """Mark a span as failed; `kind` is a gRPC status in lower case. The message must not quote a request."""
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(trace.Status(trace.StatusCode.ERROR, message or None))


def _is_client_span(call: Any) -> bool:
    """Return True unless a process polls its peers by itself."""
    return _method(call) not in _POLLED or trace.get_current_span().get_span_context().is_valid


def _is_server_span(call: Any) -> bool:
    name = _method(call)
    if call.method.startswith("/grpc.") or name in _ITEM_STREAMS or name in _REQUESTS:
        return False
    return name not in _POLLED or any(key == "traceparent" for key, _ in call.invocation_metadata or ())


def _method(call: Any) -> str:
    full = call.method.decode() if isinstance(call.method, bytes) else call.method
    return str(full).rpartition("/")[2]
