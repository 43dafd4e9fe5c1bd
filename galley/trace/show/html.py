"""Render a story as one self-contained page without scripts or external resources.

Details open by the browser's own means (`details`, hover, focus), so that the page's policy can forbid
scripts: a prompt that gets past the escaping still cannot run. The policy allows only the page's own style,
by its hash.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from xml.etree.ElementTree import Element, tostring

from galley.common.printable import one_line, printable
from galley.core import names
from galley.trace.explain.causes import Part, times_of
from galley.trace.explain.explain import explain, summary
from galley.trace.read.model import Batch, Call, Request, Round, Story
from galley.trace.show.rows import (
    EVERYTHING,
    NO_SESSION,
    SHOWN_EVENTS,
    Gap,
    Limits,
    Row,
    about,
    columns_of,
    describe_event,
    describe_gap,
    figures,
    request_title,
    rows_of,
)
from galley.trace.show.summary import count, ms, percent

_BAR_UNITS = 1000
_MEANINGS = {
    Part.BEFORE: "no round under way",
    Part.DRAFT: "waiting for a draft",
    Part.QUEUE: "in the target's queue",
    Part.COMPUTE: "computing",
    Part.WIRE: "on the network and in the gateway",
    Part.LOG: "until the tokens were logged",
}
_SHOWN_COMPANY = 32
_SHOWN_CALLS = 20
_HERE = Path(__file__).parent
_LIMITS = Limits(head=300, tail=200, slowest=50, eventful=100, events=100)
_MAX_REQUESTS = 20
_STRIP_HEIGHT = 34
_LONGEST_TOKEN = 200
_TOKENS_OF_ROUND = 512


def page(story: Story, *, everything: bool = False) -> str:
    """Render the page; long stories are shortened in the middle unless `everything` is set."""
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    digest = b64encode(sha256(style.encode()).digest()).decode("ascii")
    template = Template((_HERE / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        title=escape(f"Galley trace {one_line(story.session_id) or story.requests[0].trace_id}"),
        style=style,
        body=tostring(_body(story, EVERYTHING if everything else _LIMITS), encoding="unicode", method="html"),
    )


def _body(story: Story, limits: Limits) -> Element:
    explanation = explain(story)
    requests = story.requests[:_MAX_REQUESTS]
    rows = [rows_of(request, limits) for request in requests]
    flat = [row for of_one in rows for row in of_one]
    rounds = [row for row in flat if isinstance(row, Round)]
    ids = {id(one): f"round-{number}" for number, one in enumerate(rounds)}
    made = _RoundRows(story, rounds, explanation.round, ids)
    return _element(
        "main",
        *_header(story),
        _element("p", explanation.sentence, class_="slowest-sentence"),
        _element("ul", *(_element("li", line) for line in summary(story, explanation)), class_="summary"),
        *_strip(story, rounds),
        _element("h2", "Tokens"),
        *_tokens(story, flat, ids),
        _element("h2", "Rounds"),
        _legend(),
        _element("div", *_rows(story, requests, rows, made), class_="rounds"),
    )


def _header(story: Story) -> Iterator[Element]:
    yield _element("h1", f"session {one_line(story.session_id) or NO_SESSION}")
    traces = dict.fromkeys(request.trace_id for request in story.requests[:_MAX_REQUESTS])
    yield _element("p", f"{about(story)} · trace {', '.join(traces)}", class_="about")
    yield _element("ul", *(_element("li", figure) for figure in figures(story)), class_="figures")


def _strip(story: Story, rounds: Sequence[Round]) -> Iterator[Element]:
    whole_ns = max(1, story.end_ns - story.start_ns)
    units_per_ns = _BAR_UNITS / whole_ns
    strip = _element(
        "svg",
        class_="strip",
        viewBox=f"0 0 {_BAR_UNITS} {_STRIP_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label="the whole story in time",
    )
    for one in rounds:
        start = (one.span.start_ns - one.idle_ns - story.start_ns) * units_per_ns
        strip.extend(_bar_pieces(one, start, units_per_ns, height=_STRIP_HEIGHT - 8))
    for request in story.requests[:_MAX_REQUESTS]:
        for event in (*request.events, *(event for one in request.rounds for event in one.events))[:200]:
            at = (event.time_ns - story.start_ns) * units_per_ns
            strip.append(_element("rect", class_="event-mark", x=f"{at:.3f}", y="28", width="3", height="6"))
    yield _element("h2", f"In time: {ms(whole_ns)} ms from left to right")
    yield strip


def _legend() -> Element:
    items = [
        _element("li", _element("span", class_=f"swatch {part.value}"), _MEANINGS[part]) for part in Part
    ]
    return _element("ul", *items, class_="legend")


def _rows(
    story: Story, requests: Sequence[Request], rows: Sequence[Sequence[Row]], made: _RoundRows
) -> Iterator[Element]:
    headings = ("", "round", "at ms", "tokens", "accepted", "ms", "")
    yield _element("div", *(_element("span", heading) for heading in headings), class_="row headings")
    for number, (request, of_one) in enumerate(zip(requests, rows, strict=True), 1):
        if len(requests) > 1:
            yield _element("div", request_title(story, request, number), class_="request")
        for row in of_one:
            yield made.of(row)


def _tokens(story: Story, rows: Sequence[Row], ids: dict[int, str]) -> Iterator[Element]:
    """Show each token by its origin, as text if traced, else as a box; each links to its round."""
    rounds = [row for row in rows if isinstance(row, Round)]
    with_text = any(one.text for one in rounds)
    items = [
        _element("li", _element("span", class_="swatch of-draft"), "proposed by the draft, and accepted"),
        _element("li", _element("span", class_="swatch of-target"), "the target's own"),
    ]
    yield _element("ul", *items, class_="legend")
    listed = _element("div", class_="tokens" if with_text else "tokens boxes")
    for row in rows:
        if isinstance(row, Gap) and row.rounds:
            listed.append(_element("span", f" … {count(row.confirmed, 'token')} … ", class_="faint"))
        elif isinstance(row, Round):
            first = story.output_index(row.position)
            first = row.position if first is None else first
            for at in range(min(row.confirmed, _TOKENS_OF_ROUND)):
                listed.append(_token(row, at, first + at, ids[id(row)]))
    yield listed


def _token(one: Round, at: int, number: int, row_id: str) -> Element:
    text = (
        printable(one.text[at][:_LONGEST_TOKEN]).replace("\n", "⏎\n") if at < len(one.text) else str(number)
    )
    origin = "of-draft" if at < one.accepted else "of-target"
    return _element(
        "a",
        text,
        class_=f"token {origin}",
        href=f"#{row_id}",
        title=f"token {number}, round {one.index}",
        tabindex="-1",  # the keyboard moves between rounds, not tokens
    )


class _RoundRows:
    """Render the rows of a story, all bars at the scale of `rounds`."""

    def __init__(
        self, story: Story, rounds: Sequence[Round], slowest: Round | None, ids: dict[int, str]
    ) -> None:
        """Take the HTML id of each round's row, by `id()` of the round, from `ids`."""
        self._story = story
        self._longest_ns = max((one.felt_ns for one in rounds), default=0) or 1
        self._slowest = slowest
        self._ids = ids

    def of(self, row: Row) -> Element:
        match row:
            case Round():
                return self._round(row)
            case Gap():
                return _element("div", f"… {describe_gap(row)}", class_="gap")
            case _:
                return _element("div", f"! {describe_event(row)}", class_="event")

    def _round(self, one: Round) -> Element:
        slowest = one is self._slowest
        summary = _element(
            "summary",
            _element("span", "▶" if slowest else ""),
            *(_element("span", column) for column in columns_of(self._story, one)),
            self._bar(one),
            _element("div", "\n".join(_tip(one)), class_="tip", role="tooltip"),
        )
        events = [
            _element("div", f"! {describe_event(event)}", class_="event")
            for event in one.events[:SHOWN_EVENTS]
        ]
        row_class = "round slowest" if slowest else "round"
        return _element(
            "div",
            _element("details", summary, self._detail(one), class_=row_class, id=self._ids[id(one)]),
            *events,
        )

    def _bar(self, one: Round) -> Element:
        return _element(
            "svg",
            *_bar_pieces(one, 0.0, _BAR_UNITS / self._longest_ns, height=14),
            class_="bar",
            viewBox=f"0 0 {_BAR_UNITS} 14",
            preserveAspectRatio="none",
            role="img",
            aria_label="; ".join(_parts(one)),
        )

    def _detail(self, one: Round) -> Element:
        pairs = [pair for facts in (_facts(one), self._batch(one), _calls(one)) for pair in facts]
        listed = _element("dl")
        for name, value in pairs:
            listed.append(_element("dt", name))
            listed.append(_element("dd", value))
        return _element("div", listed, class_="detail")

    def _batch(self, one: Round) -> Iterator[tuple[str, str]]:
        if one.batch is None:
            if one.sessions:
                yield "step", count(one.sessions, "session")
            return
        yield "step", ", ".join(_step(one.batch, one.sessions))
        for rank, took_ns in enumerate(one.batch.rank_ns[:_SHOWN_COMPANY]):
            yield f"rank {rank}", f"{ms(took_ns)} ms"
        company = [one_line(name) for name in self._story.company(one.batch)]
        if company:
            more = len(company) - _SHOWN_COMPANY
            names_shown = ", ".join(company[:_SHOWN_COMPANY]) + (f" and {more:,} more" if more > 0 else "")
            yield "other sessions in the step", names_shown


