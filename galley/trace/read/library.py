"""Find a session or a trace in a file of traces.

The file is read several times (for its requests, the wanted spans, the ranks of their steps), so that only
the wanted spans are kept. Lines that cannot hold them are not parsed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from galley.core import names
from galley.trace.read.otlp_file import Lines
from galley.trace.read.spans import Span, SpanKey

MAX_SPANS = 250_000
_SHOWN_MATCHES = 5
WHEN = (
    "a request is there within half a second of its end with `galley up --trace`, else after the services' "
    "OTEL_BSP_SCHEDULE_DELAY (5 s by default), and only if it was sampled or forced"
)
"""When a request can be found, for messages."""
_TRACE_ID = re.compile(rb'"traceId":\s*"([0-9a-fA-F]{32})"')


class NotFound(Exception):
    """No session or trace has the id, or several have it as a prefix."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request in the file; a rejected one has no session. `traces` include those that it continues.

    `error` is its status and the refused field.
    """

    session_id: str
    trace_id: str
    start_ns: int
    duration_ns: int
    output_tokens: int
    slowest_round_ns: int
    error: str
    traces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Index:
    entries: Sequence[Entry]
    sessions: Mapping[str, set[str]]

    def latest(self, count: int) -> Sequence[Entry]:
        return sorted(self.entries, key=lambda entry: entry.start_ns, reverse=True)[:count]

    def slowest(self) -> Sequence[Entry]:
        """Return the request with the slowest round; none if there is no round."""
        return sorted(self.entries, key=lambda entry: entry.slowest_round_ns, reverse=True)[:1]

    def sessions_of(self, trace_id: str) -> Collection[str]:
        return self.sessions.get(trace_id, ())


@dataclass(frozen=True, slots=True)
class Selection:
    """At most MAX_SPANS spans; `cut` if there are more. `session_id` is empty unless they have just one."""

    spans: Sequence[Span]
    cut: bool
    index: Index
    session_id: str = ""


def index_of(lines: Lines) -> Index:
    """Read all requests. Raises BadTraceFile."""
    mark = names.PROVIDER.encode()
    spans = _spans(lines, lambda raw: mark in raw, lambda span: names.PROVIDER in _pairs(span))
    entries = [_entry(span) for span in spans if span.is_request]
    sessions: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        if entry.session_id:
            sessions[entry.trace_id].add(entry.session_id)
    return Index(entries, sessions)


def find(lines: Lines, id_prefix: str, index: Index | None = None) -> Selection:
    """Find the session or trace whose id is or starts with `id_prefix`. Raises NotFound, BadTraceFile."""
    index = index_of(lines) if index is None else index
    sessions = {entry.session_id for entry in index.entries} - {""}
    traces = {entry.trace_id for entry in index.entries}
    kind, name = _the_one(id_prefix, sessions, traces) or ("trace", _trace_by_prefix(lines, id_prefix))
    if kind == "trace":
        of_trace = {one.session_id for one in index.entries if one.session_id and name in one.traces}
        if len(of_trace) != 1:
            return Selection(*_collect(lines, {name}), index)
        name = of_trace.pop()
    of_session = {trace_id for one in index.entries if one.session_id == name for trace_id in one.traces}
    return Selection(*_collect(lines, of_session, name), index, name)


def _the_one(id_prefix: str, sessions: set[str], traces: set[str]) -> tuple[str, str] | None:
    """Return ("session" or "trace", id); None if no request matches. Raises NotFound if several do."""
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
        raise NotFound(f"no session or trace {id_prefix!r} in {lines.name}; {WHEN}")
    if len(found) > 1:
        raise _ambiguous(id_prefix, [f"trace {trace_id}" for trace_id in found])
    return found.pop()


def _ambiguous(id_prefix: str, matches: Collection[str]) -> NotFound:
    listed = ", ".join(sorted(matches)[:_SHOWN_MATCHES])
    more = ", ..." if len(matches) > _SHOWN_MATCHES else ""
    return NotFound(f"{id_prefix!r}: must be the prefix of one id only, got {listed}{more}")


# -------------------------------------------------------------------------------------- the spans --


def _collect(lines: Lines, traces: set[str], session_id: str = "") -> tuple[list[Span], bool]:
    ids = (re.escape(one.encode()) for one in sorted(traces | {session_id} - {""}))
    may_concern = re.compile(b"|".join(ids), re.IGNORECASE).search
    # One span more than allowed, so that the excess is noticed.
    spans = _spans(lines, may_concern, lambda span: _concerns(span, traces, session_id))
    kept = list(islice(spans, MAX_SPANS + 1))
    steps = {span.key for span in kept if span.trace_id not in traces}  # of other traces, which link here
    mark = names.RANK_FORWARD.encode()
    ranks = _spans(
        lines,
        lambda raw: bool(steps) and mark in raw,
        lambda span: span.get("name") == names.RANK_FORWARD and _parent_key(span) in steps,
    )
    kept += islice(ranks, MAX_SPANS + 1)
    return kept[:MAX_SPANS], len(kept) > MAX_SPANS


def _concerns(span: Any, traces: Collection[str], session_id: str) -> bool:
    """Return True if a span belongs to these traces, links to one, or has an event of the session.

    A round that links to its step does not concern the trace that the step is in.
    """
    links = (link for link in span.get("links") or () if _text(link, names.LINK) != names.LINK_BATCH)
    if any(_trace_id(one) in traces for one in (span, *links)):
        return True
    events = span.get("events") or () if session_id else ()
    return any(_text(event, names.SESSION_ID) == session_id for event in events)


def _text(holder: Any, key: str) -> object:
    return (_pairs(holder).get(key) or {}).get("stringValue")


def _pairs(holder: Any) -> dict[str, Any]:
    return {pair.get("key"): pair.get("value") for pair in holder.get("attributes") or ()}


def _trace_id(holder: Any) -> str:
    return str(holder.get("traceId", "")).lower()


def _parent_key(span: Any) -> SpanKey:
    return _trace_id(span), str(span.get("parentSpanId", "")).lower()


def _spans(lines: Lines, may_hold: Callable[[bytes], object], keep: Callable[[Any], bool]) -> Iterator[Span]:
    for line in lines:
        if may_hold(line.raw):
            yield from line.spans(keep)


def _entry(span: Span) -> Entry:
    return Entry(
        session_id=span.text(names.SESSION_ID),
        trace_id=span.trace_id,
        start_ns=span.start_ns,
        duration_ns=span.duration_ns,
        output_tokens=span.integer(names.OUTPUT_TOKENS),
        slowest_round_ns=span.integer(names.SLOWEST_ROUND_NS),
        error=" ".join(text for key in (names.ERROR_TYPE, names.FIELD) if (text := span.text(key))),
        traces=(
            span.trace_id,
            *(link.trace_id for link in span.links if link.text(names.LINK) == names.LINK_CONTINUES),
        ),
    )
