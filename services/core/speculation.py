"""How many tokens a session has drafted: what they are worth, by what was measured, against what they cost.

A draft token is worth the chance that it is accepted times what a token costs the target now: its share of a
pass. It costs the target a row, for which all tokens of the pass come later, and asking costs a message. The
draft's time counts as far as the coming pass is later for it; what is drafted ahead, while the target works,
takes time from other sessions alone. A session asks for as many as are worth it, down to none; then it asks
for a few now and again, so that it finds out when drafts have become good (or the load low). How many of them
are verified is the target's decision, at its load; here only what it took is seen.

Beside the tokens for the coming pass, others are drafted ahead of it: so that the next pass finds some when
all of these are accepted, and so that a slow link does not leave the target without.

What is measured of a workload is what its next session begins with (`Book`). No clock: times are arguments,
in nanoseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.core.cost import expected_confirmed
from services.core.last_used import LastUsed

if TYPE_CHECKING:
    from services.core.answer import SessionSpec

# Weights of what was seen last: in a session, in its workload, in the load.
_SESSION, _WORKLOAD, _LOAD = 0.04, 0.01, 0.05
# Of a token, in the acceptance of its workload. All sessions act on that, and who has given drafts up sees
# few more: bad luck must not move it far. What changes quickly shows in the sessions, and is their `own`.
_WORKLOAD_TOKEN = 1.0 / 256
# Drafts that were not worth it are tried again: so many tokens, for this share of the session's time on the
# target, after so many verdicts at least and at most.
_PROBE_TOKENS = 4
_PROBE_SHARE = 0.03
_FIRST_PROBE, _LAST_PROBE = 4, 24
# Of the token after a wrong one; few are seen, and drafts that copy differ from all others.
_SHAKEN = 0.15
_RECOVERS = 0.5
# For how many tokens the prior counts.
_PRIOR_TOKENS = 5
# The square of what sets a session apart, and what of it shows: all, until more is known.
_APART = 0.01
# Asked for while nothing is known.
_FIRST_TOKENS = 4
# What a proposal costs besides drafting: messages, and the work of both ends.
_ASK_NS = 400_000
# Drafted ahead at most, whatever the link.
_MOST_AHEAD = 64
_WORKLOADS = 1024


@dataclass(slots=True)
class Habits:
    """What drafts are like: running means over what was seen, of which `tokens` were judged.

    alpha: the chance that a draft token is right if all before it were, be it verified or not; recovery: that
    the one after a wrong one is; voice: that a proposal has any token; taken: that of offered tokens any is
    verified; verified: how many then are; token_ns: what drafting one takes, share_ns: the share of the
    session in that, and others_ns: what of that it takes from others, who draft at the same time; quiet:
    verdicts since any were asked for.

    Of a workload, `own` is how much of what sets a session apart from it shows in that session's next token:
    1 where sessions differ, 0 where they are alike, and what sets them apart is chance.
    """

    alpha: float = 0.6
    recovery: float = 0.25
    voice: float = 1.0
    taken: float = 1.0
    verified: float = 4.0
    token_ns: float = 0.0
    share_ns: float = 0.0
    others_ns: float = 0.0
    tokens: int = 0
    quiet: int = 0
    apart_squared: float = _APART
    apart_shown: float = _APART

    @property
    def own(self) -> float:
        """The slope of a regression of tokens on what their sessions are apart from the workload."""
        return min(1.0, max(0.0, self.apart_shown / self.apart_squared))

    def saw_session(self, alpha: float, weight: float, *, right: bool) -> None:
        """The next token of a session of this `alpha`; to be told before `saw_token`."""
        apart = alpha - self.alpha
        self.apart_squared += weight * (apart * apart - self.apart_squared)
        self.apart_shown += weight * (apart * (right - self.alpha) - self.apart_shown)

    def saw_token(self, weight: float, *, right: bool) -> None:
        """A draft token was right, or the first that was not."""
        self.tokens += 1
        self.alpha += max(weight, 1.0 / (self.tokens + _PRIOR_TOKENS)) * (right - self.alpha)

    def saw_shaken(self, weight: float, *, right: bool) -> None:
        """The draft token after a wrong one was right, or was not."""
        self.recovery += weight * (right - self.recovery)

    def saw_proposal(self, came: int, compute_ns: int, sessions: int, weight: float) -> None:
        """A proposal of so many tokens, which took the draft so long, for so many sessions at once."""
        self.voice += weight * ((came > 0) - self.voice)
        if came:
            share = 1.0 / max(1, sessions)
            token_ns = compute_ns / came
            self.token_ns = _mean(self.token_ns, token_ns, weight)
            self.share_ns = _mean(self.share_ns, token_ns * share, weight)
            self.others_ns += weight * (token_ns * share * (1.0 - share) - self.others_ns)

    def saw_verdict(self, verified: int, weight: float) -> None:
        """Draft tokens were offered, and so many verified."""
        self.taken += weight * ((verified > 0) - self.taken)
        if verified:
            self.verified += weight * (verified - self.verified)


def _mean(before: float, seen: float, weight: float) -> float:
    """A running mean; 0 while nothing was seen."""
    return before + weight * (seen - before) if before else seen


class Book:
    """What a gateway remembers beyond its sessions: the habits of each workload's drafts, and the load.

    `pass_ns` is what a pass of the target takes now, `share_ns` what each of its sessions has to bear,
    `row_ns` what a draft token more adds, and `confirmed` how many tokens a session gets of one. `latency_ns`
    is from asking for a proposal to having it, and `message_ns` what of that was not the draft's computing.
    """

    def __init__(self) -> None:
        self.pass_ns = 0.0
        self.share_ns = 0.0
        self.row_ns = 0.0
        self.confirmed = 1.0
        self.latency_ns = 0.0
        self.message_ns = 0.0
        self._habits: LastUsed[tuple[str, str | None], Habits] = LastUsed(Habits, _WORKLOADS)

    def habits(self, strategy: str, workload: str) -> Habits:
        """Of a strategy's drafts for a workload; those not met for long are forgotten.

        A workload begins with what the strategy's drafts are like whatever the workload.
        """
        overall = self.overall(strategy)
        return self._habits.of((strategy, workload), lambda: replace(overall, tokens=0))

    def overall(self, strategy: str) -> Habits:
        """Of a strategy's drafts, whatever they are for."""
        return self._habits.of((strategy, None))

    def saw_pass(self, compute_ns: int, sessions: int, row_ns: int, confirmed: int) -> None:
        """A pass of the target, shared by so many sessions, of which one got so many tokens."""
        self.pass_ns = _mean(self.pass_ns, compute_ns, _LOAD)
        self.share_ns = _mean(self.share_ns, compute_ns / max(1, sessions), _LOAD)
        self.row_ns = _mean(self.row_ns, row_ns, _LOAD)
        self.confirmed += _LOAD * (confirmed - self.confirmed)

    def saw_proposal(self, latency_ns: int, compute_ns: int) -> None:
        """A proposal came, so long after it was asked for."""
        self.latency_ns = _mean(self.latency_ns, latency_ns, _LOAD)
        self.message_ns = _mean(self.message_ns, max(0, latency_ns - compute_ns), _LOAD)


