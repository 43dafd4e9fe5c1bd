"""Bound the prompt rows of a step beside streams that wait for their next tokens; divide them among tenants.

A step ends for all its sessions at once, so the rows of a long prompt delay the tokens of all other streams.
The budget is a time: the step with its prompt rows should take at most `max_itl_ns`. (Chunked prefill beside
decoding: Sarathi-Serve, arXiv 2403.02310, section 4.2; its budget of tokens is computed from a time as here.)
"""

from __future__ import annotations

from collections.abc import Iterable

from galley.core.cost.model import StepNs
from galley.core.scheduler.request import ActiveRequest

# Prompts get at least this share of the time of the step's other rows, and at least so many rows: under more
# load than the bound allows, first tokens must come, too.
_LEAST_SHARE = 0.5
_LEAST_ROWS = 8
# Weight of one step in the factor, and its bound: a single step may have been interrupted.
_WEIGHT = 0.25
_MOST = 4.0


class PrefillBudget:
    """The budget of prompt rows of a replica's steps; a `max_itl_ns` of 0 sets none.

    Prompt rows are priced by `step_ns`, times a factor learnt from steps that read prompts: nothing is drawn
    after most of them, and their context grows.
    """

    def __init__(self, max_itl_ns: int, step_ns: StepNs) -> None:
        self._max_itl_ns = max_itl_ns
        self._step_ns = step_ns
        self._factor = 1.0

    def rows(self, most: int, drawn: int, drafts: int) -> int:
        """Return how many prompt rows, up to `most`, to add to `drawn` rows of which `drafts` are drafts."""
        if self._max_itl_ns == 0 or drawn == 0:
            return most
        others_ns = self._step_ns(drawn, drafts)
        allowed_ns = max(self._max_itl_ns - others_ns, others_ns * _LEAST_SHARE)
        low, high = min(most, _LEAST_ROWS), most
        while low < high:
            middle = (low + high + 1) // 2
            if self._factor * (self._step_ns(drawn + middle, drafts) - others_ns) <= allowed_ns:
                low = middle
            else:
                high = middle - 1
        return low

    def record(self, prompts: int, drawn: int, drafts: int, took_ns: int) -> None:
        """Record that a step of `prompts` prompt rows beside `drawn` rows took `took_ns`."""
        others_ns = self._step_ns(drawn, drafts) if drawn else 0
        expected_ns = self._step_ns(drawn + prompts, drafts) - others_ns
        if expected_ns <= 0:
            return
        factor = min(max((took_ns - others_ns) / expected_ns, 1 / _MOST), _MOST)
        self._factor += _WEIGHT * (factor - self._factor)


class PromptTurns:
    """The turns in which the prompts of tenants are read: start-time fair queuing.

    A prompt's turn is the sum of the tokens of the tenant's prompts before it, but not less than the lowest
    turn of an unread prompt at its arrival. (Goyal, Vin and Cheng, "Start-time fair queueing", 1997.)
    """

    def __init__(self) -> None:
        self._ends: dict[bytes, int] = {}

    def give(self, requests: Iterable[ActiveRequest]) -> None:
        """Give a turn to the prompts, of all active requests, that have none yet."""
        prompts = [request for request in requests if request.uncomputed > 1]
        new = [request for request in prompts if request.turn is None]
        if not new:
            return
        now = min((request.turn for request in prompts if request.turn is not None), default=None)
        self._ends = {} if now is None else {one: end for one, end in self._ends.items() if end > now}
        for request in new:
            tenant = request.key[0]
            request.turn = max(now or 0, self._ends.get(tenant, 0))
            self._ends[tenant] = request.turn + request.uncomputed
