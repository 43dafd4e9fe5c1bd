"""The file is what OTLP's specification says, bounded, and says what is wrong with it."""

from __future__ import annotations

import json
import resource
from base64 import b64encode
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from galley.trace.read import otlp_file
from galley.trace.read.otlp_file import (
    BadTraceFile,
    Lines,
    Malformed,
    OtlpFile,
    document_of,
    rotated,
    spans_in,
)
from galley.trace.read.spans import Process
from tests.fakes.trace_builder import Scene, otlp

TRACE, SPAN = "5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174"
VALUES = [
    AnyValue(string_value="a <b> \x1b[31m ✓"),
    AnyValue(string_value=""),
    AnyValue(bool_value=False),
    AnyValue(int_value=-(2**63)),
    AnyValue(int_value=0),
    AnyValue(double_value=0.1),
    AnyValue(double_value=float("inf")),
    AnyValue(double_value=float("nan")),
    AnyValue(bytes_value=b"\x00\xff"),
    AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1), AnyValue(string_value="x")])),
    AnyValue(array_value=ArrayValue()),
    AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key="k", value=AnyValue(bool_value=True))])),
    AnyValue(),
]


def full_request() -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add(schema_url="https://example.com/schema")
    resource.resource.attributes.add(key="service.name").value.string_value = "galley-gateway"
    resource.resource.attributes.add(key="service.instance.id").value.string_value = "g1"
    resource.resource.dropped_attributes_count = 1
    scope = resource.scope_spans.add(schema_url="https://example.com/scope")
    scope.scope.name, scope.scope.version = "galley", "1"
    span = scope.spans.add(
        trace_id=bytes.fromhex(TRACE),
        span_id=bytes.fromhex(SPAN),
        trace_state="vendor=1",
        parent_span_id=bytes.fromhex(SPAN[::-1]),
        flags=257,
        name="chat",
        kind=ProtoSpan.SPAN_KIND_SERVER,
        start_time_unix_nano=2**63 + 1,
        end_time_unix_nano=2**63 + 5,
        dropped_attributes_count=2,
        dropped_events_count=3,
        dropped_links_count=4,
    )
    span.attributes.extend(KeyValue(key=f"k{n}", value=value) for n, value in enumerate(VALUES))
    span.attributes.add(key="without a value")
    span.events.add(name="e", time_unix_nano=7, dropped_attributes_count=1).attributes.add(key="a")
    span.links.add(
        trace_id=bytes.fromhex(TRACE),
        span_id=bytes.fromhex(SPAN),
        trace_state="x=y",
        dropped_attributes_count=1,
        flags=1,
    ).attributes.add(key="b").value.int_value = 5
    span.status.code, span.status.message = Status.STATUS_CODE_ERROR, "broken"
    scope.spans.add(trace_id=bytes.fromhex(TRACE), span_id=bytes.fromhex(SPAN)).status.SetInParent()
    return request


