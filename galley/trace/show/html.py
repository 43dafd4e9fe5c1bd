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
from xml.etree.ElementTree import Element

from galley.common.printable import printable
from galley.trace.explain.case import Part
from galley.trace.explain.explain import explain, summary
from galley.trace.read.model import Request, Round, Story
from galley.trace.show.elements import element, markup
from galley.trace.show.headline import NO_SESSION, about, figures
from galley.trace.show.html_rows import BAR_UNITS, MEANINGS, RoundRows, bar_pieces, longest_of
from galley.trace.show.rows import EVERYTHING, Gap, Limits, Row, rows_of
from galley.trace.show.summary import count, ms, one_line

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
        body=markup(_body(story, EVERYTHING if everything else _LIMITS)),
    )


def _body(story: Story, limits: Limits) -> Element:
    explanation = explain(story)
    requests = story.requests[:_MAX_REQUESTS]
    rows = [rows_of(request, limits) for request in requests]
    flat = [row for of_one in rows for row in of_one]
    rounds = [row for row in flat if isinstance(row, Round)]
    ids = {id(one): f"round-{number}" for number, one in enumerate(rounds)}
    made = RoundRows(story, longest_of(flat), explanation.round, ids)
    return element(
        "main",
        *_header(story),
        element("p", explanation.sentence, class_="slowest-sentence"),
        element("ul", *(element("li", line) for line in summary(story, explanation)), class_="summary"),
        *_strip(story, rounds),
        element("h2", "Tokens"),
        *_tokens(story, flat, ids),
        element("h2", "Rounds"),
        _legend(),
        element("div", *_rows(story, requests, rows, made), class_="rounds"),
    )


def _header(story: Story) -> Iterator[Element]:
    yield element("h1", f"session {one_line(story.session_id) or NO_SESSION}")
    traces = dict.fromkeys(request.trace_id for request in story.requests[:_MAX_REQUESTS])
    yield element("p", f"{about(story)} · trace {', '.join(traces)}", class_="about")
    yield element("ul", *(element("li", figure) for figure in figures(story)), class_="figures")


def _strip(story: Story, rounds: Sequence[Round]) -> Iterator[Element]:
    """Draw all shown rounds on one time line, with a mark for each event."""
    whole_ns = max(1, story.end_ns - story.start_ns)
    units_per_ns = BAR_UNITS / whole_ns
    strip = element(
        "svg",
        class_="strip",
        viewBox=f"0 0 {BAR_UNITS} {_STRIP_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label="the whole story in time",
    )
    for one in rounds:
        start = (one.span.start_ns - one.idle_ns - story.start_ns) * units_per_ns
        strip.extend(bar_pieces(one, start, units_per_ns, height=_STRIP_HEIGHT - 8))
    for request in story.requests[:_MAX_REQUESTS]:
        for event in (*request.events, *(event for one in request.rounds for event in one.events))[:200]:
            at = (event.time_ns - story.start_ns) * units_per_ns
            strip.append(element("rect", class_="event-mark", x=f"{at:.3f}", y="28", width="3", height="6"))
    yield element("h2", f"In time: {ms(whole_ns)} ms from left to right")
    yield strip


def _legend() -> Element:
    items = [element("li", element("span", class_=f"swatch {part.value}"), MEANINGS[part]) for part in Part]
    return element("ul", *items, class_="legend")


def _rows(
    story: Story, requests: Sequence[Request], rows: Sequence[Sequence[Row]], made: RoundRows
) -> Iterator[Element]:
    headings = ("", "round", "at ms", "tokens", "accepted", "ms", "")
    yield element("div", *(element("span", heading) for heading in headings), class_="row headings")
    for number, (request, of_one) in enumerate(zip(requests, rows, strict=True), 1):
        if len(requests) > 1:
            what = "resumed" if request.resumed else "began"
            at = ms(request.start_ns - story.start_ns)
            label = f"request {number} of {len(story.requests)} {what} at {at} ms"
            yield element("div", label, class_="request")
        for row in of_one:
            yield made.of(row)


def _tokens(story: Story, rows: Sequence[Row], ids: dict[int, str]) -> Iterator[Element]:
    """Show each token by its origin, as text if traced, else as a box; each links to its round."""
    rounds = [row for row in rows if isinstance(row, Round)]
    with_text = any(one.text for one in rounds)
    items = [
        element("li", element("span", class_="swatch of-draft"), "proposed by the draft, and accepted"),
        element("li", element("span", class_="swatch of-target"), "the target's own"),
    ]
    yield element("ul", *items, class_="legend")
    listed = element("div", class_="tokens" if with_text else "tokens boxes")
    for row in rows:
        if isinstance(row, Gap) and row.rounds:
            listed.append(element("span", f" … {count(row.confirmed, 'token')} … ", class_="faint"))
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
    return element(
        "a",
        text,
        class_=f"token {origin}",
        href=f"#{row_id}",
        title=f"token {number}, round {one.index}",
        tabindex="-1",  # the keyboard moves between rounds, not tokens
    )
