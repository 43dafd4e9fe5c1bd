"""The latest requests of a file, a line each; and the spans of a trace that is none of ours, as they are."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.text import Text

from galley.trace.read.library import Entry
from galley.trace.read.spans import Span, SpanKey
from galley.trace.show.summary import count, duration, ms, one_line

_MAX_PLAIN = 200
_MAX_DEPTH = 12


def list_lines(entries: Sequence[Entry]) -> Iterator[Text]:
    """Yield the lines of the list; a request refused before it had a session shows its trace."""
    yield Text(
        f"{'began':8} {'session (or trace)':32} {'took':>9} {'tokens':>6} {'slowest round':>14}  outcome",
        style="bold",
    )
    for entry in entries:
        began = time.strftime("%H:%M:%S", time.localtime(entry.start_ns // 10**9))
        slowest = f"{ms(entry.slowest_round_ns)} ms" if entry.slowest_round_ns else "-"
        yield Text.assemble(
            f"{began:8} {one_line(entry.session_id) or entry.trace_id:32} {duration(entry.duration_ns):>9} "
            f"{entry.output_tokens:>6} {slowest:>14}  ",
            (one_line(entry.error), "red") if entry.error else "ok",
        )


def plain_lines(spans: Sequence[Span]) -> Iterator[Text]:
    """Each span under its parent: name, process, when and how long."""
    keys = {span.key for span in spans}
    children: dict[SpanKey, list[Span]] = defaultdict(list)
    roots = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        parent = span.trace_id, span.parent_id
        children[parent].append(span) if parent in keys and parent != span.key else roots.append(span)
    began_ns = min((span.start_ns for span in spans), default=0)
    waiting = [(span, 0) for span in reversed(roots)]
    printed = 0
    while waiting and printed < _MAX_PLAIN:
        span, depth = waiting.pop()
        printed += 1
        at = ms(span.start_ns - began_ns)
        indent = "  " * min(depth, _MAX_DEPTH)
        yield Text(
            f"{at:>9} {ms(span.duration_ns):>9} ms  {indent}{one_line(span.name)} "
            f"({one_line(span.process.service, 40)})"
        )
        waiting += [(child, depth + 1) for child in reversed(children[span.key])]
    if len(spans) > printed:
        yield Text(f"{'...':>9} {count(len(spans) - printed, 'more span')}", style="dim")
