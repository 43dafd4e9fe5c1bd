"""Select and describe what is shown: a story in figures; rounds, events between them, and gaps.

A long request is shortened in the middle; its slowest rounds, and the first of those with events, stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from sys import maxsize

from galley.common.printable import one_line
from galley.core import names
from galley.trace.explain.causes import Part, times_of
from galley.trace.explain.explain import drafts_of, moved
from galley.trace.read.model import Request, Round, Story
from galley.trace.read.spans import Event, Value
from galley.trace.show.summary import count, duration, ms, percent

NO_SESSION = "(not in the trace)"
# The most events that are shown of one round.
SHOWN_EVENTS = 20
_SHOWN_ATTRIBUTES = 8
_NS = "_ns"


@dataclass(frozen=True, slots=True)
class Limits:
    """The most rounds of each kind that a request shows, and the most events outside of rounds."""

    head: int = 16
    tail: int = 12
    slowest: int = 4
    eventful: int = 12
    events: int = 20


EVERYTHING = Limits(head=maxsize, events=maxsize)


@dataclass(frozen=True, slots=True)
class Gap:
    """Neighbouring rounds that are left out; or, if `rounds` is 0, events outside of rounds."""

    rounds: int = 0
    confirmed: int = 0
    took_ns: int = 0
    longest_ns: int = 0
    events: int = 0


Row = Round | Event | Gap


def rows_of(request: Request, limits: Limits) -> list[Row]:
    kept = _kept(request.rounds, limits)
    loose = list(request.events[: limits.events])
    rows: list[Row] = []
    left_out: list[Round] = []
    for at, one in enumerate(request.rounds):
        while loose and loose[0].time_ns < one.span.end_ns:
            rows.append(loose.pop(0))
        if at in kept:
            rows += [_gap(left_out), one] if left_out else [one]
            left_out = []
        else:
            left_out.append(one)
    rows += loose
    if (more := len(request.events) - limits.events) > 0:
        rows.append(Gap(events=more))
    return rows


def _kept(rounds: Sequence[Round], limits: Limits) -> set[int]:
    every = range(len(rounds))
    if len(rounds) <= limits.head + limits.tail:
        return set(every)
    kept = {*every[: limits.head], *every[len(rounds) - limits.tail :]}
    kept |= set(nlargest(limits.slowest, every, key=lambda at: rounds[at].felt_ns))
    eventful = [at for at in every if rounds[at].events]
    return kept | set(eventful[: limits.eventful])


def _gap(rounds: Sequence[Round]) -> Gap:
    return Gap(
        rounds=len(rounds),
        confirmed=sum(one.confirmed for one in rounds),
        took_ns=rounds[-1].span.end_ns - rounds[0].span.start_ns,
        longest_ns=max(one.felt_ns for one in rounds),
    )


def cells_of(one: Round, ns_per_cell: float) -> Mapping[Part, int]:
    """Return how many cells of a bar each part gets, at least one in all; parts cut most by rounding gain."""
    times = times_of(one)
    exact = {part: time / ns_per_cell if ns_per_cell > 0 else 0.0 for part, time in times.items()}
    cells = {part: int(value) for part, value in exact.items()}
    missing = max(1, round(sum(exact.values()))) - sum(cells.values())
    for part in sorted(exact, key=lambda part: cells[part] - exact[part])[:missing]:
        cells[part] += 1
    return cells


# ------------------------------------------------------------------------------------- descriptions --


def about(story: Story) -> str:
    """Return operation, model, workload, form, tokens and finish reason."""
    first = next((request for request in story.requests if request.span), story.requests[0])
    operation = one_line(first.text(names.OPERATION)) or "request"
    workload = one_line(first.text(names.WORKLOAD))
    grammar = one_line(first.text(names.GRAMMAR_KIND))
    output = count(output_tokens(story), "token")
    prompt = story.prompt_tokens
    facts = [f"{operation} {_model_of(first)}"]
    facts += [f"workload {workload}"] if workload else []
    facts += [f"form {grammar}"] if grammar else []
    facts += [output if prompt is None else f"{prompt:,} + {output}"]
    facts += [f"ended by {reason}" for reason in _reasons(story)[-1:]]
    return " · ".join(facts)


def figures(story: Story) -> Iterator[str]:
    """Yield duration, time to first token, time a token, rounds and acceptance rate."""
    yield duration(story.end_ns - story.start_ns)
    first_token_ns = story.requests[0].integer(names.TTFT_NS)
    if first_token_ns:
        yield f"first token {ms(first_token_ns)} ms"
    tokens = output_tokens(story)
    working_ns = sum(request.duration_ns for request in story.requests) - first_token_ns
    # The tokens are those of the whole answer; of a resumed one the earlier time may not be in the trace.
    if tokens > 1 and working_ns > 0 and not story.requests[0].is_resumed:
        yield f"{ms(working_ns / (tokens - 1))} ms a token"
    yield count(len(story.rounds) + story.missing_rounds, "round")
    _, verified, accepted = drafts_of(story)
    yield f"{percent(accepted, verified)} accepted" if verified else "nothing verified"


def output_tokens(story: Story) -> int:
    """Return the number of output tokens, as far as the trace has them."""
    reported = max((request.integer(names.OUTPUT_TOKENS) for request in story.requests), default=0)
    return reported or sum(one.confirmed for one in story.rounds)


def columns_of(story: Story, one: Round) -> tuple[str, str, str, str, str]:
    """Return index, start in ms, output tokens, accepted draft tokens, and duration in ms of a round."""
    first = story.output_index(one.position)
    first = one.position if first is None else first
    return (
        str(one.index),
        ms(one.span.start_ns - story.start_ns),
        f"{first}-{first + one.confirmed - 1}" if one.confirmed > 1 else str(first),
        f"{one.accepted}/{one.verified}" if one.verified else "-",
        ms(one.span.duration_ns),
    )


def request_title(story: Story, request: Request, number: int) -> str:
    what = "resumed" if request.is_resumed else "began"
    return f"request {number} of {len(story.requests)} {what} at {ms(request.start_ns - story.start_ns)} ms"


def _model_of(request: Request) -> str:
    return (
        one_line(request.text(names.RESPONSE_MODEL) or request.text(names.REQUEST_MODEL)) or "unknown model"
    )


def _reasons(story: Story) -> list[str]:
    lists = (request.span.texts(names.FINISH_REASONS) for request in story.requests if request.span)
    return [one_line(reason) for reasons in lists for reason in reasons]


def describe_gap(gap: Gap) -> str:
    if not gap.rounds:
        return count(gap.events, "more event")
    return (
        f"{count(gap.rounds, 'round')}, {count(gap.confirmed, 'token')}, {duration(gap.took_ns)}, "
        f"none above {ms(gap.longest_ns)} ms"
    )


def describe_event(event: Event) -> str:
    if event.name == names.SESSION_MOVED:
        return f"{event.name}: {moved(event)}"
    first = list(event.attributes.items())[:_SHOWN_ATTRIBUTES]
    facts = ", ".join(f"{_label(key)} {_value(key, value)}" for key, value in first)
    return one_line(event.name) + (f": {facts}" if facts else "")


def _label(key: str) -> str:
    return one_line(key.removeprefix("galley.").removesuffix(_NS), 40)


def _value(key: str, value: Value) -> str:
    if key.endswith(_NS) and isinstance(value, int):
        return f"{ms(value)} ms"
    return one_line(str(value), 60)
