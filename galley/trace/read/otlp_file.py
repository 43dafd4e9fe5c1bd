"""The file of traces: OTLP's JSON encoding, one request a line (OpenTelemetry's "OTLP File Exporter").

It is bounded: a full file is renamed to `<name>.1`, replacing the previous one. Its last line may be
incomplete if its writer was killed or is writing. A failed write leaves the file as it was.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galley.trace.read.otlp_json import Malformed, document_of, drop_malformed

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

MAX_LINE_BYTES = 16 * 2**20
DEFAULT_MAX_BYTES = 64 * 2**20
# Private: with --trace-content it holds prompts and answers.
_MODE = 0o600


class BadTraceFile(Exception):
    """A file of traces cannot be read; the message names it, and the line."""


class OtlpFile:
    """Append export requests. Only one writer at a time."""

    def __init__(self, path: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Open or create the file, and cut off an incomplete last line. Raises OSError."""
        self.path = path
        self._max_bytes = max_bytes
        self._file = _opened(path)
        self._file.truncate(_end_of_lines(self._file))
        self._size = self._file.seek(0, 2)

    def append(self, request: ExportTraceServiceRequest) -> int:
        """Write the request; return the number of spans left out (without ids, or too long for a line).

        Raises OSError if it cannot be written; complete lines written before stay.
        """
        lines, dropped = _lines_of(request)
        for line in lines:
            if self._size and self._size + len(line) > self._max_bytes:
                self._rotate()
            self._write(line)
        return dropped

    def close(self) -> None:
        """Close the file; nothing is appended afterwards."""
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
    """Return the path of the previous file."""
    return path.with_name(f"{path.name}.1")


def _opened(path: Path) -> FileIO:
    """Open the file, private to its user; create it if needed."""
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
    """Serialize to one line, or to several with half of the spans each if too long."""
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
    """Split a document into two halves; none if it holds at most one span."""
    flat = [
        (resource, scope, span)
        for resource in document.get("resourceSpans", ())
        for scope in resource.get("scopeSpans", ())
        for span in scope.get("spans", ())
    ]
    middle = len(flat) // 2
    return [_document(half) for half in (flat[:middle], flat[middle:])] if middle else []


def _document(flat: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    return {
        "resourceSpans": [
            {**resource, "scopeSpans": [{**scope, "spans": [span]}]} for resource, scope, span in flat
        ]
    }


class Lines:
    """The lines of the previous file and of this one; may be iterated several times."""

    def __init__(self, path: Path) -> None:
        """Check that the file exists. Raises BadTraceFile."""
        if not path.is_file():
            raise BadTraceFile(f"{path}: no such file")
        self.path = path

    def __iter__(self) -> Iterator[Line]:
        """Yield all lines. Raises OSError, and BadTraceFile for a line that is too long or not OTLP."""
        older = rotated(self.path)
        if older.is_file():
            yield from _lines(older)
        yield from _lines(self.path)


class Line:
    """One line, parsed on demand."""

    def __init__(self, path: Path, number: int, raw: bytes) -> None:
        self._where = f"{path}:{number}"
        self.raw = raw

    def document(self) -> Any:
        """Parse the JSON object; empty for an incomplete last line. Raises BadTraceFile."""
        try:
            return json.loads(self.raw)
        except (ValueError, RecursionError) as error:
            if not self.raw.endswith(b"\n"):
                return {}
            raise BadTraceFile(f"{self._where}: is not JSON ({error})") from error

    def fault(self, problem: Malformed) -> BadTraceFile:
        """Return the error to raise if the document does not hold spans."""
        return BadTraceFile(f"{self._where}: {problem}")


def _lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise BadTraceFile(f"{path}:{number}: must be at most {MAX_LINE_BYTES} bytes long, is longer")
            start = raw.lstrip()[:1]
            if start not in (b"", b"{"):
                raise BadTraceFile(f"{path}:{number}: must be a JSON object")
            if start:
                yield Line(path, number, raw)
