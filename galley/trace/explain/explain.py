"""Why a request's slowest round was slow, in one sentence; what became of the request, in a few more.

The slowest round is the one of which a client may have felt most: the time before it, its own, and until its
tokens were logged. Of these times the one that most exceeds what it usually is in this story is to be
explained, by the first rule of `causes.py` that holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from galley.core import names
from galley.trace.explain.case import Case, Cause, Part, Usual, usual
from galley.trace.explain.causes import cause_of
from galley.trace.explain.thresholds import THRESHOLDS
from galley.trace.read.model import Request, Round, Story
from galley.trace.read.spans import Event
from galley.trace.show.summary import count, duration, ms, one_line, percent

_SHOWN_MOVES = 3


@dataclass(frozen=True, slots=True)
class Explanation:
    """`round` and `cause` are None where no round is in the trace."""

    sentence: str
    cause: Cause | None = None
    round: Round | None = None
    stands_out: bool = False


def explain(story: Story) -> Explanation:
    """The slowest round of all, in one sentence."""
    found = _slowest(story)
    return explain_round(story, *found) if found else Explanation(_without_rounds(story))


def _slowest(story: Story, but: Round | None = None) -> tuple[Request, Round] | None:
    rounds = ((request, one) for request in story.requests for one in request.rounds if one is not but)
    return max(rounds, key=lambda found: found[1].felt_ns, default=None)


def explain_round(story: Story, request: Request, one: Round) -> Explanation:
    """This round, in one sentence."""
    others = usual([other for other in story.rounds if other is not one])
    compared = others.rounds >= THRESHOLDS.few_rounds
    slow = compared and one.felt_ns >= THRESHOLDS.slow * others.felt_ns
    case = Case(story, request, one, others if slow else Usual())
    found = cause_of(case)
    head = f"{_head(case)}{_times(one.felt_ns, others) if compared else ''}: {found.clause}."
    if compared and not slow:
        return Explanation(f"No round stands out; {head}", found.cause, one)
    return Explanation(head[0].upper() + head[1:], found.cause, one, stands_out=slow)


def _head(case: Case) -> str:
    one = case.round
    at = case.story.output_index(one.position)
    token = f"token {at}, position {one.position}" if at is not None else f"position {one.position}"
    target = f", target {one_line(one.target)}" if one.target else ""
    requests = case.story.requests
    number = next(number for number, request in enumerate(requests, 1) if request is case.request)
    of = f" of request {number}" if len(requests) > 1 else ""
    name = f"round {one.index}{of} ({token}{target})"
    if case.part is Part.BEFORE:
        return f"before {name} no round was open for {ms(one.idle_ns)} ms, {ms(one.felt_ns)} in all"
    if case.part is Part.LOG:
        logged = f"were logged {ms(one.commit_ns)} ms after its verdict"
        return f"the tokens of {name} {logged}, {ms(one.felt_ns)} in all"
    return f"{name} took {ms(one.duration_ns)} ms"


def _times(felt_ns: int, others: Usual) -> str:
    return (
        f" ({felt_ns / others.felt_ns:.1f} times the median of {ms(others.felt_ns)})"
        if others.felt_ns
        else ""
    )


def _without_rounds(story: Story) -> str:
    """From the figures that the request itself keeps."""
    slowest = max(story.requests, key=lambda request: request.integer(names.SLOWEST_ROUND_NS))
    took_ns = slowest.integer(names.SLOWEST_ROUND_NS)
    if not took_ns:
        return "No round is in the trace."
    return (
        f"No round is in the trace; the slowest was at position "
        f"{slowest.integer(names.SLOWEST_ROUND_POSITION)} and took {ms(took_ns)} ms."
    )


# ------------------------------------------------------------------------------------ the request --


def summary(story: Story, slowest: Explanation) -> tuple[str, ...]:
    """What became of it, where its time went, and what its trace does not show."""
    return (
        *_later(story, slowest.round),
        *_ends(story),
        *_spent(story),
        *_speculation(story),
        *_moves(story),
        *_stalls(story),
        *_gaps(story),
    )


def _later(story: Story, slowest: Round | None) -> Iterator[str]:
    """The slowest of the others, where the slowest had a prompt to read: that is another matter."""
    found = _slowest(story, but=slowest)
    if slowest is None or slowest.index or found is None:
        return
    told = explain_round(story, *found)
    if told.stands_out:
        yield f"After the prompt: {told.sentence}"


def _ends(story: Story) -> Iterator[str]:
    for number, request in enumerate(story.requests, 1):
        which = f"Request {number} of {len(story.requests)}" if len(story.requests) > 1 else "It"
        if request.span is None:
            yield f"{which} has no span of its own: its gateway was killed, or it is under way."
        elif request.failed:
            why = one_line(request.text(names.ERROR_TYPE)) or "an error"
            said = f" ({one_line(request.span.problem, 160)})" if request.span.problem else ""
            yield f"{which} ended with {why}{said}."


def _spent(story: Story) -> Iterator[str]:
    parts = [one.parts for one in story.rounds]
    whole = sum(one.duration_ns for one in story.rounds)
    if whole:
        yield (
            f"Of {duration(whole)} in rounds, "
            f"{percent(sum(p.draft_ns for p in parts), whole)} went on waiting for drafts, "
            f"{percent(sum(p.queue_ns for p in parts), whole)} in the target's queue, "
            f"{percent(sum(p.compute_ns for p in parts), whole)} on computing, "
            f"{percent(sum(p.wire_ns for p in parts), whole)} on the way and in the gateway."
        )


def _speculation(story: Story) -> Iterator[str]:
    drafted, verified, accepted = drafts_of(story)
    if drafted:
        share = (
            f"{accepted:,} accepted ({percent(accepted, verified)} of those)" if verified else "none accepted"
        )
        yield f"Of {count(drafted, 'draft token')}, {verified:,} were verified and {share}."


def drafts_of(story: Story) -> tuple[int, int, int]:
    """(drafted, verified, accepted), by the requests, or else by the rounds that are there."""
    keys = (names.DRAFTED, names.VERIFIED, names.ACCEPTED)
    drafted, verified, accepted = (sum(request.integer(key) for request in story.requests) for key in keys)
    if not drafted:
        rounds = story.rounds
        drafted, verified = sum(one.drafted for one in rounds), sum(one.verified for one in rounds)
        accepted = sum(one.accepted for one in rounds)
    return drafted, verified, accepted


def _moves(story: Story) -> Iterator[str]:
    moves = [event for event in _events(story) if event.name == names.SESSION_MOVED]
    for event in moves[:_SHOWN_MOVES]:
        yield f"It {moved(event)}."
    if len(moves) > _SHOWN_MOVES:
        yield f"It moved {len(moves) - _SHOWN_MOVES:,} times more."


def moved(event: Event) -> str:
    """What a `session.moved` says."""
    pool, reason = one_line(event.text(names.POOL)) or "replica", one_line(event.text(names.REASON))
    source = one_line(event.text(names.SOURCE)) or "one"
    to = one_line(event.text(names.TO)) or "another"
    return f"moved from {pool} {source} to {to}" + (f" ({reason})" if reason else "")


def _stalls(story: Story) -> Iterator[str]:
    told = sum(request.integer(names.CLIENT_STALLED_NS) for request in story.requests)
    seen = sum(
        event.integer(names.STALLED_NS) for event in _events(story) if event.name == names.CLIENT_STALLED
    )
    if stalled_ns := told or seen:
        yield f"Its client left the stream unread for {duration(stalled_ns)} in all."


def _gaps(story: Story) -> Iterator[str]:
    if missing := sum(request.missing_rounds for request in story.requests):
        yield f"{count(missing, 'round')} of it {'is' if missing == 1 else 'are'} not in the trace."
    if story.cut:
        yield "The trace is too large: only a part of its spans was read."
    for shift in story.shifts:
        yield (
            f"The clock of {one_line(shift.process.service)} {one_line(shift.process.instance, 8)} was off: "
            f"{ms(abs(shift.offset_ns))} ms were "
            f"{'added to' if shift.offset_ns > 0 else 'taken from'} its times, "
            f"judged by {count(shift.calls, 'call')} from {one_line(shift.against.service)}"
            + (f"; {shift.unfit:,} of them end too late even so." if shift.unfit else ".")
        )


def _events(story: Story) -> Iterator[Event]:
    for request in story.requests:
        for one in request.rounds:
            yield from one.events
        yield from request.events
