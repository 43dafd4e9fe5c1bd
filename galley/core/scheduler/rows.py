"""Who gets how many rows of a pass: verifications first, then prompts, the oldest first, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galley.core.cost.model import StepNs, rows_that_pay
from galley.core.scheduler.request import ActiveRequest

# Of the budget, what a waiting prefill gets at least, however much there is to verify.
_PREFILL_SHARE = 4


@dataclass(frozen=True, slots=True)
class Grant:
    """`rows` confirmed tokens of the item are fed, and after the last of them these draft tokens."""

    request: ActiveRequest
    rows: int
    draft_tokens: tuple[int, ...] = ()

    @property
    def is_final(self) -> bool:
        """It comes to the item's position, so that a token is drawn."""
        return self.rows == self.request.uncomputed


def grant_rows(items: Sequence[ActiveRequest], step_ns: StepNs, max_rows: int) -> list[Grant]:
    """What each of the items, oldest first, gets of a pass of about `max_rows` rows, in that order.

    Every item whose KV reaches its position gets its one row, whatever the budget. Draft rows come next, as
    many as pay by `pass_ns`, and prefill takes what is left, but at least a quarter of the budget.
    """
    standing = sum(item.uncomputed == 1 for item in items)
    demand = sum(item.uncomputed for item in items if item.uncomputed > 1)
    reserved = min(demand, max_rows // _PREFILL_SHARE)
    prefill = min(demand, max(max_rows - standing, reserved))
    offering = _reaching(items, prefill)
    counts = _draft_counts(offering, standing + prefill, max_rows - standing - reserved, step_ns)
    used = standing + sum(counts.values())
    return _grants(items, counts, max(max_rows - used, reserved))


def _reaching(items: Sequence[ActiveRequest], prefill: int) -> list[ActiveRequest]:
    """The items that come to their position with so many rows of prefill."""
    reaching = []
    for item in items:
        if item.uncomputed > 1:
            prefill -= item.uncomputed
        if item.uncomputed == 1 or prefill >= 0:
            reaching.append(item)
    return reaching


def _draft_counts(offering: Sequence[ActiveRequest], rows: int, room: int, step_ns: StepNs) -> dict[int, int]:
    """How many draft tokens of each item, by its id, are verified beside `rows` other rows."""
    worth = [(chance, item.id) for item in offering for chance in item.survival()]
    # Of one session the chances fall, so that the best of all are the first of each.
    worth.sort(key=lambda one: -one[0])
    chances = [chance for chance, _ in worth]
    drawing = len(offering)
    prompts_ns = step_ns(rows, 0) - step_ns(drawing, 0) if rows > drawing > 0 else 0.0
    pays = rows_that_pay(
        chances, tokens=drawing, rows=rows, step_ns=step_ns, room=room, prompts_ns=prompts_ns
    )
    counts: dict[int, int] = {}
    for _, item_id in worth[:pays]:
        counts[item_id] = counts.get(item_id, 0) + 1
    return counts


def _grants(items: Sequence[ActiveRequest], counts: dict[int, int], prefill: int) -> list[Grant]:
    grants = []
    for item in items:
        rows = 1 if item.uncomputed == 1 else min(item.uncomputed, prefill)
        if item.uncomputed > 1:
            prefill -= rows
        if rows == 0:
            continue
        drafts = item.tail.draft_tokens[: counts.get(item.id, 0)] if rows == item.uncomputed else ()
        grants.append(Grant(item, rows, drafts))
    return grants
