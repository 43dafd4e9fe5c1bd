"""Build stories from spans: parents and children, one clock, and which step served which round."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from galley.core import names
from galley.core.session.events import RoundParts
from galley.trace.read.model import Batch, Call, Request, Round, Story
from galley.trace.read.skew import Shift, align
from galley.trace.read.spans import CLIENT, SERVER, Event, Span, SpanKey


def stories_of(
    spans: Sequence[Span],
    session_id: str = "",
    sessions_of: Callable[[str], Collection[str]] = lambda _: (),
    *,
    cut: bool = False,
) -> tuple[Story, ...]:
    """Return a story for each session in the spans, or only that of `session_id`."""
    aligned, shifts = _aligned(spans)
    tree = _Tree(aligned)
    requests = sorted(_requests(tree), key=lambda request: request.start_ns)
    by_session: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_session[_session_of(request, tree)].append(request)
    return tuple(
        Story(
            name,
            _with_losses(requests_of, tree.losses.get(name, ())),
            _concerning(shifts, requests_of),
            cut,
            sessions_of,
        )
        for name, requests_of in by_session.items()
        if session_id in ("", name)
    )


def _aligned(spans: Sequence[Span]) -> tuple[Sequence[Span], tuple[Shift, ...]]:
    unique = {span.key: span for span in spans}  # an exporter may send a span twice
    gateways = dict.fromkeys(span.process for span in unique.values() if span.is_request)
    rounds = dict.fromkeys(span.process for span in unique.values() if span.name == names.ROUND)
    return align(list(unique.values()), unique, [*gateways, *rounds])


class _Tree:
    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.by_key: dict[SpanKey, Span] = {span.key: span for span in spans}
        self.continued_by: dict[SpanKey, Span] = {}
        self.losses: dict[str, list[Event]] = defaultdict(list)  # of KV blocks, by session
        self._children: dict[SpanKey, list[Span]] = defaultdict(list)
        for span in spans:
            if span.parent_id:
                self._children[span.trace_id, span.parent_id].append(span)
            for link in span.links:
                if link.text(names.LINK) == names.LINK_CONTINUES:
                    self.continued_by[link.key] = span
            for event in span.events:
                session_id = event.text(names.SESSION_ID)
                if session_id and event.name in {names.KV_EVICTED, names.KV_PREEMPTED}:
                    self.losses[session_id].append(event)

    def children(self, key: SpanKey) -> Sequence[Span]:
        return self._children.get(key, ())

    def calls_of(self, key: SpanKey) -> tuple[Call, ...]:
        made = sorted((span for span in self.children(key) if span.kind == CLIENT), key=lambda s: s.start_ns)
        served = (next((s for s in self.children(call.key) if s.kind == SERVER), None) for call in made)
        return tuple(map(Call, made, served))

    def batch_of(self, span: Span) -> Batch | None:
        linked = (link.key for link in span.links if link.text(names.LINK) == names.LINK_BATCH)
        found = next((self.by_key[key] for key in linked if key in self.by_key), None)
        if found is None:
            return None
        ranks = [child for child in self.children(found.key) if child.name == names.RANK_FORWARD]
        return Batch(found, tuple(sorted(ranks, key=lambda rank: rank.integer(names.RANK))))


def _requests(tree: _Tree) -> Iterable[Request]:
    """Yield all requests, those without a span of their own included."""
    rounds: dict[SpanKey, list[Span]] = defaultdict(list)
    for span in tree.spans:
        if span.name == names.ROUND:
            rounds[span.trace_id, span.parent_id].append(span)
        elif span.is_request:
            rounds.setdefault(span.key, [])
    for key, spans in rounds.items():
        yield _request(key, tree.by_key.get(key), spans, tree)


def _request(key: SpanKey, span: Span | None, spans: list[Span], tree: _Tree) -> Request:
    spans.sort(key=lambda one: (one.start_ns, one.end_ns, one.integer(names.ROUND_INDEX)))
    began_ns = span.start_ns if span is not None else None
    rounds = [
        Round(one, _parts_of(one), idle_ns, tree.batch_of(one), one.events, tree.calls_of(one.key))
        for one, idle_ns in zip(spans, _idle(spans, began_ns), strict=True)
    ]
    calls = tree.calls_of(key)
    session_id = span.text(names.SESSION_ID) if span else ""
    placed, loose = _placed(rounds, span.events if span else (), _seen_elsewhere(rounds, calls, session_id))
    return Request(key[0], span, tuple(placed), tuple(loose), calls)


def _idle(spans: Sequence[Span], began_ns: int | None) -> Iterable[int]:
    """Yield the idle time before each round (the first: since `began_ns`); 0 if the one before is missing."""
    expected, last_end_ns = 0, began_ns
    for span in spans:
        index = span.integer(names.ROUND_INDEX)
        known = index == expected and last_end_ns is not None
        yield max(0, span.start_ns - (last_end_ns or 0)) if known else 0
        expected, last_end_ns = index + 1, span.end_ns


def _seen_elsewhere(rounds: Iterable[Round], calls: Iterable[Call], session_id: str) -> Iterable[Event]:
    """Yield the events on spans of calls and of replicas, without those of other sessions in a step."""
    for call in [*calls, *(call for one in rounds for call in one.calls)]:
        yield from call.span.events
        if call.served is not None:
            yield from call.served.events
    for event in (event for one in rounds if one.batch for event in one.batch.span.events):
        if event.attributes.get(names.SESSION_ID) in (None, session_id):
            yield event


def _placed(
    rounds: Sequence[Round], own: Iterable[Event], elsewhere: Iterable[Event]
) -> tuple[list[Round], list[Event]]:
    """Return the rounds with their events, and the events outside. Replicas' copies of them are left out."""
    ends = [one.span.end_ns for one in rounds]
    placed = [list(one.events) for one in rounds]
    loose: list[Event] = []

    def place(event: Event) -> list[Event]:
        at = bisect_left(ends, event.time_ns)
        outside = at == len(rounds) or event.time_ns < rounds[at].span.start_ns - rounds[at].idle_ns
        return loose if outside else placed[at]

    for event in own:
        place(event).append(event)
    known = {id(events): {event.name for event in events} for events in placed}
    for event in elsewhere:
        events = place(event)
        if event.name not in known.get(id(events), ()):
            events.append(event)
    complete = [
        one if len(events) == len(one.events) else replace(one, events=_in_order(events))
        for one, events in zip(rounds, placed, strict=True)
    ]
    return complete, list(_in_order(loose))


