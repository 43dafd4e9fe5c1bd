"""Traces by the OpenTelemetry SDK: sampling, and OTLP export as the `OTEL_*` environment says.

Imports the SDK: import this module only where something is exported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from uuid import uuid4

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.exporter import OTLPExporterMixin
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceState
from opentelemetry.util.types import Attributes

from galley.common.tls.channels import Material, channel_credentials
from galley.common.tls.credentials import TlsFiles
from galley.common.tls.files import BadFile, NamedFile, WatchedFiles
from galley.common.tracing.light_spans import MAX_EVENTS, SAMPLED, LightSpan, Named, SpanScope, unpacked
from galley.common.tracing.openinference import CHAIN, KIND, is_openinference, openinference_of
from galley.common.tracing.otlp import Signal, is_http, variable
from galley.core import names
from galley.version import __version__

_LOG = logging.getLogger(f"opentelemetry.{__name__}")  # a family whose lines are logged once a minute


def resource_of(service_name: str) -> Resource:
    return Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or service_name,
            "service.namespace": "galley",
            "service.version": __version__,
            "service.instance.id": _instance_id(),
        }
    )


@cache
def _instance_id() -> str:
    return str(uuid4())


def provider_to(processor: SpanProcessor, service_name: str) -> TracerProvider:
    provider = TracerProvider(resource=resource_of(service_name), shutdown_on_exit=False)
    provider.sampler = GalleySampler(provider.sampler)  # before there is a tracer
    if is_openinference():
        provider.add_span_processor(_Kinds())
    provider.add_span_processor(_NoExceptions())
    provider.add_span_processor(processor)
    return provider


class _Kinds(SpanProcessor):
    """Give the SDK's own spans, which libraries make, OpenInference's kind."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        del parent_context
        span.set_attribute(KIND, CHAIN)


class _NoExceptions(SpanProcessor):
    """Record no exceptions in the spans of libraries, as in our own: their messages may quote requests.

    A refused call would have its traceback written twice, which takes milliseconds. The status of its span
    keeps the message that the caller gets.
    """

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        del parent_context
        span.record_exception = _record_nothing  # type: ignore[method-assign]  # libraries offer no switch


def _record_nothing(*_: object, **__: object) -> None:
    """Take the place of `Span.record_exception`."""


def scope_to(provider: TracerProvider, processor: SpanProcessor, name: str, schema_url: str) -> SpanScope:
    scope = InstrumentationScope(name, __version__, schema_url)
    if isinstance(processor, BatchSpanProcessor):  # its exporter makes them readable, in its own thread
        return SpanScope(provider, scope, processor.on_end)  # type: ignore[arg-type]  # reads only `context`
    return SpanScope(provider, scope, lambda span: processor.on_end(readable(span)))


class GalleySampler(Sampler):
    """A sampler of all forced requests, and of others as `inner` decides (`OTEL_TRACES_SAMPLER`)."""

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if attributes is not None and attributes.get(names.FORCED):
            parent = trace.get_current_span(parent_context).get_span_context()
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"GalleySampler({self._inner.get_description()})"


class ReloadingExporter(OTLPExporterMixin[Any, Any, Any, Any]):
    """Mixin before the SDK's exporter of `signal`, for TLS files that may be replaced while it runs.

    The SDK's exporters read the files of the `OTEL_*` environment once. When the collector cannot be reached
    they make a new channel; here, with the current files.
    """

    signal: Signal

    def __init__(self) -> None:
        """Read the TLS files. Raise ValueError, with the name of the variable, if one is unusable."""
        self._files = _tls_files(self.signal)
        super().__init__()  # type: ignore[call-arg]  # the SDK's own exporter comes next, and needs nothing

    def _initialize_channel_and_stub(self) -> None:
        """Make a channel; the SDK calls this at the start and after failures."""
        if self._files is not None and not self._insecure:
            self._credentials = channel_credentials(self._files.current())
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]  # is untyped


def _tls_files(signal: Signal) -> WatchedFiles[Material] | None:
    """Return the watched files; None without TLS or without files (public authorities)."""
    what = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
    ca, cert, key = (NamedFile(*variable(name, signal)) for name in what)
    if _is_plain(signal) or not (ca.path or cert.path or key.path):
        return None
    try:
        return TlsFiles(ca, cert, key).watch()
    except BadFile as error:
        raise ValueError(str(error)) from None


def _is_plain(signal: Signal) -> bool:
    endpoint, insecure = variable("ENDPOINT", signal)[1], variable("INSECURE", signal)[1]
    if endpoint.startswith("https://"):
        return False
    return insecure.lower() == "true" if insecure else endpoint.startswith("http://")


def http_session(signal: Signal) -> Any:
    """Return the session of the SDK's exporter over HTTP, None for its own. Raise ValueError as `_tls_files`.

    The SDK reads the TLS files again for each new connection. Its own session would prefer REQUESTS_CA_BUNDLE
    to the signal's certificate.
    """
    _tls_files(signal)
    if not variable("CERTIFICATE", signal)[1]:
        return None
    import requests  # noqa: PLC0415  # needed by this protocol only

    session = requests.Session()
    session.trust_env = False
    return session


class _GrpcSpanExporter(ReloadingExporter, OTLPSpanExporter):
    signal = "traces"


class LightSpanExporter(SpanExporter):
    """Complete light spans, and send them with the SDK's exporter for the protocol of the environment."""

    def __init__(self) -> None:
        """Raise ValueError, with the name of the variable, for an unusable endpoint or TLS file."""
        self._exporter = _http_span_exporter() if is_http("traces") else _GrpcSpanExporter()

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Complete the spans and send them; called by the thread of the SDK's processor."""
        return self._exporter.export(list(_all_readable(spans)))

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _http_span_exporter() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415  # imports requests

    return trace_exporter.OTLPSpanExporter(session=http_session("traces"))


def _all_readable(spans: Sequence[Any]) -> Iterator[ReadableSpan]:
    for span in spans:
        if not isinstance(span, LightSpan):
            yield span
            continue
        try:
            yield readable(span)
        except Exception:  # noqa: BLE001  # one broken span must not lose its batch
            _LOG.exception("span could not be completed: %s", span.name)


def readable(span: LightSpan) -> ReadableSpan:
    """Complete a span that has ended; return it as the SDK's `ReadableSpan`."""
    completer, span.completer = span.completer, None
    if completer is not None:
        completer(span)
    attributes, parent = span.attributes, None
    if is_openinference():
        attributes |= openinference_of(attributes)
    if span.parent_id:
        parent = SpanContext(span.trace_id, span.parent_id, span.has_remote_parent, SAMPLED, span.trace_state)
    events = BoundedList.from_seq(MAX_EVENTS, (Event(*event) for event in span.events))
    events.dropped = span.event_count - len(span.events)
    links = BoundedList.from_seq(MAX_EVENTS, (Link(_context_of(to), facts) for to, facts in span.links))
    links.dropped = span.link_count - len(span.links)
    return ReadableSpan(
        name=span.name,
        context=span.get_span_context(),
        parent=parent,
        resource=span.scope.provider.resource,
        attributes=attributes,
        events=events,
        links=links,
        kind=span.kind,
        status=Status(StatusCode.ERROR, span.problem) if span.failed else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=span.scope.scope,
    )


def _context_of(named: Named) -> SpanContext:
    if isinstance(named, bytes):
        return unpacked(named)
    return SpanContext(named.trace_id, named.span_id, named.is_remote, SAMPLED)
