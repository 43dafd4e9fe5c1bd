"""Find a session or a trace in a file of traces.

The file is read several times (for its requests, the wanted spans, the ranks of their steps), so that only
the wanted spans are kept. Lines that cannot hold them are not parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from galley.core import names
from galley.trace.read.otlp_file import Lines
from galley.trace.read.otlp_json import Malformed, spans_in
from galley.trace.read.spans import Link, Span, SpanKey

MAX_SPANS = 250_000
_SHOWN_MATCHES = 5
_TRACE_ID = re.compile(rb'"traceId":\s*"([0-9a-fA-F]{32})"')


class NotFound(Exception):
    """No session or trace has the id, or several have it as a prefix."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request in the file; a rejected one has no session."""

    session_id: str
    trace_id: str
    model: str
    start_ns: int
    duration_ns: int
    output_tokens: int
    rounds: int
    slowest_round_ns: int
    error: str
    continues: tuple[SpanKey, ...]

    @property
    def traces(self) -> tuple[str, ...]:
        """Return its trace and those of the requests that it continues."""
        return self.trace_id, *(trace_id for trace_id, _ in self.continues)


@dataclass(frozen=True, slots=True)
class Selection:
    """The spans of some traces and of the steps that served them, and the index of the file.

    `cut` is True if spans beyond MAX_SPANS were left out.
    """

    spans: Sequence[Span]
    cut: bool
    index: Index
    session_id: str = ""