def _with_losses(requests: Sequence[Request], losses: Iterable[Event]) -> tuple[Request, ...]:
    """Add losses of KV blocks in steps of others to the last request that began before them."""
    known = {id(event) for request in requests for event in request.all_events}
    added: dict[int, list[Event]] = defaultdict(list)
    for event in losses:
        if id(event) not in known:
            at = max(0, sum(request.start_ns <= event.time_ns for request in requests) - 1)
            added[at].append(event)
    return tuple(_with(request, added[at]) if at in added else request for at, request in enumerate(requests))


def _with(request: Request, events: Iterable[Event]) -> Request:
    rounds, loose = _placed(request.rounds, (), events)
    return replace(request, rounds=tuple(rounds), events=_in_order((*request.events, *loose)))


def _in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda event: event.time_ns))


def _session_of(request: Request, tree: _Tree) -> str:
    """Return the request's session id, or that of the request that continues it; empty if unknown."""
    if request.session_id:
        return request.session_id
    missing = request.trace_id, request.rounds[0].span.parent_id if request.rounds else ""
    heir = tree.continued_by.get(missing)
    return heir.text(names.SESSION_ID) if heir is not None else ""


def _concerning(shifts: Sequence[Shift], requests: Iterable[Request]) -> tuple[Shift, ...]:
    processes = set()
    for request in requests:
        if request.span is not None:
            processes.add(request.span.process)
        processes |= {call.served.process for call in request.all_calls if call.served is not None}
        for one in request.rounds:
            if one.batch is not None:
                processes |= {span.process for span in (one.batch.span, *one.batch.ranks)}
    return tuple(shift for shift in shifts if shift.process in processes)


def _parts_of(span: Span) -> RoundParts:
    """Return the parts from the span's attributes, cut to its duration."""
    draft_ns, queue_ns = span.integer(names.DRAFT_PART), span.integer(names.QUEUE_PART)
    return RoundParts.within(span.duration_ns, draft_ns, queue_ns, span.integer(names.COMPUTE_PART))