def _bar_pieces(one: Round, start: float, units_per_ns: float, height: int) -> Iterator[Element]:
    for part, time_ns in times_of(one).items():
        width = time_ns * units_per_ns
        if width > 0:
            yield _element(
                "rect", class_=part.value, x=f"{start:.3f}", y="0", width=f"{width:.3f}", height=str(height)
            )
        start += width


def _parts(one: Round) -> Iterator[str]:
    for part, time_ns in times_of(one).items():
        if time_ns:
            yield f"{ms(time_ns)} ms {_MEANINGS[part]}"


def _tip(one: Round) -> Iterator[str]:
    yield from _parts(one)
    if one.target:
        yield f"target {one_line(one.target)}"
    if one.sessions:
        yield f"in a step of {count(one.sessions, 'session')}"
    for event in one.events[:3]:
        yield describe_event(event)


def _facts(one: Round) -> Iterator[tuple[str, str]]:
    yield "position", f"{one.position:,}, {count(one.confirmed, 'token')} confirmed"
    yield from _drafts(one)
    if overlap := one.span.text(names.ROUND_OVERLAP):
        yield "drafting", one_line(overlap)
    for name, replica in (("target", one.target), ("draft", one.draft)):
        if replica:
            yield name, one_line(replica)
    if one.reused is not None:
        yield "prefix cached", f"{one.reused:,} of {one.position:,} tokens"
    for part in _parts(one):
        amount, _, meaning = part.partition(" ms ")
        yield meaning, f"{amount} ms"
    if computed_ns := one.span.integer(names.DRAFT_COMPUTE_NS):
        yield "draft computed", f"{ms(computed_ns)} ms"
    if linger_ns := one.span.integer(names.LINGER_NS):
        yield "target lingered", f"{ms(linger_ns)} ms for a draft"