class Index:
    """The requests of a file."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        self._sessions: dict[str, set[str]] = {}
        for entry in self.entries:
            if entry.session_id:
                self._sessions.setdefault(entry.trace_id, set()).add(entry.session_id)

    def sessions_of(self, trace_id: str) -> Collection[str]:
        """Return the sessions with requests in this trace."""
        return self._sessions.get(trace_id, ())

    def latest(self, count: int) -> Sequence[Entry]:
        """Return the newest requests, newest first."""
        return sorted(self.entries, key=lambda entry: entry.start_ns, reverse=True)[:count]

    def sessions_from(self, trace_id: str) -> set[str]:
        """Return the sessions with a request in this trace, or that continue an unfinished one of it."""
        return {entry.session_id for entry in self.entries if entry.session_id and trace_id in entry.traces}

    def traces_of_session(self, session_id: str) -> set[str]:
        """Return the traces of its requests and of those that they continue."""
        return {
            trace_id for entry in self.entries if entry.session_id == session_id for trace_id in entry.traces
        }


def index_of(lines: Lines) -> Index:
    """Read all requests. Raises BadTraceFile."""
    mark = names.PROVIDER.encode()
    found = _spans(lines, lambda raw: mark in raw, _may_be_request)
    return Index(_entry(span) for span in found if span.is_request)


def find(lines: Lines, id_prefix: str) -> Selection:
    """Find the session or trace whose id is or starts with `id_prefix`. Raises NotFound, BadTraceFile."""
    index = index_of(lines)
    sessions = {entry.session_id for entry in index.entries} - {""}
    traces = {entry.trace_id for entry in index.entries}
    kind, name = _the_one(id_prefix, sessions, traces) or ("trace", _trace_by_prefix(lines, id_prefix))
    if kind == "trace":
        of_trace = index.sessions_from(name)
        if len(of_trace) != 1:
            return Selection(*_collect(lines, {name}), index)
        name = of_trace.pop()
    return Selection(*_collect(lines, index.traces_of_session(name), name), index, name)


def _the_one(id_prefix: str, sessions: set[str], traces: set[str]) -> tuple[str, str] | None:
    """Return ("session" or "trace", id); None if no request matches."""
    if id_prefix in sessions:
        return "session", id_prefix
    if id_prefix.lower() in traces:
        return "trace", id_prefix.lower()
    matches = [("session", one) for one in sessions if one.startswith(id_prefix)]
    matches += [("trace", one) for one in traces if one.startswith(id_prefix.lower())]
    if len(matches) > 1:
        raise _ambiguous(id_prefix, [f"{kind} {name}" for kind, name in matches])
    return matches[0] if matches else None


def _trace_by_prefix(lines: Lines, id_prefix: str) -> str:
    """Find a trace without our requests: of another system, or of a killed gateway."""
    prefix = id_prefix.lower()
    found: set[str] = set()
    if re.fullmatch("[0-9a-f]{1,32}", prefix):
        for line in lines:
            ids = (match.decode().lower() for match in _TRACE_ID.findall(line.raw))
            found |= {trace_id for trace_id in ids if trace_id.startswith(prefix)}
    if not found:
        raise NotFound(f"no session or trace {id_prefix!r} in {lines.path}")
    if len(found) > 1:
        raise _ambiguous(id_prefix, [f"trace {trace_id}" for trace_id in found])
    return found.pop()


def _ambiguous(id_prefix: str, matches: Collection[str]) -> NotFound:
    listed = ", ".join(sorted(matches)[:_SHOWN_MATCHES])
    more = ", ..." if len(matches) > _SHOWN_MATCHES else ""
    return NotFound(f"{id_prefix!r} begins several ids: {listed}{more}")


# -------------------------------------------------------------------------------------- the spans --


def _collect(lines: Lines, traces: set[str], session_id: str = "") -> tuple[list[Span], bool]:
    """Return the spans of the traces, and the steps and ranks that served them."""
    of_ours = _any_of(traces | {session_id} - {""})
    kept = list(_first(_spans(lines, of_ours, lambda span: _concerns(span, traces, session_id))))
    passes = {span.trace_id for span in kept} - traces
    mark = names.RANK_FORWARD.encode()
    ranks = _spans(
        lines,
        lambda raw: bool(passes) and mark in raw,
        lambda span: span.get("name") == names.RANK_FORWARD and _trace_id(span) in passes,
    )
    kept += _first(ranks)
    return kept[:MAX_SPANS], len(kept) > MAX_SPANS


def _first(spans: Iterator[Span]) -> Iterator[Span]:
    """Return one span more than allowed, so that the excess is noticed."""
    for _, span in zip(range(MAX_SPANS + 1), spans, strict=False):
        yield span


def _any_of(traces: Collection[str]) -> Callable[[bytes], bool]:
    """Return a test whether a line holds one of these ids, in either case."""
    pattern = re.compile(b"|".join(re.escape(one.encode()) for one in sorted(traces)), re.IGNORECASE)
    return lambda raw: pattern.search(raw) is not None


def _concerns(span: Any, traces: Collection[str], session_id: str) -> bool:
    """Return True if a span belongs to these traces, links to one, or has an event of the session."""
    if _trace_id(span) in traces or any(_trace_id(link) in traces for link in span.get("links") or ()):
        return True
    events = span.get("events") or () if session_id else ()
    return any(_names(event, session_id) for event in events)


def _names(event: Any, session_id: str) -> bool:
    return any(
        pair.get("key") == names.SESSION_ID and (pair.get("value") or {}).get("stringValue") == session_id
        for pair in event.get("attributes") or ()
    )


def _trace_id(found: Any) -> str:
    return str(found.get("traceId", "")).lower()


def _may_be_request(span: Any) -> bool:
    return any(pair.get("key") == names.PROVIDER for pair in span.get("attributes") or ())


def _spans(lines: Lines, may_hold: Callable[[bytes], bool], keep: Callable[[Any], bool]) -> Iterator[Span]:
    for line in lines:
        if not may_hold(line.raw):
            continue
        try:
            yield from spans_in(line.document(), keep)
        except Malformed as problem:
            raise line.fault(problem) from problem


def _entry(span: Span) -> Entry:
    return Entry(
        session_id=span.text(names.SESSION_ID),
        trace_id=span.trace_id,
        model=span.text(names.REQUEST_MODEL),
        start_ns=span.start_ns,
        duration_ns=span.duration_ns,
        output_tokens=span.integer(names.OUTPUT_TOKENS),
        rounds=span.integer(names.ROUNDS),
        slowest_round_ns=span.integer(names.SLOWEST_ROUND_NS),
        error=span.text(names.ERROR_TYPE),
        continues=tuple(link.key for link in span.links if is_continuation(link)),
    )


def is_continuation(link: Link) -> bool:
    """Return True if the link leads to the request that created the session."""
    return link.attributes.get(names.LINK) == names.LINK_CONTINUES
