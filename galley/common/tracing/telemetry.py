"""OpenTelemetry traces: W3C context over every hop, exported by OTLP if the environment configures it.

Without OTEL_EXPORTER_OTLP_ENDPOINT there is no provider, no interceptor and no thread. With it, the SDK's
`BatchSpanProcessor` exports spans in its own thread; a slow or unreachable collector loses spans only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from galley.common.tracing.light_spans import SpanScope
from galley.common.tracing.otlp import FLUSH_S, exports, resource_of
from galley.core import names
from galley.version import __version__

_PROPAGATOR = TraceContextTextMapPropagator()

# Many sessions share such a stream: their items have spans of their own.
_ITEM_STREAMS = frozenset({"VerifyStream", "ProposeStream"})
# The gateway makes the spans of requests itself.
_REQUESTS = frozenset({"Generate", "Resume"})
# Asked again and again, by peers that look how a replica is doing.
_POLLED = frozenset({"GetTargetInfo", "GetDraftInfo"})


@dataclass(frozen=True)
class Telemetry:
    """The traces of one process; `provider` is None where they are off, else `processor` takes its spans."""

    provider: TracerProvider | None = None
    processor: SpanProcessor | None = None

    @property
    def on(self) -> bool:
        """Are spans exported?"""
        return self.provider is not None

    def tracer(self, name: str) -> trace.Tracer:
        """A tracer of this process; its spans cost nothing where telemetry is off."""
        return self.provider.get_tracer(name) if self.provider else trace.NoOpTracer()

    def scope(self, name: str, schema_url: str = "") -> SpanScope | None:
        """What `galley.common.tracing.light_spans` makes spans of; None where telemetry is off."""
        if self.provider is None or self.processor is None:
            return None
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

        from galley.common.tracing.light_spans import SpanScope, readable  # noqa: PLC0415  # off costs nothing

        scope, processor = InstrumentationScope(name, __version__, schema_url), self.processor
        if isinstance(processor, BatchSpanProcessor):  # its exporter makes them readable, in its own thread
            return SpanScope(self.provider, scope, processor.on_end)  # type: ignore[arg-type]  # reads only `context`
        return SpanScope(self.provider, scope, lambda span: processor.on_end(readable(span)))

    def client_interceptors(self) -> list[Any]:
        """For `grpc.aio.insecure_channel(..., interceptors=)`: calls within a trace are spans of it.

        Not those that stream requests: their items have spans of their own, and gRPC does not always let go
        of a stream that breaks beneath an interceptor.
        """
        if self.provider is None:
            return []
        from grpc.aio import UnaryStreamClientInterceptor, UnaryUnaryClientInterceptor  # noqa: PLC0415
        from opentelemetry.instrumentation.grpc import aio_client_interceptors  # noqa: PLC0415

        made = aio_client_interceptors(tracer_provider=self.provider, filter_=_is_asked_for)  # type: ignore[no-untyped-call]  # untyped
        kinds = (UnaryUnaryClientInterceptor, UnaryStreamClientInterceptor)
        return [interceptor for interceptor in made if isinstance(interceptor, kinds)]

    def server_interceptors(self) -> list[Any]:
        """For `grpc.aio.server(interceptors=)`, before all others: unary calls are spans."""
        if self.provider is None:
            return []
        from opentelemetry.instrumentation.grpc import aio_server_interceptor  # noqa: PLC0415

        return [aio_server_interceptor(tracer_provider=self.provider, filter_=_is_worth_a_span)]  # type: ignore[no-untyped-call]  # untyped

    def shutdown(self) -> None:
        """Send what is left, for at most FLUSH_S."""
        if self.provider is None:
            return
        worker = threading.Thread(target=self.provider.shutdown, name="telemetry-flush", daemon=True)
        worker.start()
        worker.join(FLUSH_S)


def start_telemetry(service_name: str, *, as_global: bool = True) -> Telemetry:
    """Read the `OTEL_*` environment; `as_global` makes the provider the process's own, for libraries."""
    if not exports("traces"):
        return Telemetry()
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  # off costs nothing

    from galley.common.tracing.exporting import LightSpanExporter  # noqa: PLC0415

    telemetry = telemetry_to(BatchSpanProcessor(LightSpanExporter()), service_name)
    if as_global and telemetry.provider is not None:
        trace.set_tracer_provider(telemetry.provider)
    return telemetry


def telemetry_to(processor: SpanProcessor, service_name: str) -> Telemetry:
    """Traces that go to `processor`; sampled as the `OTEL_TRACES_SAMPLER*` environment says."""
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415

    from galley.common.tracing.sampling import GalleySampler  # noqa: PLC0415

    provider = TracerProvider(resource=resource_of(service_name), shutdown_on_exit=False)
    provider.sampler = GalleySampler(provider.sampler)  # before there is a tracer
    provider.add_span_processor(processor)
    return Telemetry(provider, processor)


def context_from(parent: str) -> Context:
    """The context that `traceparent` names; an empty one if it names none."""
    return context_of({"traceparent": parent}) if parent else Context()


def context_of(metadata: Mapping[str, str]) -> Context:
    """The W3C context that a call brings; an empty one if it brings none, or none that can be read."""
    if "traceparent" not in metadata:
        return Context()
    return _PROPAGATOR.extract(metadata, context=Context())


def traceparent_of(span: SpanContext) -> str:
    """The W3C traceparent that names a span."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def fail(span: trace.Span, kind: str) -> None:
    """What it stands for came to nothing: `kind` is a gRPC status in lower case."""
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(trace.StatusCode.ERROR)


def w3c_metadata() -> tuple[tuple[str, str], ...]:
    """What a call brings of the trace that it is made in; nothing where it is made in none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())


def _is_asked_for(call: Any) -> bool:
    """What a process does by itself, such as looking after its peers, is no trace."""
    return _method(call) not in _POLLED or trace.get_current_span().get_span_context().is_valid


def _is_worth_a_span(call: Any) -> bool:
    name = _method(call)
    if call.method.startswith("/grpc.") or name in _ITEM_STREAMS or name in _REQUESTS:
        return False
    return name not in _POLLED or any(key == "traceparent" for key, _ in call.invocation_metadata or ())


def _method(call: Any) -> str:
    """Of the details that gRPC has of a call, whose name it gives as text or bytes."""
    full = call.method.decode() if isinstance(call.method, bytes) else call.method
    return str(full).rpartition("/")[2]
