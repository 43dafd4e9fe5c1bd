"""Render a story for the terminal: what it is, why its slowest round was slow, and its rounds as bars.

Without colours each part has a letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from galley.trace.explain.case import Part
from galley.trace.explain.explain import explain, summary
from galley.trace.read.model import Request, Round, Story
from galley.trace.read.spans import Event
from galley.trace.show.headline import NO_SESSION, about, figures, tokens_of
from galley.trace.show.rows import (
    EVERYTHING,
    SHOWN_EVENTS,
    Gap,
    Limits,
    Row,
    cells_of,
    describe_event,
    describe_gap,
    rows_of,
)
from galley.trace.show.summary import count, ms, one_line

_COLOURS = {
    Part.BEFORE: "bright_black",
    Part.DRAFT: "yellow",
    Part.QUEUE: "magenta",
    Part.COMPUTE: "blue",
    Part.WIRE: "cyan",
    Part.LOG: "red",
}
_LETTERS = {
    Part.BEFORE: ".",
    Part.DRAFT: "D",
    Part.QUEUE: "Q",
    Part.COMPUTE: "C",
    Part.WIRE: "W",
    Part.LOG: "L",
}
_MEANINGS = {
    Part.BEFORE: "idle",
    Part.DRAFT: "draft wait",
    Part.QUEUE: "queue",
    Part.COMPUTE: "compute",
    Part.WIRE: "network and gateway",
    Part.LOG: "log",
}
_BLOCK = "\N{FULL BLOCK}"
_HEADINGS = f"  {'#':>5} {'at ms':>9} {'tokens':>9} {'ok':>6} {'ms':>8}  "
_MAX_REQUESTS = 20
_NARROWEST = 20


def show(story: Story, console: Console, *, everything: bool = False) -> None:
    """Print a story; long ones are shortened in the middle unless `everything` is set."""
    for line in _lines(story, console, EVERYTHING if everything else Limits()):
        console.print(line)


def _lines(story: Story, console: Console, limits: Limits) -> Iterator[Text]:
    yield from _header(story)
    explanation = explain(story)
    yield Text()
    yield from _hanging(console, Text("Slowest  ", style="bold"), explanation.sentence)
    for line in summary(story, explanation):
        yield from _hanging(console, Text(" " * 9), line)
    requests = story.requests[:_MAX_REQUESTS]
    rows = [rows_of(request, limits) for request in requests]
    drawn = _Rows(console, story, explanation.round, [row for of_one in rows for row in of_one])
    if story.rounds:
        yield Text()
        yield drawn.legend()
        yield Text(_HEADINGS.rstrip(), style="bold")
    for number, (request, of_one) in enumerate(zip(requests, rows, strict=True), 1):
        if len(requests) > 1:
            yield _request_line(story, request, number)
        for row in of_one:
            yield from drawn.of(row)
    if len(story.requests) > _MAX_REQUESTS:
        yield Text(f"  ... {count(len(story.requests) - _MAX_REQUESTS, 'more request')}", style="dim")


def _header(story: Story) -> Iterator[Text]:
    session = one_line(story.session_id) or NO_SESSION
    trace_id = story.requests[0].trace_id
    yield Text.assemble(("session ", "dim"), (session, "bold"), ("  trace ", "dim"), trace_id)
    yield Text(about(story))
    yield Text(" · ".join(figures(story)))


def _hanging(console: Console, lead: Text, text: str, style: str = "") -> Iterator[Text]:
    """Wrap `text` beside `lead` with a hanging indent."""
    wrapped = Text(text, style=style).wrap(console, max(_NARROWEST, console.width - len(lead)))
    for number, line in enumerate(wrapped):
        line.rstrip()
        yield Text.assemble(Text(" " * len(lead)) if number else lead, line)


def _request_line(story: Story, request: Request, number: int) -> Text:
    at = ms(request.start_ns - story.start_ns)
    what = "resumed" if request.resumed else "began"
    line = f"  request {number} of {len(story.requests)} {what} at {at} ms, trace {request.trace_id}"
    return Text(line, style="bold")


class _Rows:
    """Draw rows on this console, all bars at one scale."""

    def __init__(self, console: Console, story: Story, slowest: Round | None, rows: Iterable[Row]) -> None:
        self._console = console
        self._story = story
        self._slowest = slowest
        self._colours = console.color_system is not None and not console.no_color
        longest_ns = max((row.felt_ns for row in rows if isinstance(row, Round)), default=0)
        self._ns_per_cell = longest_ns / max(8, console.width - len(_HEADINGS))

    def of(self, row: Row) -> Iterator[Text]:
        """Yield the lines of a row."""
        match row:
            case Round():
                yield self._round(row)
                for event in row.events[:SHOWN_EVENTS]:
                    yield from self._event(event)
            case Gap():
                yield Text(f"  {'...':>5} {describe_gap(row)}", style="dim")
            case _:
                yield from self._event(row)

    def legend(self) -> Text:
        """Return the legend of the parts."""
        legend = Text()
        for part, meaning in _MEANINGS.items():
            legend.append(*self._drawn(part, 1)).append(f" {meaning}  ", "dim")
        legend.rstrip()
        return legend

    def _round(self, one: Round) -> Text:
        slowest = one is self._slowest
        at = ms(one.span.start_ns - self._story.start_ns)
        tokens = tokens_of(self._story, one)
        accepted = f"{one.accepted}/{one.verified}" if one.verified else "-"
        figures = (
            f"{'>' if slowest else ' '} {one.index:>5} {at:>9} {tokens:>9} {accepted:>6} "
            f"{ms(one.duration_ns):>8}  "
        )
        bar = [self._drawn(part, cells) for part, cells in cells_of(one, self._ns_per_cell).items()]
        return Text.assemble((figures, "bold" if slowest else ""), *bar)

    def _event(self, event: Event) -> Iterator[Text]:
        return _hanging(self._console, Text("        ! ", style="yellow"), describe_event(event), "yellow")

    def _drawn(self, part: Part, cells: int) -> tuple[str, str]:
        return (_BLOCK * cells, _COLOURS[part]) if self._colours else (_LETTERS[part] * cells, "")
