"""Handmade traces, as the services would record them for a request, on virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from galley.core import names
from galley.trace.explain.explain import explain, summary
from galley.trace.read.build import stories_of
from galley.trace.read.model import Story
from galley.trace.read.otlp_file import SERVICE_INSTANCE, SERVICE_NAME, OtlpFile
from galley.trace.read.spans import CLIENT, ERROR, SERVER, Event, Link, Process, Span

GATEWAY, DRAFT, TARGET = (
    Process("galley-gateway", "g1"),
    Process("galley-draft", "d1"),
    Process("galley-target", "t1"),
)
RANK = Process("galley-target", "r1")
TARGET_AT, OTHER_TARGET_AT, DRAFT_AT = "10.0.0.7:7000", "10.0.0.8:7000", "10.0.0.9:7001"
SESSION = "5e55a0de5e55a0de5e55a0de5e55a0de"
BEGAN_NS = 1_790_000_000_000_000_000
_MS = 1_000_000
INTERNAL = 1
_SPANS_A_LINE = 512


def ns(milliseconds: float) -> int:
    return round(milliseconds * _MS)


@dataclass
class Scene:
    skew_ms: dict[Process, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    _ids: Any = field(default_factory=lambda: count(1))

    def trace_id(self) -> str:
        return f"{next(self._ids):032x}"

    def span_id(self) -> str:
        return f"{next(self._ids):016x}"

    def add(self, span: Span) -> Span:
        offset = ns(self.skew_ms.get(span.process, 0))
        events = tuple(replace(event, time_ns=event.time_ns + offset) for event in span.events)
        self.spans.append(
            replace(span, start_ns=span.start_ns + offset, end_ns=span.end_ns + offset, events=events)
        )
        return span

    def request(self, **given: Any) -> RequestMaker:
        return RequestMaker(self, **given)

    def stories(self, session_id: str = "") -> Sequence[Story]:
        sessions: dict[str, set[str]] = {}
        for span in self.spans:
            if name := span.text(names.SESSION_ID):
                sessions.setdefault(span.trace_id, set()).add(name)
        return stories_of(self.spans, session_id, lambda trace_id: sessions.get(trace_id, ()))

    def story(self) -> Story:
        (story,) = self.stories()
        return story


@dataclass
class RequestMaker:
    scene: Scene
    session: str = SESSION
    trace_id: str = ""
    prompt: int = 100
    position: int = 0
    at_ns: int = BEGAN_NS
    process: Process = GATEWAY
    operation: str = "chat"
    resumed: bool = False
    continues: tuple[str, str] | None = None
    first_index: int = 0
    parent_id: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trace_id = self.trace_id or self.scene.trace_id()
        self.span_id = self.scene.span_id()
        self.began_ns = self.at_ns
        self.position = self.position or self.prompt
        self.rounds: list[Span] = []
        self._index = self.first_index
        self._accepted = self._verified = self._drafted = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.trace_id, self.span_id

    def idle(self, milliseconds: float) -> RequestMaker:
        self.at_ns += ns(milliseconds)
        return self

    def event(self, name: str, **attributes: Any) -> RequestMaker:
        self.events.append(Event(name, self.at_ns, _keyed(attributes)))
        return self

    def store(
        self, operation: str, milliseconds: float, *, passes: bool = True, events: Iterable[Event] = ()
    ) -> RequestMaker:
        self.scene.add(
            Span(
                self.trace_id,
                self.scene.span_id(),
                self.span_id,
                f"EVALSHA {operation}",
                self.at_ns,
                self.at_ns + ns(milliseconds),
                self.process,
                CLIENT,
                attributes={names.STORE_OPERATION: operation},
                events=tuple(events),
            )
        )
        self.at_ns += ns(milliseconds) if passes else 0
        return self

    def round(
        self,
        draft: float = 0,
        queue: float = 1,
        compute: float = 28,
        wire: float = 1,
        commit: float = 1,
        *,
        accepted: int = 2,
        verified: int = 4,
        confirmed: int | None = None,
        target: str = TARGET_AT,
        events: Iterable[Event] = (),
        batch: dict[str, Any] | None = None,
        company: Iterable[tuple[str, str]] = (),
        calls: bool = False,
        text: Sequence[str] = (),
        served_events: Iterable[Event] = (),
        **attributes: Any,
    ) -> RequestMaker:
        confirmed = accepted + 1 if confirmed is None else confirmed
        start_ns, span_id = self.at_ns, self.scene.span_id()
        self.at_ns += ns(draft) + ns(queue) + ns(compute) + ns(wire)
        links: tuple[Link, ...] = ()
        if batch is not None:
            links = (self._batch(start_ns + ns(draft), self.at_ns - ns(wire), batch, company),)
        data = {
            names.ROUND_INDEX: self._index,
            names.ROUND_POSITION: self.position,
            names.ROUND_K: verified,
            names.ROUND_DRAFTED: verified,
            names.ROUND_VERIFIED: verified,
            names.ROUND_ACCEPTED: accepted,
            names.ROUND_CONFIRMED: confirmed,
            names.ROUND_STRATEGY: "hybrid",
            names.ROUND_OVERLAP: "miss" if draft else "hit",
            names.DRAFT_PART: ns(draft),
            names.QUEUE_PART: ns(queue),
            names.COMPUTE_PART: ns(compute),
            names.WIRE_PART: ns(wire),
            names.COMMIT_NS: ns(commit),
            names.DRAFT_REPLICA: DRAFT_AT,
            names.TARGET_REPLICA: target,
            names.BATCH_SESSIONS: (batch or {}).get("sessions", 1),
            **({names.ROUND_TEXT: tuple(text)} if text else {}),
            **_keyed(attributes),
        }
        span = Span(
            self.trace_id,
            span_id,
            self.span_id,
            names.ROUND,
            start_ns,
            self.at_ns,
            self.process,
            INTERNAL,
            attributes=data,
            events=tuple(events),
            links=links,
        )
        self.rounds.append(self.scene.add(span))
        if calls:
            self.call(span, names.VERIFY, TARGET, target, start_ns + ns(draft), self.at_ns, served_events)
        self._index += 1
        self.position += confirmed
        self._accepted += accepted
        self._verified += verified
        self._drafted += verified
        return self

    def call(
        self,
        parent: Span,
        name: str,
        process: Process,
        replica: str,
        start_ns: int,
        end_ns: int,
        served_events: Iterable[Event] = (),
    ) -> tuple[Span, Span]:
        caller = Span(
            self.trace_id,
            self.scene.span_id(),
            parent.span_id,
            name,
            start_ns,
            end_ns,
            self.process,
            CLIENT,
            attributes={names.REPLICA: replica},
        )
        served = Span(
            self.trace_id,
            self.scene.span_id(),
            caller.span_id,
            name,
            start_ns + ns(0.2),
            end_ns - ns(0.2),
            process,
            SERVER,
            events=tuple(served_events),
        )
        return self.scene.add(caller), self.scene.add(served)

    def _batch(
        self, start_ns: int, end_ns: int, data: dict[str, Any], company: Iterable[tuple[str, str]]
    ) -> Link:
        trace_id, parent_id = data.get("below", self.key)
        key = trace_id, self.scene.span_id()
        rank_ns = tuple(ns(each) for each in data.get("ranks", ()))
        attributes = {
            names.BATCH_SESSIONS: data.get("sessions", 1),
            names.BATCH_ROWS: data.get("rows", 5),
            names.BATCH_DRAFT_ROWS: data.get("draft_rows", 4),
            names.BATCH_PREFILL_ROWS: data.get("prefill_rows", 0),
            names.FORWARD_NS: end_ns - start_ns,
            names.FREE_BLOCKS: data.get("free_blocks", 200),
            names.QUEUE_DEPTH: data.get("queue_depth", 0),
            **({names.RANK_FORWARD_NS: rank_ns} if rank_ns else {}),
        }
        items = [(self.trace_id, self.span_id), *company]
        links = tuple(Link(*item, {names.LINK: names.LINK_ITEM}) for item in items)
        self.scene.add(
            Span(
                *key,
                parent_id,
                names.VERIFY_BATCH,
                start_ns,
                end_ns,
                TARGET,
                INTERNAL,
                attributes=attributes,
                events=tuple(data.get("events", ())),
                links=links,
            )
        )
        for rank, took_ns in enumerate(rank_ns[1:], 1):
            forward = Span(
                key[0], self.scene.span_id(), key[1], names.RANK_FORWARD, start_ns, start_ns + took_ns, RANK
            )
            self.scene.add(replace(forward, attributes={names.RANK: rank}))
        return Link(*key, {names.LINK: names.LINK_BATCH})

    def end(self, error: str = "", problem: str = "", reason: str = "stop") -> RequestMaker:
        slowest = max(self.rounds, key=lambda span: span.duration_ns, default=None)
        attributes = {
            names.OPERATION: self.operation,
            names.PROVIDER: names.GALLEY,
            names.REQUEST_MODEL: "smollm2-135m-instruct",
            names.INPUT_TOKENS: self.prompt,
            names.OUTPUT_TOKENS: self.position - self.prompt,
            names.FINISH_REASONS: (reason,),
            names.SESSION_ID: self.session,
            names.WORKLOAD: "chat",
            names.RESUMED: self.resumed,
            names.ROUNDS: self._index - self.first_index,
            names.DRAFTED: self._drafted,
            names.VERIFIED: self._verified,
            names.ACCEPTED: self._accepted,
            names.TTFT_NS: self.rounds[0].end_ns - self.began_ns + ns(1) if self.rounds else 0,
            **self.attributes,
        }
        if slowest is not None:
            attributes[names.SLOWEST_ROUND_NS] = slowest.duration_ns
            attributes[names.SLOWEST_ROUND_POSITION] = slowest.integer(names.ROUND_POSITION)
        if error:
            attributes[names.ERROR_TYPE] = error
        links = (Link(*self.continues, {names.LINK: names.LINK_CONTINUES}),) if self.continues else ()
        self.scene.add(
            Span(
                self.trace_id,
                self.span_id,
                self.parent_id,
                f"{self.operation} smollm2-135m-instruct",
                self.began_ns,
                self.at_ns + ns(2),
                self.process,
                SERVER,
                ERROR if error else 0,
                problem,
                attributes,
                tuple(self.events),
                links,
            )
        )
        return self


def summarize(story: Story) -> str:
    return " ".join(summary(story, explain(story)))


def _keyed(given: dict[str, Any]) -> dict[str, Any]:
    return {getattr(names, key.upper()): value for key, value in given.items()}


def event(name: str, at_ns: int, **attributes: Any) -> Event:
    return Event(name, at_ns, _keyed(attributes))


def otlp(spans: Iterable[Span]) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    by_process: dict[Process, Any] = {}
    for span in spans:
        if span.process not in by_process:
            resource = request.resource_spans.add()
            data = {SERVICE_NAME: span.process.service, SERVICE_INSTANCE: span.process.instance}
            resource.resource.attributes.extend(_pairs(data))
            by_process[span.process] = resource.scope_spans.add()
        _write(span, by_process[span.process].spans.add())
    return request


def _write(span: Span, to: Any) -> None:
    to.trace_id, to.span_id = bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)
    to.parent_span_id = bytes.fromhex(span.parent_id)
    to.name, to.kind = span.name, span.kind
    to.start_time_unix_nano, to.end_time_unix_nano = span.start_ns, span.end_ns
    to.attributes.extend(_pairs(span.attributes))
    for one in span.events:
        to.events.add(name=one.name, time_unix_nano=one.time_ns, attributes=_pairs(one.attributes))
    for link in span.links:
        trace_id, span_id = bytes.fromhex(link.trace_id), bytes.fromhex(link.span_id)
        to.links.add(trace_id=trace_id, span_id=span_id, attributes=_pairs(link.attributes))
    if span.status:
        to.status.code, to.status.message = span.status, span.problem


def _pairs(attributes: Any) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: object) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case tuple():
            return AnyValue(array_value=ArrayValue(values=[_value(each) for each in value]))
    raise TypeError(f"no attribute of a span is a {type(value).__name__}")


def write(scene: Scene, path: Path) -> Path:
    file = OtlpFile(path)
    for start in range(0, len(scene.spans), _SPANS_A_LINE):
        file.append(otlp(scene.spans[start : start + _SPANS_A_LINE]))
    file.close()
    return path
