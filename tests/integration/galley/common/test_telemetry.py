"""Spans leave the process by OTLP, with one trace over client and server."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace

from galley.client.client import w3c_metadata
from galley.common.config.settings import OFF
from galley.common.logs import log_internal, start_logging
from galley.common.metrics.metering import flush_telemetry, start_metering
from galley.common.server.server import Parts, start_server
from galley.common.tracing.light_spans import LightSpan, packed
from galley.common.tracing.telemetry import context_from, start_telemetry
from galley.core import names
from galley.core.errors import InvalidField
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from galley.version import __version__
from tests.fakes.echo_service import EchoService, building, settings
from tests.fakes.otlp_collector import METRICS, TRACES, collecting
from tests.fakes.otlp_http import collecting_http
from tests.fakes.spans import root

SECRET = "my secret prompt"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.schemas: set[str] = set()
        self.resource: dict[str, str] = {}

    def take(self, _signal: str, request: Any, _context: Any) -> None:
        for resource in request.resource_spans:
            self.resource |= {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            self.schemas |= {scope.schema_url for scope in resource.scope_spans}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(_clean: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    with collecting(collector.take) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
        yield collector


def traceparent() -> str:
    return dict(w3c_metadata()).get("traceparent", "")


async def test_one_trace_goes_over_client_and_server(collector: Collector) -> None:
    telemetry = start_telemetry("galley-test", as_global=False)
    running = await start_server(settings(), building(EchoService()), Parts(telemetry=telemetry))
    with telemetry.tracer("test").start_as_current_span("round") as span:
        inside = traceparent()
        async with grpc.aio.insecure_channel(
            running.address, interceptors=telemetry.client_interceptors()
        ) as channel:
            stub = rpc.DraftStub(channel)
            await stub.Propose(pb.ProposeRequest())
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            async for _ in stub.ProposeStream(iter([pb.ProposeStreamRequest()])):
                pass
    await running.stop()
    telemetry.shutdown()
    trace_id = span.get_span_context().trace_id
    assert inside.split("-")[1] == trace.format_trace_id(trace_id)
    assert {sent.trace_id for sent in collector.spans} == {trace_id.to_bytes(16, "big")}
    kinds = sorted((sent.name.rsplit("/", 1)[-1], sent.kind) for sent in collector.spans)
    assert kinds == [("Check", 3), ("Propose", 2), ("Propose", 3), ("round", 1)]
    assert collector.resource["service.name"] == "galley-test"
    assert collector.resource["service.namespace"] == "galley"
    assert collector.resource["service.version"] == __version__
    assert uuid.UUID(collector.resource["service.instance.id"]).version == 4


@pytest.mark.parametrize("failure", [InvalidField("prompt", f"got {SECRET}"), ValueError(SECRET)])
async def test_spans_of_failed_calls_hold_no_exceptions(collector: Collector, failure: Exception) -> None:
    telemetry = start_telemetry("galley-test", as_global=False)
    running = await start_server(settings(), building(EchoService(failure)), Parts(telemetry=telemetry))
    async with grpc.aio.insecure_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await rpc.DraftStub(channel).Propose(pb.ProposeRequest())
    await running.stop()
    telemetry.shutdown()
    [span] = collector.spans
    assert any(entry.key == "rpc.grpc.status_code" for entry in span.attributes)
    assert not span.events
    assert SECRET not in str(span)


async def test_peers_that_look_after_one_another_are_no_traces(collector: Collector) -> None:
    telemetry = start_telemetry("galley-test", as_global=False)
    running = await start_server(settings(), building(EchoService()), Parts(telemetry=telemetry))
    async with grpc.aio.insecure_channel(
        running.address, interceptors=telemetry.client_interceptors()
    ) as channel:
        stub = rpc.DraftStub(channel)
        for _ in range(2):
            await stub.GetDraftInfo(pb.GetDraftInfoRequest())
        with telemetry.tracer("test").start_as_current_span("round") as span:
            await stub.GetDraftInfo(pb.GetDraftInfoRequest())
    await running.stop()
    telemetry.shutdown()
    trace_id = span.get_span_context().trace_id
    assert {sent.trace_id for sent in collector.spans} == {trace_id.to_bytes(16, "big")}
    assert {sent.name.rsplit("/", 1)[-1] for sent in collector.spans} == {"GetDraftInfo", "round"}


def test_a_light_span_arrives_as_any_other(collector: Collector) -> None:
    telemetry = start_telemetry("galley-test", as_global=False)
    scope = telemetry.scope("light", "https://example.org/schema")
    assert scope is not None
    parent = scope.request(context_from(PARENT), "parent", {})
    span = scope.span(
        "child",
        trace.SpanContext(parent.trace_id, 7, is_remote=False),
        parent,
        5,
        lambda: 9,
        kind=trace.SpanKind.CLIENT,
        attributes={"a": 1, "b": "two", "c": (1, 2)},
    )
    span.set_attribute("d", 0.5)
    span.add_event("said", {"what": "this"})
    span.add_link(parent, {"to": "it"})
    span.set_status(trace.StatusCode.ERROR, "what it was about")
    span.set_status(trace.StatusCode.OK)
    span.end(7)
    span.end(8)
    telemetry.shutdown()
    [sent] = collector.spans
    assert (sent.name, sent.kind, sent.start_time_unix_nano, sent.end_time_unix_nano) == ("child", 3, 5, 7)
    assert sent.trace_id.hex() == PARENT.split("-")[1]
    assert sent.parent_span_id == parent.span_id.to_bytes(8)
    assert {entry.key for entry in sent.attributes} == {"a", "b", "c", "d"}
    assert [(event.name, event.time_unix_nano) for event in sent.events] == [("said", 9)]
    assert [link.span_id for link in sent.links] == [parent.span_id.to_bytes(8)]
    assert (sent.status.code, sent.status.message) == (2, "what it was about")
    assert collector.schemas == {"https://example.org/schema"}


def test_spans_of_ours_and_of_the_sdk_leave_together(collector: Collector) -> None:
    telemetry = start_telemetry("galley-test", as_global=False)
    ours = [telemetry.scope("one"), telemetry.scope("two")]
    for scope in ours:
        assert scope is not None
        root(scope, "ours").end(2)
    with telemetry.tracer("library").start_as_current_span("theirs"):
        pass
    telemetry.shutdown()
    assert sorted(sent.name for sent in collector.spans) == ["ours", "ours", "theirs"]
    assert len({sent.trace_id for sent in collector.spans}) == 3


def test_a_broken_span_keeps_no_other_back(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: LightSpan) -> None:
        raise RuntimeError("cannot be completed")

    telemetry = start_telemetry("galley-test", as_global=False)
    scope = telemetry.scope("light")
    assert scope is not None
    for name, completer, attributes in (
        ("broken", fail, {}),
        ("odd", None, {"a": object(), "b": 2**63, "c": 2**63 - 1}),
        ("good", None, {"a": 1}),
    ):
        span = root(scope, name, completer)
        span.attributes |= attributes  # type: ignore[arg-type]  # what no exporter can encode
        span.end(2)
    telemetry.shutdown()
    assert [sent.name for sent in collector.spans] == ["odd", "good"]
    assert [entry.key for entry in collector.spans[0].attributes] == ["c"]
    assert "span could not be completed: broken" in caplog.messages


def test_a_span_keeps_its_last_events_and_links(collector: Collector) -> None:
    telemetry = start_telemetry("galley-test", as_global=False)
    scope = telemetry.scope("light")
    assert scope is not None
    span = root(scope, "x")
    for number in range(200):
        span.add_event(f"event {number}", None, number)
    span.link_to([trace.SpanContext(7, 1 + number, is_remote=True) for number in range(150)], {"to": "it"})
    span.add_link(trace.SpanContext(7, 999, is_remote=True))
    span.link_to([packed(7, 1000)], None)
    span.end(2)
    telemetry.shutdown()
    [sent] = collector.spans
    assert (len(sent.events), sent.dropped_events_count, sent.events[-1].name) == (128, 72, "event 199")
    assert (len(sent.links), sent.dropped_links_count) == (128, 24)
    assert [link.span_id for link in sent.links[-2:]] == [(999).to_bytes(8), (1000).to_bytes(8)]


def test_repeated_library_warning_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("galley-test")
    for number in range(3):
        logging.getLogger("opentelemetry.exporter").error("cannot export, try %s", number)
        logging.getLogger("another").error("try %s", number)
    logging.getLogger("opentelemetry.exporter").error("another thing")
    text = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert text == ["cannot export, try 0", "try 0", "try 1", "try 2", "another thing"]


def test_logs_for_a_terminal_hold_no_escapes_of_peers(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("galley-test", log_format="console")
    hostile = "a\x1b]52;c;ZXZpbA==\x07b\x9b31mc\u202ed"
    log_internal(ValueError(hostile), peer=hostile)
    logging.getLogger("another").error("failed: %s", hostile, extra={"address": hostile})
    output = capsys.readouterr().err
    assert output.count("a\ufffd]52;c;ZXZpbA==\ufffdb\ufffd31mc\ufffdd") == 4
    assert not [part for part in ("\x1b]", "\x07", "\x9b", "\u202e") if part in output]


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not start_telemetry("x").is_on
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not start_telemetry("x").is_on
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    off = start_telemetry("x")
    assert not off.is_on
    assert off.client_interceptors() == off.server_interceptors() == []
    with off.tracer("x").start_as_current_span("nothing"):
        assert traceparent() == ""
    off.shutdown()


def test_services_load_the_sdk_only_where_something_is_exported() -> None:
    modules = (
        "opentelemetry.sdk.trace",
        "opentelemetry.exporter",
        "prometheus_client",
    )
    script = (
        "import sys, services.draft.servicer, services.gateway.service, services.target.servicer\n"
        f"print([name for name in {modules} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_context_comes_back_from_its_traceparent() -> None:
    span = trace.get_current_span(context_from(PARENT)).get_span_context()
    assert trace.format_trace_id(span.trace_id) == PARENT.split("-")[1]
    assert not trace.get_current_span(context_from("")).get_span_context().is_valid


def test_all_spans_have_an_openinference_kind_if_switched_on(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GALLEY_OPENINFERENCE", "true")
    telemetry = start_telemetry("galley-test", as_global=False)
    scope = telemetry.scope("light")
    assert scope is not None
    request = root(scope, "chat tiny")
    request.attributes |= {
        names.OPERATION: names.CHAT,
        names.REQUEST_MODEL: "tiny",
        names.INPUT_TOKENS: 5,
        names.OUTPUT_TOKENS: 7,
        names.TEMPERATURE: 0.5,
    }
    request.end(3)
    root(scope, "round").end(2)
    with telemetry.tracer("library").start_as_current_span("theirs"):
        pass
    telemetry.shutdown()
    told = {sent.name: attributes_in(sent) for sent in collector.spans}
    assert {name: of["openinference.span.kind"] for name, of in told.items()} == {
        "chat tiny": "LLM",
        "round": "CHAIN",
        "theirs": "CHAIN",
    }
    chat = told["chat tiny"]
    assert (chat["llm.model_name"], chat["llm.provider"]) == ("tiny", "galley")
    counts = [chat[f"llm.token_count.{of}"] for of in ("prompt", "completion", "total")]
    assert counts == [5, 7, 12]
    assert json.loads(chat["llm.invocation_parameters"]) == {"temperature": 0.5}
    assert not [name for name in chat if "messages" in name or "value" in name]


def attributes_in(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


# ------------------------------------------------------------------------------------------- by HTTP --


class HttpCollector:
    def __init__(self) -> None:
        self.exports: list[tuple[str, str, dict[str, str]]] = []

    def take(self, signal: str, _request: Any, handler: Any) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.exports.append((signal, handler.path, headers))


@pytest.mark.parametrize("base", ["", "/"])
async def test_all_signals_go_by_http_with_headers(monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    collector = HttpCollector()
    with collecting_http(collector.take) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}{base}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20YTpi,x-scope=one")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
        telemetry = start_telemetry("galley-test", as_global=False)
        metering = await start_metering("gateway", "127.0.0.1", OFF)
        scope = telemetry.scope("ours")
        assert scope is not None
        root(scope, "ours").end(2)
        await flush_telemetry(telemetry, metering)
    sent = {signal: (path, headers) for signal, path, headers in collector.exports}
    assert {signal: path for signal, (path, _) in sent.items()} == {
        TRACES: "/v1/traces",
        METRICS: "/v1/metrics",
    }
    for _, headers in sent.values():
        assert (headers["authorization"], headers["x-scope"]) == ("Basic YTpi", "one")
    assert sent[TRACES][1]["content-encoding"] == "gzip"


async def test_one_signal_may_go_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    by_http, by_grpc = HttpCollector(), Collector()
    with collecting_http(by_http.take) as address, collecting(by_grpc.take) as grpc_address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{grpc_address}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://{address}/v1/metrics")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf")
        telemetry = start_telemetry("galley-test", as_global=False)
        metering = await start_metering("gateway", "127.0.0.1", OFF)
        with telemetry.tracer("test").start_as_current_span("one"):
            pass
        await flush_telemetry(telemetry, metering)
    assert [signal for signal, _, _ in by_http.exports] == [METRICS]
    assert [span.name for span in by_grpc.spans] == ["one"]


def test_an_endpoint_without_scheme_is_refused_for_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_ENDPOINT: must begin with http:// or https://"):
        start_telemetry("galley-test", as_global=False)


def test_an_unknown_protocol_switches_a_signal_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert not start_telemetry("galley-test", as_global=False).is_on
    expected = "traces are off: OTEL_EXPORTER_OTLP_PROTOCOL: must be grpc or http/protobuf, got http/json"
    assert expected in caplog.messages