class Speculation:
    """Of one session."""

    def __init__(self, spec: SessionSpec, book: Book) -> None:
        self._k = spec.k
        self._auto = spec.auto
        self._workload = book.habits(spec.strategy, spec.workload)
        self._shared = (self._workload, book.overall(spec.strategy))
        self._book = book
        self.habits = replace(self._workload, tokens=0)
        self._right_running = 0

    def saw_proposal(self, came: int, latency_ns: int, compute_ns: int, sessions: int) -> None:
        """A proposal of `came` tokens came, so long after it was asked for; `sessions` shared the work."""
        self.habits.saw_proposal(came, compute_ns, sessions, _SESSION)
        for habits in self._shared:
            habits.saw_proposal(came, compute_ns, sessions, _WORKLOAD)
        self._book.saw_proposal(latency_ns, compute_ns)

    def saw_token(self, right: bool) -> None:
        """A proposed token was right, or the first that was not."""
        for habits in self._shared:
            habits.saw_session(self.habits.alpha, _WORKLOAD_TOKEN, right=right)
            habits.saw_token(_WORKLOAD_TOKEN, right=right)
        self.habits.saw_token(_SESSION, right=right)
        self._right_running = self._right_running + 1 if right else 0

    def saw_shaken(self, right: bool) -> None:
        """The proposed token after a wrong one was right, or was not."""
        self.habits.saw_shaken(_SHAKEN, right=right)
        for habits in self._shared:
            habits.saw_shaken(_SHAKEN, right=right)

    @property
    def recovers(self) -> bool:
        """Is what was proposed after a wrong token mostly right again?"""
        return self.habits.recovery >= _RECOVERS

    @property
    def message_ns(self) -> float:
        """What a question to the draft takes besides its computing."""
        return self._book.message_ns

    @property
    def alpha(self) -> float:
        """The chance that a draft token is right if those before were: its own, as far as sessions differ."""
        workload = self._workload
        return workload.alpha + workload.own * (self.habits.alpha - workload.alpha)

    def saw_pass(self, compute_ns: int, sessions: int, row_ns: int, confirmed: int) -> None:
        """A pass, shared by `sessions`, `confirmed` tokens; a draft token more adds `row_ns` to such."""
        self._book.saw_pass(compute_ns, sessions, row_ns, confirmed)

    def saw_verdict(self, *, offered: bool, verified: int) -> None:
        """A verdict came; draft tokens for it had been `offered`, or not."""
        self.habits.quiet += 1
        # So that a workload of short answers is tried as often.
        self._workload.quiet = self.habits.quiet
        if not offered:
            return
        self.habits.saw_verdict(verified, _SESSION)
        for habits in self._shared:
            habits.saw_verdict(verified, _WORKLOAD)

    def wanted(self, ready: int, sure: float, room: int) -> int:
        """How many tokens to have drafted now, at most `room`, after `ready` that are.

        `sure` is the chance that all that are ready are accepted.
        """
        room = min(room, self._depth() - ready)
        if not self._k or room <= 0:
            return 0
        if ready == 0:
            return min(room, self._for_this_pass())
        proposal = self._proposal()
        at_least = 0 if self._auto else min(self._k - ready, room)
        # Each costs a message: none for a token or two.
        ahead = self._worth(min(room, proposal), sure) if 2 * room >= self._best() else 0
        return max(at_least, ahead)

    def _for_this_pass(self) -> int:
        if not self._auto:
            return self._proposal()
        worth = self._worth(self._proposal(), 1.0)
        if worth:
            self.habits.quiet = 0
            return worth
        if self.habits.quiet < self._probe_after():
            return 0
        self.habits.quiet = 0
        return min(_PROBE_TOKENS, self._k)

    def _probe_after(self) -> int:
        """Verdicts until drafts are tried again: at once while as many as are tried come true."""
        if self._right_running >= _PROBE_TOKENS or not self._book.share_ns:
            return 1
        cost_ns = _ASK_NS + _PROBE_TOKENS * self.habits.share_ns
        after = math.ceil(cost_ns / (_PROBE_SHARE * self._book.share_ns))
        return min(max(after, _FIRST_PROBE), _LAST_PROBE)

    def _worth(self, most: int, sure: float) -> int:
        """How many further tokens are worth drafting; none unless those for one pass are worth asking for."""
        if not self._book.share_ns:
            return most  # nothing was measured yet
        gains = self._gains_of_a_pass(sure, most)
        if sum(gains) * self.habits.voice * self.habits.taken <= _ASK_NS:
            return 0
        count = len(gains)
        while count < most and (left := self._gains_of_a_pass(sure * self.alpha**count, most - count)):
            count += len(left)
        return count

    def _gains_of_a_pass(self, reached: float, most: int) -> list[float]:
        """What each token gains, in time of the target, that is worth a row of a pass.

        That pass has them with chance `reached`: if all tokens before them are accepted. Else no row is
        spent on them. For a row, all tokens that a pass confirms come later.
        """
        share_ns, alpha = self._book.share_ns, self.alpha
        row_ns = self._book.row_ns * self._book.confirmed
        others_ns = self.habits.others_ns if reached < 1.0 else 0.0
        gains: list[float] = []
        chance = alpha
        while len(gains) < most and (gain := reached * (chance * share_ns - row_ns) - others_ns) > 0.0:
            gains.append(gain)
            chance *= alpha
        return gains

    def _proposal(self) -> int:
        """How many tokens to ask for at once: as confirm most in the time of drafting them and of a pass.

        Longer proposals come later, and the pass waits for them, or goes without. And what takes longer to
        draft than a pass had better come in two: the pass has the first while the rest is drafted.
        """
        # On a slow link, so many more are used up before it comes.
        return self._best() + self._confirmed_in(2 * self.message_ns)

    def _best(self) -> int:
        if not self._auto:
            return self._k
        habits = self.habits
        took_ns = self._book.pass_ns + self.message_ns
        if not self._book.pass_ns or not habits.token_ns:
            return min(self._k, _FIRST_TOKENS)
        token_ns = habits.token_ns + self._book.row_ns
        alpha = self.alpha
        confirmed, chance = 1.0, 1.0
        best, best_rate = 0, confirmed / took_ns
        most = min(self._k, math.ceil(self._book.pass_ns / habits.token_ns))
        for count in range(1, most + 1):
            chance *= alpha
            confirmed += chance
            rate = confirmed / (took_ns + count * token_ns)
            if rate <= best_rate:
                break
            best, best_rate = count, rate
        return best

    def _depth(self) -> int:
        """How many tokens may be ready: a pass's, its bonus, the next pass's, and those of the way here."""
        of_a_pass = self._of_a_pass()
        on_the_way = self._confirmed_in(2 * self._book.latency_ns + self.message_ns)
        return min(2 * of_a_pass + 1 + on_the_way, max(_MOST_AHEAD, of_a_pass))

    def _of_a_pass(self) -> int:
        return min(self._k, math.ceil(2 * self.habits.verified)) if self._auto else self._k

    def _confirmed_in(self, time_ns: float) -> int:
        """How many tokens the target could confirm in that time, never without drafts."""
        if not self._book.pass_ns:
            return 0
        a_pass = expected_confirmed(self.alpha, self._of_a_pass())
        return math.ceil(a_pass * time_ns / self._book.pass_ns)
