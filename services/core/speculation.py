"""How many tokens a session has drafted: what they are worth, by what was measured, against what they cost.

A draft token is worth the chance that it is accepted times what a token costs the target now: its share of a
pass. It costs the draft's time, and asking costs a message. A session asks for as many as are worth it, down
to none; then it asks for a few now and again, so that it finds out when drafts have become good (or the load
low). How many of them are verified is the target's decision, at its load; here only what it took is seen.

Beside the tokens for the coming pass, others are drafted ahead of it: so that the next pass finds some when
all of these are accepted, and so that a slow link does not leave the target without.

What is measured of a workload is what its next session begins with (`Book`). No clock: times are arguments,
in nanoseconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.core.answer import SessionSpec

# Weights of what was seen last: in a session, in its workload, in the load.
_SESSION, _WORKLOAD, _LOAD = 0.15, 0.02, 0.05
# Verdicts until drafts that were not worth it are tried again: at first and at most; and how many tokens.
_FIRST_PROBE, _LAST_PROBE = 4, 16
_PROBE_TOKENS = 4
# What a proposal costs besides drafting: messages, and the work of both ends.
_ASK_NS = 300_000
# Drafted ahead at most, whatever the link.
_MOST_AHEAD = 64
_WORKLOADS = 1024


@dataclass(slots=True)
class Habits:
    """What drafts are like. All are running means.

    alpha: the chance that a draft token is accepted if all before it were; voice: that a proposal has any
    token; taken: that of offered tokens any is verified; verified: how many then are; token_ns: what drafting
    one takes.
    """

    alpha: float = 0.6
    voice: float = 1.0
    taken: float = 1.0
    verified: float = 4.0
    token_ns: float = 0.0

    def saw_proposal(self, came: int, compute_ns: int, weight: float) -> None:
        """A proposal of so many tokens, which took the draft so long."""
        self.voice += weight * ((came > 0) - self.voice)
        if came:
            self.token_ns = _mean(self.token_ns, compute_ns / came, weight)

    def saw_verdict(self, verified: int, accepted: int, weight: float) -> None:
        """Draft tokens were offered, and this became of them."""
        self.taken += weight * ((verified > 0) - self.taken)
        if verified:
            self.verified += weight * (verified - self.verified)
            keep = (1.0 - weight) ** accepted
            self.alpha = self.alpha * keep + (1.0 - keep)
            if accepted < verified:
                self.alpha *= 1.0 - weight


def _mean(before: float, seen: float, weight: float) -> float:
    """A running mean; 0 while nothing was seen."""
    return before + weight * (seen - before) if before else seen


class Book:
    """What a gateway remembers beyond its sessions: the habits of each workload's drafts, and the load.

    `token_ns` is what the target takes for a token now: its passes, shared by the sessions in them.
    """

    def __init__(self) -> None:
        self.token_ns = 0.0
        self._habits: OrderedDict[tuple[str, str], Habits] = OrderedDict()

    def habits(self, strategy: str, workload: str) -> Habits:
        """Of a strategy's drafts for a workload; those not met for long are forgotten."""
        key = (strategy, workload)
        habits = self._habits.pop(key, None) or Habits()
        self._habits[key] = habits
        if len(self._habits) > _WORKLOADS:
            self._habits.popitem(last=False)
        return habits

    def saw_pass(self, compute_ns: int, sessions: int) -> None:
        """A pass of the target, shared by so many sessions."""
        self.token_ns = _mean(self.token_ns, compute_ns / max(1, sessions), _LOAD)


class Speculation:
    """Of one session."""

    def __init__(self, spec: SessionSpec, book: Book) -> None:
        self._k = spec.k
        self._auto = spec.auto
        self._workload = book.habits(spec.strategy, spec.workload)
        self._book = book
        self.habits = replace(self._workload)
        self._latency_ns = 0.0
        self._rate = 0.0
        self._quiet = 0
        self._probe_after = _FIRST_PROBE

    def saw_proposal(self, came: int, latency_ns: int, compute_ns: int) -> None:
        """A proposal of `came` tokens came, so long after it was asked for."""
        self.habits.saw_proposal(came, compute_ns, _SESSION)
        self._workload.saw_proposal(came, compute_ns, _WORKLOAD)
        self._latency_ns = _mean(self._latency_ns, latency_ns, _SESSION)

    def saw_verdict(self, *, offered: bool, verified: int, accepted: int) -> None:
        """A verdict came; draft tokens for it had been `offered`, or not."""
        self._quiet += 1
        if not offered:
            return
        self.habits.saw_verdict(verified, accepted, _SESSION)
        self._workload.saw_verdict(verified, accepted, _WORKLOAD)
        if accepted:
            self._probe_after = 1

    def saw_pass(self, confirmed: int, took_ns: int, compute_ns: int, sessions: int) -> None:
        """It confirmed so many tokens, so long after the one before; the pass was shared by `sessions`."""
        self._book.saw_pass(compute_ns, sessions)
        if took_ns > 0:
            self._rate = _mean(self._rate, confirmed / took_ns, _SESSION)

    def wanted(self, ready: int, sure: float, room: int) -> int:
        """How many tokens to have drafted now, at most `room`, after `ready` that are.

        `sure` is the chance that all that are ready are accepted.
        """
        if not self._k or room <= 0:
            return 0
        room = min(room, self._depth() - ready)
        if ready == 0:
            return min(room, self._for_this_pass())
        needed = 0 if self._auto else self._k - ready
        if room < max(1, self._round() // 2):
            return 0
        return max(min(needed, room), self._worth(room, sure))

    def _for_this_pass(self) -> int:
        if not self._auto:
            return self._k
        worth = self._worth(self._depth(), 1.0)
        if worth:
            self._quiet = 0
            self._probe_after = max(self._probe_after, _FIRST_PROBE)
            return worth
        if self._quiet < self._probe_after:
            return 0
        self._quiet = 0
        self._probe_after = min(2 * self._probe_after, _LAST_PROBE)
        return _PROBE_TOKENS

    def _worth(self, most: int, sure: float) -> int:
        """How many further tokens are worth drafting; none unless they are worth asking for."""
        habits = self.habits
        if not self._book.token_ns:
            return min(most, self._round())  # nothing was measured yet
        value = self._book.token_ns * habits.taken * sure
        count, gain = 0, 0.0
        while count < most:
            value *= habits.alpha
            if value <= habits.token_ns:
                break
            gain += value - habits.token_ns
            count += 1
        return count if gain * habits.voice > _ASK_NS else 0

    def _round(self) -> int:
        """How many draft tokens a pass is likely to verify."""
        return max(1, min(self._k, math.ceil(2 * self.habits.verified) if self._auto else self._k))

    def _depth(self) -> int:
        """How many tokens may be ready: a pass's, its bonus, the next pass's, and those of the way here."""
        on_the_way = math.ceil(2 * self._latency_ns * self._rate)
        return min(2 * self._round() + 1 + on_the_way, max(_MOST_AHEAD, self._round()))
