"""Divide the rows of a step: verification first, then prompts, the oldest request first, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galley.core.cost.model import StepNs, rows_that_pay
from galley.core.scheduler.request import ActiveRequest

# Prefill gets at least one in this many rows of the budget.
_PREFILL_SHARE = 4


@dataclass(frozen=True, slots=True)
class Grant:
    """The next `rows` confirmed tokens of the request are fed, and after the last of them `draft_tokens`."""

    request: ActiveRequest
    rows: int
    draft_tokens: tuple[int, ...] = ()

    @property
    def is_final(self) -> bool:
        """True if the rows reach the request's position, so that a token is drawn."""
        return self.rows == self.request.uncomputed


def grant_rows(requests: Sequence[ActiveRequest], step_ns: StepNs, max_rows: int) -> list[Grant]:
    """Return what each of the requests, oldest first, gets of a step of about `max_rows` rows, in that order.

    Every request whose KV reaches its position gets one row, whatever the budget. Draft rows come next, as
    many as pay by `step_ns`. Prefill takes what is left, but at least a quarter of the budget.
    """
    verifying = sum(request.uncomputed == 1 for request in requests)
    demand = sum(request.uncomputed for request in requests if request.uncomputed > 1)
    reserved = min(demand, max_rows // _PREFILL_SHARE)
    prefill = min(demand, max(max_rows - verifying, reserved))
    offering = _reaching(requests, prefill)
    counts = _draft_counts(offering, verifying + prefill, max_rows - verifying - reserved, step_ns)
    used = verifying + sum(counts.values())
    return _grants(requests, counts, max(max_rows - used, reserved))


def _reaching(requests: Sequence[ActiveRequest], prefill: int) -> list[ActiveRequest]:
    """Return the requests that reach their position with `prefill` rows of prefill."""
    reaching = []
    for request in requests:
        if request.uncomputed > 1:
            prefill -= request.uncomputed
        if request.uncomputed == 1 or prefill >= 0:
            reaching.append(request)
    return reaching


def _draft_counts(offering: Sequence[ActiveRequest], rows: int, room: int, step_ns: StepNs) -> dict[int, int]:
    """Return how many draft tokens of each request, by its id, to verify beside `rows` other rows."""
    worth = [(chance, request.id) for request in offering for chance in request.survival()]
    # A session's chances fall, so the best of all sessions are the first ones of each.
    worth.sort(key=lambda one: -one[0])
    chances = [chance for chance, _ in worth]
    drawing = len(offering)
    prompts_ns = step_ns(rows, 0) - step_ns(drawing, 0) if rows > drawing > 0 else 0.0
    pays = rows_that_pay(
        chances, tokens=drawing, rows=rows, step_ns=step_ns, room=room, prompts_ns=prompts_ns
    )
    counts: dict[int, int] = {}
    for _, request_id in worth[:pays]:
        counts[request_id] = counts.get(request_id, 0) + 1
    return counts


def _grants(requests: Sequence[ActiveRequest], counts: dict[int, int], prefill: int) -> list[Grant]:
    grants = []
    for request in requests:
        rows = 1 if request.uncomputed == 1 else min(request.uncomputed, prefill)
        if request.uncomputed > 1:
            prefill -= rows
        if rows == 0:
            continue
        drafts = request.tail.draft_tokens[: counts.get(request.id, 0)] if rows == request.uncomputed else ()
        grants.append(Grant(request, rows, drafts))
    return grants
