"""Explain a session's slowest round in one sentence, and the session in a few more.

The slowest round is the one that a client waited for longest: the time before it, its duration, and the time
until its tokens were logged. The part that most exceeds its median in this story is explained by the first
rule of `causes.py` that applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from galley.common.printable import one_line
from galley.core import names
from galley.trace.explain.causes import Case, Medians, Part, cause_of, medians_of
from galley.trace.read.model import Request, Round, Story
from galley.trace.read.spans import Event
from galley.trace.show.summary import count, duration, ms, percent

# A round is slow from this multiple of the median on; fewer other rounds give no median.
_SLOW = 1.5
_FEW_ROUNDS = 3
_MOST_MOVES = 3
_MOST_POSITIONS = 8
_COUNTS = re.compile(r"(?P<name>[a-z0-9]{1,32}) (?P<accepted>[0-9]{1,12})/(?P<verified>[0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class Explanation:
    """One sentence; `round` is None if the trace has no rounds."""

    sentence: str
    round: Round | None = None
    is_slow: bool = False


def explain(story: Story) -> Explanation:
    slowest = _slowest(story)
    return explain_round(story, *slowest) if slowest else Explanation(_without_rounds(story))


def _slowest(story: Story, except_for: Round | None = None) -> tuple[Request, Round] | None:
    rounds = ((request, one) for request in story.requests for one in request.rounds if one is not except_for)
    return max(rounds, key=lambda pair: pair[1].felt_ns, default=None)


def explain_round(story: Story, request: Request, one: Round) -> Explanation:
    others = medians_of([other for other in story.rounds if other is not one])
    compared = others.rounds >= _FEW_ROUNDS
    slow = compared and one.felt_ns >= _SLOW * others.felt_ns
    case = Case(story, request, one, others if slow else Medians())
    times = ""
    if compared and others.felt_ns:
        of = "the recorded rounds, " if story.missing_rounds else ""
        times = f" ({one.felt_ns / others.felt_ns:.1f} times the median of {of}{ms(others.felt_ns)})"
    sentence = f"{_head(case)}{times}: {cause_of(case)}."
    if compared and not slow and not story.missing_rounds:
        return Explanation(f"No round is much slower than the others; {sentence}", one)
    return Explanation(sentence[0].upper() + sentence[1:], one, is_slow=slow)


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
        return f"{name} began after {ms(one.idle_ns)} ms without a round, {ms(one.felt_ns)} ms in all"
    if case.part is Part.LOG:
        logged = f"were logged {ms(one.commit_ns)} ms after they were confirmed"
        return f"the tokens of {name} {logged}, {ms(one.felt_ns)} ms in all"
    return f"{name} took {ms(one.span.duration_ns)} ms"


def _without_rounds(story: Story) -> str:
    """Tell why the call was refused, or name the slowest round by the figures on the requests' own spans."""
    if (refused := story.refusal) is not None:
        return f"The call was refused with {_failure_of(refused)}, before it had a session."
    slowest = max(story.requests, key=lambda request: request.integer(names.SLOWEST_ROUND_NS))
    took_ns = slowest.integer(names.SLOWEST_ROUND_NS)
    if not took_ns:
        return "The trace has no rounds."
    return (
        f"The trace has no rounds; the slowest was at position "
        f"{slowest.integer(names.SLOWEST_ROUND_POSITION)} and took {ms(took_ns)} ms."
    )


# ------------------------------------------------------------------------------------ the request --


def summary(story: Story, slowest: Explanation) -> tuple[str, ...]:
    return (
        *_later(story, slowest.round),
        *_ends(story),
        *_spent(story),
        *_moves(story),
        *_gaps(story),
    )


def _later(story: Story, slowest: Round | None) -> Iterator[str]:
    """Explain the slowest later round if the slowest one read the prompt."""
    other = _slowest(story, except_for=slowest)
    if slowest is None or slowest.index or other is None:
        return
    later = explain_round(story, *other)
    if later.is_slow:
        yield f"After the prompt: {later.sentence}"


def _ends(story: Story) -> Iterator[str]:
    for number, request in enumerate(story.requests, 1):
        which = f"Request {number} of {len(story.requests)}" if len(story.requests) > 1 else "It"
        if request.span is None:
            yield f"{which} has no span of its own: its gateway was killed, or it has not ended."
        elif request.has_failed and request is not story.refusal:
            yield f"{which} ended with {_failure_of(request)}."


def _failure_of(request: Request) -> str:
    """Return the status of a request that failed, with its message and the refused field."""
    why = one_line(request.text(names.ERROR_TYPE)) or "an error"
    field, problem = one_line(request.text(names.FIELD)), one_line(request.problem, 160)
    details = [f"field {field}"] if field and not problem.startswith(field) else []
    details += [problem] if problem else []
    return f"{why} ({', '.join(details)})" if details else why


