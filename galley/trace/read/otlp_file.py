"""The file of traces: OTLP's JSON encoding, one request a line (OpenTelemetry's "OTLP File Exporter").

It is bounded: a full file is renamed to `<name>.1`, replacing the previous one. Its last line may be
incomplete if its writer was killed or is writing. A failed write leaves the file as it was.

The encoding is protobuf's JSON mapping (camelCase, 64-bit integers as strings) except that ids are
hexadecimal and enums are numbers.
"""

from __future__ import annotations

import json
import os
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from sys import intern
from typing import TYPE_CHECKING, Any

from galley.trace.read.spans import Attributes, Event, Link, Process, Span, Value

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

MAX_LINE_BYTES = 16 * 2**20
DEFAULT_MAX_BYTES = 64 * 2**20
# Private: with --trace-content it holds prompts and answers.
_MODE = 0o600
_KEPT_FILES = 4
SERVICE_NAME, SERVICE_INSTANCE = "service.name", "service.instance.id"
IDS = ("traceId", "spanId", "parentSpanId")
_TRACE_DIGITS, _SPAN_DIGITS = 32, 16
# Longer attribute values are not interned.
_LONGEST_INTERNED = 64


class BadTraceFile(Exception):
    """A file of traces cannot be read; the message names the file and the line."""


class OtlpFile:
    """The file as its writer sees it; only one may be open for a path."""

    def __init__(self, path: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Open or create the file, and cut off an incomplete last line. Raises OSError."""
        self.path = path
        self._max_bytes = max_bytes
        self._file = _opened(path)
        self._file.truncate(_end_of_lines(self._file))
        self._size = self._file.seek(0, 2)

    def append(self, request: ExportTraceServiceRequest) -> int:
        """Write the request; return how many spans were left out (bad ids, too long). Raises OSError."""
        lines, dropped = _lines_of(request)
        for line in lines:
            if self._size and self._size + len(line) > self._max_bytes:
                self._rotate()
            self._write(line)
        return dropped

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        """Write a whole line or nothing: half a line would make the next one unreadable."""
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size)
                self._file.seek(self._size)
            raise
        self._size += len(line)

    def _rotate(self) -> None:
        """Start a new file. The full one stays open until then, so that a failure can be retried."""
        with suppress(FileNotFoundError):  # an earlier try moved it, or somebody deleted it
            self.path.replace(rotated(self.path))
        full, self._file = self._file, _opened(self.path)
        self._size = 0
        full.close()


def rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _opened(path: Path) -> FileIO:
    path.touch(mode=_MODE)
    return path.open("r+b", buffering=0)


def _end_of_lines(file: FileIO) -> int:
    """Return the offset at which the last complete line ends."""
    end = file.seek(0, 2)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _lines_of(request: ExportTraceServiceRequest) -> tuple[list[bytes], int]:
    """Return the request as lines, halved while too long, and the number of spans left out."""
    lines, dropped = [], drop_malformed(request)
    waiting = deque([document_of(request)])
    while waiting:
        document = waiting.popleft()
        line = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        if len(line) < MAX_LINE_BYTES:
            lines.append(line + b"\n")
            continue
        halves = _halves(document)
        dropped += not halves
        waiting.extend(halves)
    return lines, dropped


def _halves(document: dict[str, Any]) -> list[dict[str, Any]]:
    spans = list(flat(document))
    middle = len(spans) // 2
    halves = (spans[:middle], spans[middle:]) if middle else ()
    return [{"resourceSpans": [alone(*each) for each in half]} for half in halves]


def flat(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Yield each span of OTLP's JSON, after its resource and its scope."""
    for resource in document.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield resource, scope, span


def alone(resource: dict[str, Any], scope: dict[str, Any], span: dict[str, Any]) -> dict[str, Any]:
    """Return the resource with this span only."""
    return {**resource, "scopeSpans": [{**scope, "spans": [span]}]}


class Lines:
    """The lines of the previous file and of this one, to iterate several times; `name` is for messages."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise BadTraceFile(f"{path}: no such file")
        self.name = str(path)
        self._path = path

    def __iter__(self) -> Iterator[Line]:
        """Yield all lines. Raises OSError, and BadTraceFile for a line that is too long or not OTLP."""
        for path in (rotated(self._path), self._path):
            if path.is_file():
                yield from _lines(path)


@dataclass(frozen=True, slots=True)
class Line:
    """One line, parsed on demand; `place` is its file and number."""

    place: str
    raw: bytes

    def document(self) -> Any:
        """Parse the JSON object; empty for an incomplete last line. Raises BadTraceFile."""
        try:
            return json.loads(self.raw)
        except (ValueError, RecursionError) as error:
            if not self.raw.endswith(b"\n"):
                return {}
            raise BadTraceFile(f"{self.place}: must be JSON ({error})") from error

    def spans(self, keep: Callable[[Any], bool] | None = None) -> Iterator[Span]:
        """Yield the spans; with `keep`, those whose JSON it returns True for. Raises BadTraceFile."""
        try:
            yield from spans_in(self.document(), keep)
        except Malformed as problem:
            raise BadTraceFile(f"{self.place}: {problem}") from problem


def _lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise BadTraceFile(f"{path}:{number}: must be at most {MAX_LINE_BYTES} bytes long")
            start = raw.lstrip()[:1]
            if start not in (b"", b"{"):
                raise BadTraceFile(f"{path}:{number}: must be a JSON object")
            if start:
                yield Line(f"{path}:{number}", raw)


# ------------------------------------------------------------------------------- this user's files --


def trace_dir() -> Path:
    """Return $GALLEY_TRACE_DIR, else galley/traces in $XDG_STATE_HOME or ~/.local/state."""
    own = os.environ.get("GALLEY_TRACE_DIR")
    if own:
        return Path(own)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "galley" / "traces"


def new_file(directory: Path) -> Path:
    """Return a path for a new file of this process.

    Delete all others but the newest three and those of processes that run. Raises OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ended = [file for file in _newest_first(directory) if not _is_written(file)]
    for old in ended[_KEPT_FILES - 1 :]:
        old.unlink(missing_ok=True)
        rotated(old).unlink(missing_ok=True)
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return directory / f"traces-{began}-{os.getpid()}.jsonl"


def _is_written(file: Path) -> bool:
    pid = file.stem.rpartition("-")[2]
    return pid.isdecimal() and pid != str(os.getpid()) and Path("/proc", pid).exists()


def newest_file(directory: Path) -> Path | None:
    return next(iter(_newest_first(directory)), None)


def _newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob("traces-*.jsonl"), key=_written_ns, reverse=True)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # another stack has just removed it


