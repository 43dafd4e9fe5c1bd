"""The file of traces: OTLP's JSON encoding, one request a line (OpenTelemetry's "OTLP File Exporter").

It is bounded: a full file is renamed to `<name>.1`, replacing the previous one. Its last line may be
incomplete if its writer was killed or is writing. A failed write leaves the file as it was.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galley.trace.read.otlp_json import Malformed, document_of, drop_malformed, spans_in
from galley.trace.read.spans import Span

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

MAX_LINE_BYTES = 16 * 2**20
DEFAULT_MAX_BYTES = 64 * 2**20
# Private: with --trace-content it holds prompts and answers.
_MODE = 0o600
_KEPT_FILES = 4


class BadTraceFile(Exception):
    """A file of traces cannot be read; the message names the file and the line."""


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
        """Write the request; return the number of spans left out: without ids or too long. Raises OSError."""
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
        if not path.is_file():
            raise BadTraceFile(f"{path}: no such file")
        self.path = path

    def __iter__(self) -> Iterator[Line]:
        """Yield all lines. Raises OSError, and BadTraceFile for a line that is too long or not OTLP."""
        for path in (rotated(self.path), self.path):
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
            raise BadTraceFile(f"{self.place}: is not JSON ({error})") from error

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
                raise BadTraceFile(f"{path}:{number}: must be at most {MAX_LINE_BYTES} bytes long, is longer")
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
    """Return the path of a new file; only the newest few of the others are kept. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in _newest_first(directory)[_KEPT_FILES - 1 :]:
        old.unlink(missing_ok=True)
        rotated(old).unlink(missing_ok=True)
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return directory / f"traces-{began}-{os.getpid()}.jsonl"


def newest_file(directory: Path) -> Path | None:
    return next(iter(_newest_first(directory)), None)


def _newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob("traces-*.jsonl"), key=_written_ns, reverse=True)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # another stack has just removed it
