"""Describe a story in a few words and figures."""

from __future__ import annotations

from collections.abc import Iterator

from galley.core import names
from galley.trace.explain.explain import drafts_of
from galley.trace.read.model import Request, Round, Story
from galley.trace.show.summary import count, duration, ms, one_line, percent

NO_SESSION = "(not in the trace)"


def about(story: Story) -> str:
    """Return operation, model, workload, tokens and finish reason."""
    first = next((request for request in story.requests if request.span), story.requests[0])
    operation = one_line(first.text(names.OPERATION)) or "request"
    workload = one_line(first.text(names.WORKLOAD))
    output = count(output_tokens(story), "token")
    prompt = story.prompt_tokens
    facts = [f"{operation} {_model_of(first)}"]
    facts += [f"workload {workload}"] if workload else []
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
    if tokens > 1 and working_ns > 0:
        yield f"{ms(working_ns / (tokens - 1))} ms a token"
    rounds = len(story.rounds) + sum(request.missing_rounds for request in story.requests)
    yield count(rounds, "round")
    _, verified, accepted = drafts_of(story)
    yield f"{percent(accepted, verified)} accepted" if verified else "nothing verified"


def output_tokens(story: Story) -> int:
    """Return the number of output tokens, as far as the trace has them."""
    reported = max((request.integer(names.OUTPUT_TOKENS) for request in story.requests), default=0)
    return reported or sum(one.confirmed for one in story.rounds)


def tokens_of(story: Story, one: Round) -> str:
    """Return the range of output tokens of a round; of positions if the prompt's length is unknown."""
    index = story.output_index(one.position)
    first = one.position if index is None else index
    return f"{first}-{first + one.confirmed - 1}" if one.confirmed > 1 else str(first)


def _model_of(request: Request) -> str:
    return (
        one_line(request.text(names.RESPONSE_MODEL) or request.text(names.REQUEST_MODEL)) or "unknown model"
    )


def _reasons(story: Story) -> list[str]:
    lists = (request.span.texts(names.FINISH_REASONS) for request in story.requests if request.span)
    return [one_line(reason) for reasons in lists for reason in reasons]
