"""Render the rounds of a page, one row with a bar each.

Hover or focus shows the parts of a bar; a click or key opens the details.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from galley.core import names
from galley.trace.explain.case import Part, times_of
from galley.trace.read.model import Batch, Call, Round, Story
from galley.trace.show.elements import element
from galley.trace.show.headline import tokens_of
from galley.trace.show.rows import SHOWN_EVENTS, Gap, Row, describe_event, describe_gap
from galley.trace.show.summary import count, ms, one_line, percent

BAR_UNITS = 1000
MEANINGS = {
    Part.BEFORE: "no round under way",
    Part.DRAFT: "waiting for a draft",
    Part.QUEUE: "in the target's queue",
    Part.COMPUTE: "computing",
    Part.WIRE: "on the network and in the gateway",
    Part.LOG: "until the tokens were logged",
}
_SHOWN_COMPANY = 32
_SHOWN_CALLS = 20


class RoundRows:
    """Render the rows of a story; all bars have one scale."""

    def __init__(self, story: Story, longest_ns: int, slowest: Round | None, ids: dict[int, str]) -> None:
        """Set the scale; `ids` names each round's row by `id()` of the round."""
        self._story = story
        self._longest_ns = max(1, longest_ns)
        self._slowest = slowest
        self._ids = ids

    def of(self, row: Row) -> Element:
        """Render a round, an event or a gap."""
        match row:
            case Round():
                return self._round(row)
            case Gap():
                return element("div", f"… {describe_gap(row)}", class_="gap")
            case _:
                return element("div", f"! {describe_event(row)}", class_="event")

    def _round(self, one: Round) -> Element:
        slowest = one is self._slowest
        accepted = f"{one.accepted}/{one.verified}" if one.verified else "–"
        summary = element(
            "summary",
            element("span", "▶" if slowest else ""),
            element("span", str(one.index)),
            element("span", ms(one.span.start_ns - self._story.start_ns)),
            element("span", tokens_of(self._story, one)),
            element("span", accepted),
            element("span", ms(one.duration_ns)),
            self._bar(one),
            element("div", "\n".join(_tip(one)), class_="tip", role="tooltip"),
        )
        events = [
            element("div", f"! {describe_event(event)}", class_="event")
            for event in one.events[:SHOWN_EVENTS]
        ]
        row_class = "round slowest" if slowest else "round"
        return element(
            "div",
            element("details", summary, self._detail(one), class_=row_class, id=self._ids[id(one)]),
            *events,
        )

    def _bar(self, one: Round) -> Element:
        return element(
            "svg",
            *bar_pieces(one, 0.0, BAR_UNITS / self._longest_ns, height=14),
            class_="bar",
            viewBox=f"0 0 {BAR_UNITS} 14",
            preserveAspectRatio="none",
            role="img",
            aria_label="; ".join(_parts(one)),
        )

    def _detail(self, one: Round) -> Element:
        pairs = [pair for facts in (_facts(one), self._batch(one), _calls(one)) for pair in facts]
        listed = element("dl")
        for name, value in pairs:
            listed.append(element("dt", name))
            listed.append(element("dd", value))
        return element("div", listed, class_="detail")

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


def bar_pieces(one: Round, start: float, units_per_ns: float, height: int) -> Iterator[Element]:
    """Draw the parts of a round from `start` on, as rectangles."""
    for part, time_ns in times_of(one).items():
        width = time_ns * units_per_ns
        if width > 0:
            yield element(
                "rect", class_=part.value, x=f"{start:.3f}", y="0", width=f"{width:.3f}", height=str(height)
            )
        start += width


def _parts(one: Round) -> Iterator[str]:
    for part, time_ns in times_of(one).items():
        if time_ns:
            yield f"{ms(time_ns)} ms {MEANINGS[part]}"


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
    k = one.span.integer(names.ROUND_K)
    yield (
        "draft tokens",
        f"k = {k:,}, {one.drafted:,} drafted, {one.verified:,} verified, {one.accepted:,} accepted",
    )
    if one.strategy:
        yield "strategy", one_line(one.strategy)
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
    if batch.free_blocks is not None:
        yield f"{batch.free_blocks:,} KV blocks free"
    if batch.waiting:
        yield f"{count(batch.waiting, 'item')} waiting"


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
        yield f"there {ms(served.duration_ns)} ms, begun after {after} ms"
    if call.span.problem:
        yield one_line(call.span.problem)


def longest_of(rows: Sequence[Row]) -> int:
    """Return the longest client wait among the rounds, in nanoseconds."""
    return max((row.felt_ns for row in rows if isinstance(row, Round)), default=0)