def _spent(story: Story) -> Iterator[str]:
    parts = [one.parts for one in story.rounds]
    whole = sum(one.span.duration_ns for one in story.rounds)
    if whole:
        yield (
            f"Of {duration(whole)} in rounds, "
            f"{percent(sum(p.draft_ns for p in parts), whole)} were spent waiting for drafts, "
            f"{percent(sum(p.queue_ns for p in parts), whole)} in the target's queue, "
            f"{percent(sum(p.compute_ns for p in parts), whole)} computing, "
            f"{percent(sum(p.wire_ns for p in parts), whole)} on the network and in the gateway."
        )
    drafted, verified, accepted = drafts_of(story)
    if drafted:
        share = f"{accepted:,} accepted ({percent(accepted, verified)} of those)"
        share = share if verified else "none accepted"
        yield f"Of {count(drafted, 'draft token')}, {verified:,} were verified and {share}."
    if by_source := sources_of(story):
        shares = [f"{source} {right:,} of {verified:,}" for source, (right, verified) in by_source]
        yield f"Accepted by source: {', '.join(shares)}."
    if len(by_rank := _counts_of(story, names.RANKS)) > 1:
        yield f"Accepted by rank: {_listed(by_rank)}."
        by_position = _counts_of(story, names.POSITIONS)
        yield f"Accepted by position, in rounds: {_listed(by_position[:_MOST_POSITIONS])}."
    if with_states := sum(request.integer(names.PROPOSALS_WITH_FEATURES) for request in story.requests):
        proposals = sum(request.integer(names.PROPOSALS) for request in story.requests)
        yield f"Of {count(proposals, 'proposal')}, {with_states:,} read the target's state."


def drafts_of(story: Story) -> tuple[int, int, int]:
    """Return (drafted, verified, accepted): of each request by its span, else by its rounds."""
    parts = [_drafts_in(request) for request in story.requests]
    drafted, verified, accepted = (sum(each) for each in zip(*parts, strict=True))
    return drafted, verified, accepted


def _drafts_in(request: Request) -> tuple[int, int, int]:
    if request.span is not None:
        integer = request.span.integer
        return integer(names.DRAFTED), integer(names.VERIFIED), integer(names.ACCEPTED)
    rounds = request.rounds
    verified, accepted = sum(one.verified for one in rounds), sum(one.accepted for one in rounds)
    return sum(one.drafted for one in rounds), verified, accepted


def sources_of(story: Story) -> list[tuple[str, tuple[int, int]]]:
    """Return (accepted, verified) draft tokens by source: of each request by its span, else by its rounds."""
    return _counts_of(story, names.SOURCES, names.ROUND_SOURCES)


def _counts_of(story: Story, attribute: str, of_rounds: str = "") -> list[tuple[str, tuple[int, int]]]:
    """Return (accepted, verified) by name, from an attribute of each request's span, else of its rounds."""
    sums: dict[str, tuple[int, int]] = {}
    for text in (text for request in story.requests for text in _texts_in(request, attribute, of_rounds)):
        if (match := _COUNTS.fullmatch(text)) is not None:
            accepted, verified = sums.get(match["name"], (0, 0))
            sums[match["name"]] = accepted + int(match["accepted"]), verified + int(match["verified"])
    return list(sums.items())


def _texts_in(request: Request, attribute: str, of_rounds: str) -> tuple[str, ...]:
    own = request.span.texts(attribute) if request.span else ()
    return own or tuple(text for one in request.rounds for text in one.span.texts(of_rounds))


def _listed(counts: Iterable[tuple[str, tuple[int, int]]]) -> str:
    return ", ".join(f"{name}: {accepted:,} of {verified:,}" for name, (accepted, verified) in counts)


def _moves(story: Story) -> Iterator[str]:
    moves = _events(story, names.SESSION_MOVED)
    for event in moves[:_MOST_MOVES]:
        yield f"It {moved(event)}."
    if len(moves) > _MOST_MOVES:
        yield f"It moved {len(moves) - _MOST_MOVES:,} more times."
    if stalled_ns := sum(_stalled_ns(request) for request in story.requests):
        yield f"Its client left the stream unread for {duration(stalled_ns)} in all."


def _stalled_ns(request: Request) -> int:
    stalls = (event for event in request.all_events if event.name == names.CLIENT_STALLED)
    in_events = sum(event.integer(names.STALLED_NS) for event in stalls)
    return request.integer(names.CLIENT_STALLED_NS) or in_events


def moved(event: Event) -> str:
    pool, reason = one_line(event.text(names.POOL)) or "replica", one_line(event.text(names.REASON))
    source = one_line(event.text(names.SOURCE)) or "one"
    to = one_line(event.text(names.TO)) or "another"
    return f"moved from {pool} {source} to {to}" + (f" ({reason})" if reason else "")


def _gaps(story: Story) -> Iterator[str]:
    if missing := story.missing_rounds:
        yield f"{count(missing, 'round')} of it {'is' if missing == 1 else 'are'} not in the trace."
    if story.cut:
        yield "The trace is too large: only part of its spans was read."
    for shift in story.shifts:
        yield (
            f"The clock of {one_line(shift.process.service)} {one_line(shift.process.instance, 8)} was off: "
            f"{ms(abs(shift.offset_ns))} ms were "
            f"{'added to' if shift.offset_ns > 0 else 'subtracted from'} its times, "
            f"estimated from {count(shift.calls, 'call')} between it and {one_line(shift.against.service)}"
            + (f"; {shift.unfit:,} of them still end too late." if shift.unfit else ".")
        )


def _events(story: Story, name: str) -> list[Event]:
    return [event for request in story.requests for event in request.all_events if event.name == name]