def _drafts(one: Round) -> Iterator[tuple[str, str]]:
    k = one.span.integer(names.ROUND_K)
    yield (
        "draft tokens",
        f"k = {k:,}, {one.drafted:,} drafted, {one.verified:,} verified, {one.accepted:,} accepted",
    )
    if one.strategy:
        yield "strategy", one_line(one.strategy)
    if one.sources:
        yield "accepted by source", one_line(", ".join(one.sources))
    if one.ranks:
        yield "tree", f"{count(one.depth, 'position')}, accepted by rank: {one_line(', '.join(one.ranks))}"


def _step(batch: Batch, sessions: int) -> Iterator[str]:
    yield count(batch.sessions or sessions, "session")
    if batch.rows:
        yield count(batch.rows, "row")
    if drafts := batch.span.integer(names.BATCH_DRAFT_ROWS):
        yield f"{drafts:,} of drafts"
    if batch.prefill_rows:
        yield f"{batch.prefill_rows:,} of prompts ({percent(batch.prefill_share, 1)})"
    if forward_ns := batch.span.integer(names.FORWARD_NS):
        yield f"forward {ms(forward_ns)} ms"
    if mask_wait_ns := batch.span.integer(names.MASK_WAIT_NS):
        yield f"waited {ms(mask_wait_ns)} ms for masks"
    if batch.free_blocks is not None:
        yield f"{batch.free_blocks:,} KV blocks free"
    if batch.waiting:
        yield f"{count(batch.waiting, 'request')} waiting"


def _calls(one: Round) -> Iterator[tuple[str, str]]:
    for call in one.calls[:_SHOWN_CALLS]:
        yield one_line(call.span.name, 40), ", ".join(_call(call, one.span.start_ns))


def _call(call: Call, since_ns: int) -> Iterator[str]:
    if call.replica:
        yield one_line(call.replica)
    yield f"{ms(call.span.duration_ns)} ms from {ms(call.span.start_ns - since_ns)} ms on"
    if call.served is not None:
        served = call.served
        after = ms(served.start_ns - call.span.start_ns)
        yield f"served for {ms(served.duration_ns)} ms, {after} ms after the call"
    if call.span.problem:
        yield one_line(call.span.problem)


def _element(tag: str, *content: str | Element, **attributes: str) -> Element:
    """Make an element; `class_` is its class. Control characters in its text are replaced."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    last: Element | None = None
    for part in content:
        if isinstance(part, Element):
            made.append(part)
            last = part
        elif last is None:
            made.text = (made.text or "") + printable(part)
        else:
            last.tail = (last.tail or "") + printable(part)
    return made