def test_the_encoding_is_protobufs_but_for_ids_and_enums() -> None:
    document = document_of(full_request())
    (resource,) = document["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    span, bare = scope["spans"]
    assert (span["traceId"], span["spanId"], span["parentSpanId"]) == (TRACE, SPAN, SPAN[::-1])
    assert (span["links"][0]["traceId"], span["links"][0]["spanId"]) == (TRACE, SPAN)
    assert (span["kind"], span["status"]) == (2, {"code": 2, "message": "broken"})
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == (str(2**63 + 1), str(2**63 + 5))
    assert (span["flags"], span["droppedEventsCount"], span["traceState"]) == (257, 3, "vendor=1")
    assert [pair.get("value") for pair in span["attributes"]] == [
        {"stringValue": "a <b> \x1b[31m ✓"},
        {"stringValue": ""},
        {"boolValue": False},
        {"intValue": str(-(2**63))},
        {"intValue": "0"},
        {"doubleValue": 0.1},
        {"doubleValue": "Infinity"},
        {"doubleValue": "NaN"},
        {"bytesValue": "AP8="},
        {"arrayValue": {"values": [{"intValue": "1"}, {"stringValue": "x"}]}},
        {"arrayValue": {}},
        {"kvlistValue": {"values": [{"key": "k", "value": {"boolValue": True}}]}},
        {},
        None,
    ]
    assert bare == {"traceId": TRACE, "spanId": SPAN, "status": {}}
    assert document_of(ExportTraceServiceRequest()) == {}


def test_it_is_protobufs_own_mapping_once_the_ids_are_put_back() -> None:
    document = document_of(full_request())
    for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for holder in (span, *span.get("links", ())):
            for name in ("traceId", "spanId", "parentSpanId"):
                if name in holder:
                    holder[name] = b64encode(bytes.fromhex(holder[name])).decode()
    again = ParseDict(document, ExportTraceServiceRequest())
    assert again.SerializeToString(deterministic=True) == full_request().SerializeToString(deterministic=True)


def test_written_records_are_read_back() -> None:
    scene = Scene()
    scene.request().round(calls=True, batch={"ranks": (3, 4)}).end(error="unavailable", problem="gone")
    document = json.loads(json.dumps(document_of(otlp(scene.spans))))
    assert sorted(spans_in(document), key=lambda span: span.key) == sorted(
        scene.spans, key=lambda span: span.key
    )


def test_numbers_may_be_strings_or_numbers_and_ids_of_either_case() -> None:
    span = {
        "traceId": TRACE.upper(),
        "spanId": SPAN.upper(),
        "startTimeUnixNano": 5,
        "endTimeUnixNano": "7",
        "kind": 2,
        "unheard": {"of": 1},
        "attributes": [
            {"key": "a", "value": {"intValue": 3}},
            {"key": "b", "value": {"intValue": "4"}},
            {"key": "c", "value": {"unheardValue": 1}},
            {"key": "d", "value": {"stringValue": "half \ud800 pair"}},
        ],
    }
    document = {"resourceSpans": [{"scopeSpans": [{"spans": [span, {"name": "without ids"}]}]}]}
    (read,) = spans_in(document)
    assert (read.trace_id, read.span_id, read.start_ns, read.end_ns) == (TRACE, SPAN, 5, 7)
    assert read.attributes == {"a": 3, "b": 4, "c": None, "d": "half ? pair"}
    assert read.process == Process("unknown")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("traceId", "xyz"),
        ("traceId", "z" * 32),
        ("traceId", 7),
        ("parentSpanId", "12"),
        ("startTimeUnixNano", "-1"),
        ("startTimeUnixNano", str(2**64)),
        ("startTimeUnixNano", "9" * 5000),
        ("startTimeUnixNano", float("inf")),
        ("kind", float("inf")),
        ("name", 3),
        ("attributes", {"key": "not a list"}),
        ("attributes", [{"value": {}}, 3]),
        ("attributes", [{"key": "a", "value": {"intValue": str(2**63)}}]),
        ("attributes", [{"key": "a", "value": {"doubleValue": 10**400}}]),
        ("events", [3]),
        ("links", [{"traceId": TRACE}]),
    ],
)
def test_invalid_span_is_refused(field: str, value: object) -> None:
    span = {"traceId": TRACE, "spanId": SPAN, field: value}
    with pytest.raises(Malformed):
        list(spans_in({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))


def _documents(path: Path) -> list[Any]:
    return [line.document() for line in Lines(path)]


def test_a_request_a_line_private_to_its_user(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    file = OtlpFile(path)
    assert file.append(full_request()) == 0
    file.append(full_request())
    file.close()
    assert path.stat().st_mode & 0o077 == 0
    assert path.read_bytes().count(b"\n") == 2
    assert _documents(path) == [document_of(full_request())] * 2


def test_torn_last_line_is_skipped_and_truncated(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    file = OtlpFile(path)
    file.append(full_request())
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert _documents(path) == [document_of(full_request()), {}]
    file = OtlpFile(path)
    file.append(full_request())
    file.close()
    assert path.read_bytes() == whole * 2
    path.write_bytes(b'{"torn": ')
    OtlpFile(path).close()
    assert path.read_bytes() == b""


def test_it_is_rotated_before_it_outgrows_its_size(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    size = len(_line())
    file = OtlpFile(path, max_bytes=2 * size)
    for count in range(1, 6):
        file.append(full_request())
        assert path.stat().st_size <= 2 * size
        assert len(_documents(path)) == min(count, 3 + (count % 2 == 0))
    file.close()
    assert rotated(path).stat().st_size == 2 * size
    assert rotated(path).stat().st_mode & 0o077 == 0


def _line() -> bytes:
    return json.dumps(document_of(full_request()), separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


@pytest.mark.parametrize("moved", [False, True], ids=["before it is moved", "after"])
def test_a_rotation_that_fails_says_so_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    path = tmp_path / "traces.jsonl"
    file = OtlpFile(path, max_bytes=len(_line()))
    file.append(full_request())
    with monkeypatch.context() as broken:
        if moved:
            broken.setattr(otlp_file, "_opened", _no_room)
        else:
            rotated(path).mkdir()
        for _ in range(2):
            with pytest.raises(OSError, match=r"traces\.jsonl|no room"):
                file.append(full_request())
    if not moved:
        rotated(path).rmdir()
    file.append(full_request())
    file.close()
    assert _documents(path) == [document_of(full_request())] * 2
    assert path.stat().st_size <= len(_line())


def _no_room(_path: Path) -> FileIO:
    raise OSError("no room")


def test_line_on_a_full_disk_is_not_written_partially(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    file = OtlpFile(path)
    file.append(full_request())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(_line()) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            file.append(full_request())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == _line()
    file.append(full_request())
    file.close()
    assert path.read_bytes() == _line() * 2


def test_long_export_is_split_and_long_span_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_file, "MAX_LINE_BYTES", 3000)
    scene = Scene()
    request = scene.request()
    for _ in range(20):
        request.round()
    request.round(target="x" * 4000).end()
    path = tmp_path / "traces.jsonl"
    file = OtlpFile(path)
    assert file.append(otlp(scene.spans)) == 1
    file.close()
    lines = path.read_bytes().splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 3000
    read = [span for line in Lines(path) for span in spans_in(line.document())]
    assert len(read) == len(scene.spans) - 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"nonsense", "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe", "must be a JSON object"),
        (b'{"resourceSpans": ', "must be JSON"),
        (b'{"a": ' * 100_000, "must be JSON"),
        (b'{"a": "\xff"}', "must be JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b"{}\n\n" + line + b"\n{}\n")
    with pytest.raises(BadTraceFile, match=f"{path.name}:3: {problem}"):
        _documents(path)


def test_a_line_that_is_too_long_is_named_and_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_file, "MAX_LINE_BYTES", 100)
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b"{}\n" + b" " * 5000 + b"\n")
    with pytest.raises(BadTraceFile, match=r"traces.jsonl:2: must be at most 100 bytes long"):
        _documents(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadTraceFile, match="no such file"):
        Lines(tmp_path / "none.jsonl")