class Malformed(ValueError):
    """The input is not a span in OTLP's JSON encoding."""


# ---------------------------------------------------------------------------------------- writing --


def drop_malformed(request: ExportTraceServiceRequest) -> int:
    """Remove spans with ids of a wrong length, their links' included; return how many."""
    dropped = 0
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            good = [span for span in scope.spans if _has_ids(span)]
            if len(good) < len(scope.spans):
                dropped += len(scope.spans) - len(good)
                del scope.spans[:]
                scope.spans.extend(good)
    return dropped


def _has_ids(span: OtlpSpan) -> bool:
    return (
        _is_named(span)
        and len(span.parent_span_id) in {0, _SPAN_DIGITS // 2}
        and all(_is_named(link) for link in span.links)
    )


def _is_named(holder: OtlpSpan | OtlpSpan.Link) -> bool:
    return len(holder.trace_id) == _TRACE_DIGITS // 2 and len(holder.span_id) == _SPAN_DIGITS // 2


def document_of(request: ExportTraceServiceRequest) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415  # readers need no protobuf

    document: dict[str, Any] = MessageToDict(request, use_integers_for_enums=True)
    for *_, span in flat(document):
        for holder in (span, *span.get("links", ())):
            holder.update((name, b64decode(holder[name]).hex()) for name in IDS if name in holder)
    return document


# ---------------------------------------------------------------------------------------- reading --


def spans_in(document: Any, keep: Callable[[Any], bool] | None = None) -> Iterator[Span]:
    """Yield the spans whose JSON `keep` returns True for, without those that lack ids. Raises Malformed."""
    try:
        for resource in document.get("resourceSpans") or ():
            process = _process(resource.get("resource") or {})
            for scope in resource.get("scopeSpans") or ():
                for span in scope.get("spans") or ():
                    if span.get("traceId") and span.get("spanId") and (keep is None or keep(span)):
                        yield _read_span(span, process)
    except Malformed:
        raise
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Malformed(f"must be spans in OTLP's JSON encoding ({error})") from error


def _process(resource: Mapping[str, Any]) -> Process:
    attributes = _read_attributes(resource)
    service, instance = attributes.get(SERVICE_NAME), attributes.get(SERVICE_INSTANCE)
    return Process(str(service or "unknown"), str(instance or ""))


def _read_span(span: Mapping[str, Any], process: Process) -> Span:
    status = span.get("status") or {}
    return Span(
        trace_id=intern(_id(span, "traceId", _TRACE_DIGITS)),
        span_id=_id(span, "spanId", _SPAN_DIGITS),
        parent_id=_id(span, "parentSpanId", _SPAN_DIGITS) if span.get("parentSpanId") else "",
        name=intern(_string(span, "name")),
        start_ns=_time(span, "startTimeUnixNano"),
        end_ns=_time(span, "endTimeUnixNano"),
        process=process,
        kind=int(span.get("kind") or 0),
        status=int(status.get("code") or 0),
        problem=_string(status, "message"),
        attributes=_read_attributes(span),
        events=tuple(_read_event(event) for event in span.get("events") or ()),
        links=tuple(_read_link(link) for link in span.get("links") or ()),
    )


def _read_event(event: Mapping[str, Any]) -> Event:
    return Event(intern(_string(event, "name")), _time(event, "timeUnixNano"), _read_attributes(event))


def _read_link(link: Mapping[str, Any]) -> Link:
    trace_id, span_id = _id(link, "traceId", _TRACE_DIGITS), _id(link, "spanId", _SPAN_DIGITS)
    return Link(trace_id, span_id, _read_attributes(link))


def _id(holder: Mapping[str, Any], name: str, digits: int) -> str:
    value = holder.get(name)
    if not isinstance(value, str) or len(value) != digits:
        raise Malformed(f"{name}: must be {digits} hexadecimal digits, got {value!r:.80}")
    bytes.fromhex(value)
    return value.lower()


def _time(holder: Mapping[str, Any], name: str) -> int:
    value = int(holder.get(name) or 0)
    if not 0 <= value < 2**64:
        raise Malformed(f"{name}: must be in [0, 2^64), got {value}")
    return value


def _string(holder: Mapping[str, Any], name: str) -> str:
    value = holder.get(name, "")
    if not isinstance(value, str):
        raise Malformed(f"{name}: must be a string, got {value!r:.80}")
    return _encodable(value)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which JSON may hold and no file or terminal accepts."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _read_attributes(holder: Mapping[str, Any]) -> Attributes:
    pairs = holder.get("attributes")
    return {intern(_string(pair, "key")): _read_value(pair.get("value")) for pair in pairs} if pairs else {}


def _read_value(value: Mapping[str, Any] | None) -> Value:
    if not value:
        return None
    kind, held = next(iter(value.items()))
    reader = _READERS.get(kind)
    return None if reader is None else reader(held)


def _read_string(held: str) -> str:
    text = _encodable(held)
    return intern(text) if len(text) <= _LONGEST_INTERNED else text


def _read_int(held: Any) -> int:
    value = int(held)
    if not -(2**63) <= value < 2**63:
        raise Malformed(f"intValue: must be in [-2^63, 2^63), got {value!r:.80}")
    return value


_READERS: Mapping[str, Callable[[Any], Value]] = {
    "stringValue": _read_string,
    "boolValue": bool,
    "intValue": _read_int,
    "doubleValue": float,
    "bytesValue": _read_string,
    "arrayValue": lambda held: tuple(_read_value(value) for value in held.get("values") or ()),
    "kvlistValue": lambda held: _read_attributes({"attributes": held.get("values")}),
}
