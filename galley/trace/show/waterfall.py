"""Render for the terminal: a story with its rounds as bars, a list of requests, and spans of other systems.

Without colours each part of a bar has a letter.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from galley.common.printable import one_line
from galley.trace.explain.causes import Part
from galley.trace.explain.explain import explain, summary
from galley.trace.read.library import Entry
from galley.trace.read.model import Round, Story
from galley.trace.read.spans import Event, Span, SpanKey
from galley.trace.show.rows import (
    EVERYTHING,
    NO_SESSION,
    SHOWN_EVENTS,
    Gap,
    Limits,
    Row,
    about,
    cells_of,
    columns_of,
    describe_event,
    describe_gap,
    figures,
    request_title,
    rows_of,
)
from galley.trace.show.summary import count, duration, ms

# Meaning, letter and colour of each part.
_PARTS = {
    Part.BEFORE: ("idle", ".", "bright_black"),
    Part.DRAFT: ("draft wait", "D", "yellow"),
    Part.QUEUE: ("queue", "Q", "magenta"),
    Part.COMPUTE: ("compute", "C", "blue"),
    Part.WIRE: ("network and gateway", "W", "cyan"),
    Part.LOG: ("log", "L", "red"),
}
_BLOCK = "\N{FULL BLOCK}"
_HEADINGS = f"  {'#':>5} {'at ms':>9} {'tokens':>9} {'ok':>6} {'ms':>8}  "
_MAX_REQUESTS = 20
_NARROWEST = 20
_MAX_PLAIN = 200
_MAX_DEPTH = 12


def show(story: Story, console: Console, *, everything: bool = False) -> None:
    """Print a story; long ones are shortened in the middle unless `everything` is set."""
    for line in _lines(story, console, EVERYTHING if everything else Limits()):
        console.print(line)


def _lines(story: Story, console: Console, limits: Limits) -> Iterator[Text]:
    yield from _header(story)
    explanation = explain(story)
    yield Text()
    lead = "Slowest  " if story.refusal is None else "Refused  "
    yield from _hanging(console, Text(lead, style="bold"), explanation.sentence)
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
            title = request_title(story, request, number)
            yield Text(f"  {title}, trace {request.trace_id}", style="bold")
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
    wrapped = Text(text, style=style).wrap(console, max(_NARROWEST, console.width - len(lead)))
    for number, line in enumerate(wrapped):
        line.rstrip()
        yield Text.assemble(Text(" " * len(lead)) if number else lead, line)


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
        legend = Text()
        for part, (meaning, _, _) in _PARTS.items():
            legend.append(*self._drawn(part, 1)).append(f" {meaning}  ", "dim")
        legend.rstrip()
        return legend

    def _round(self, one: Round) -> Text:
        slowest = one is self._slowest
        index, at, tokens, accepted, took = columns_of(self._story, one)
        mark = ">" if slowest else " "
        figures = f"{mark} {index:>5} {at:>9} {tokens:>9} {accepted:>6} {took:>8}  "
        bar = [self._drawn(part, cells) for part, cells in cells_of(one, self._ns_per_cell).items()]
        return Text.assemble((figures, "bold" if slowest else ""), *bar)

    def _event(self, event: Event) -> Iterator[Text]:
        return _hanging(self._console, Text("        ! ", style="yellow"), describe_event(event), "yellow")

    def _drawn(self, part: Part, cells: int) -> tuple[str, str]:
        _, letter, colour = _PARTS[part]
        return (_BLOCK * cells, colour) if self._colours else (letter * cells, "")


# --------------------------------------------------------------------- requests and foreign spans --


def list_lines(entries: Sequence[Entry]) -> Iterator[Text]:
    """Yield the lines of the list; a request refused before it had a session shows its trace."""
    yield Text(
        f"{'began':8} {'session (or trace)':32} {'took':>9} {'tokens':>6} {'slowest round':>14}  outcome",
        style="bold",
    )
    for entry in entries:
        start = time.strftime("%H:%M:%S", time.localtime(entry.start_ns // 10**9))
        slowest = f"{ms(entry.slowest_round_ns)} ms" if entry.slowest_round_ns else "-"
        yield Text.assemble(
            f"{start:8} {one_line(entry.session_id) or entry.trace_id:32} {duration(entry.duration_ns):>9} "
            f"{entry.output_tokens:>6} {slowest:>14}  ",
            (one_line(entry.error), "red") if entry.error else "ok",
        )


def plain_lines(spans: Sequence[Span]) -> Iterator[Text]:
    """Yield up to _MAX_PLAIN spans, each below its parent: start, duration, name and service."""
    keys = {span.key for span in spans}
    children: dict[SpanKey, list[Span]] = defaultdict(list)
    roots = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        parent = span.trace_id, span.parent_id
        children[parent].append(span) if parent in keys and parent != span.key else roots.append(span)
    start_ns = min((span.start_ns for span in spans), default=0)
    waiting = [(span, 0) for span in reversed(roots)]
    printed = 0
    while waiting and printed < _MAX_PLAIN:
        span, depth = waiting.pop()
        printed += 1
        at = ms(span.start_ns - start_ns)
        indent = "  " * min(depth, _MAX_DEPTH)
        yield Text(
            f"{at:>9} {ms(span.duration_ns):>9} ms  {indent}{one_line(span.name)} "
            f"({one_line(span.process.service, 40)})"
        )
        waiting += [(child, depth + 1) for child in reversed(children[span.key])]
    if len(spans) > printed:
        yield Text(f"{'...':>9} {count(len(spans) - printed, 'more span')}", style="dim")
