"""How many tokens a session has drafted: what they are worth, by what was measured, against what they cost.

A draft token is worth the chance that it is accepted times what a token costs the target now: its share of a
pass. It costs the target a row, for which all tokens of the pass come later, and asking costs a message. The
draft's time counts as far as the coming pass is later for it; what is drafted ahead, while the target works,
takes time from other sessions alone. But what the draft has to read before it can draft, a session's prompt
above all, is work that a short answer may not be worth. A session asks for as many as are worth it, down to
none; then it asks for a few now and again, so that it finds out when drafts have become good (or the load
low). How many of them are verified is the target's decision, at its load; here only what it took is seen.

Beside the tokens for the coming pass, others are drafted ahead of it: so that the next pass finds some when
all of these are accepted, and so that a slow link does not leave the target without.

No clock: times are arguments, in nanoseconds.
"""

from __future__ import annotations

import math
from dataclasses import replace

from galley.core.answer.answer import SessionSpec
from galley.core.cost.model import expected_confirmed
from galley.core.session.draft_statistics import SharedStatistics

# Weights of what was seen last: in a session, in its workload.
_SESSION, _WORKLOAD = 0.04, 0.01
# Of a token, in the acceptance of its workload. All sessions act on that, and who has given drafts up sees
# few more: bad luck must not move it far. What changes quickly shows in the sessions, and is their `own`.
_WORKLOAD_TOKEN = 1.0 / 256
# Drafts that were not worth it are tried again: so many tokens, for this share of the session's time on the
# target and of its workload's, after so many verdicts at least, and at most where there is little to read.
_PROBE_TOKENS = 4
_PROBE_SHARE = 0.03
_FIRST_PROBE, _LAST_PROBE = 4, 24
# Of the token after a wrong one; few are seen, and drafts that copy differ from all others.
_SHAKEN = 0.15
_RECOVERS = 0.5
# Asked for while nothing is known.
_FIRST_TOKENS = 4
# What a proposal costs besides drafting: messages, and the work of both ends.
_ASK_NS = 400_000
# Drafted ahead at most, whatever the link.
_MOST_AHEAD = 64
# For how many passes more a session is expected to go on, if it may: how long an answer will be is not known.
_PASSES_TO_COME = 32


class Speculation:
    """Of one session."""

    def __init__(self, spec: SessionSpec, book: SharedStatistics) -> None:
        self._k = spec.k
        self._auto = spec.auto
        self._workload = book.for_workload(spec.strategy, spec.workload)
        self._parents = (self._workload, book.for_strategy(spec.strategy))
        self._shared = book
        self.statistics = replace(self._workload, tokens=0)
        self._right_running = 0

    def record_proposal(
        self, came: int, unread: int, latency_ns: int, compute_ns: int, sessions: int
    ) -> None:
        """A proposal of `came` tokens came, so long after it was asked for; `sessions` shared the work.

        The draft had `unread` tokens to read first.
        """
        self.statistics.record_proposal(came, unread, compute_ns, sessions, _SESSION)
        for habits in self._parents:
            habits.record_proposal(came, unread, compute_ns, sessions, _WORKLOAD)
        self._shared.record_proposal(latency_ns, compute_ns)

    def record_token(self, right: bool) -> None:
        """A proposed token was right, or the first that was not."""
        for habits in self._parents:
            habits.record_deviation(self.statistics.alpha, _WORKLOAD_TOKEN, right=right)
            habits.record_token(_WORKLOAD_TOKEN, right=right)
        self.statistics.record_token(_SESSION, right=right)
        self._right_running = self._right_running + 1 if right else 0

    def record_recovery(self, right: bool) -> None:
        """The proposed token after a wrong one was right, or was not."""
        self.statistics.record_recovery(_SHAKEN, right=right)
        for habits in self._parents:
            habits.record_recovery(_SHAKEN, right=right)

    @property
    def can_recover(self) -> bool:
        """Is what was proposed after a wrong token mostly right again?"""
        return self.statistics.recovery >= _RECOVERS

    @property
    def message_ns(self) -> float:
        """What a question to the draft takes besides its computing."""
        return self._shared.message_ns

    @property
    def alpha(self) -> float:
        """The chance that a draft token is right if those before were: its own, as far as sessions differ."""
        workload = self._workload
        return workload.alpha + workload.deviation_weight * (self.statistics.alpha - workload.alpha)

    def record_step(self, compute_ns: int, sessions: int, row_ns: int, confirmed: int) -> None:
        """A pass, shared by `sessions`, `confirmed` tokens; a draft token more adds `row_ns` to such."""
        self._shared.record_step(compute_ns, sessions, row_ns, confirmed)

    def record_verdict(self, *, offered: bool, verified: int) -> None:
        """A verdict came; draft tokens for it had been `offered`, or not."""
        self.statistics.verdicts_since_draft += 1
        self._workload.verdicts_since_draft += 1
        if not offered:
            return
        self.statistics.record_verdict(verified, _SESSION)
        for habits in self._parents:
            habits.record_verdict(verified, _WORKLOAD)

    def tokens_to_draft(self, ready: int, sure: float, room: int, unread: int) -> int:
        """How many tokens to have drafted now, at most `room`, after `ready` that are.

        `sure` is the chance that all that are ready are accepted. The draft would have `unread` tokens to
        read first.
        """
        room = min(room, self._depth() - ready)
        if not self._k or room <= 0:
            return 0
        if ready == 0:
            return min(room, self._for_this_pass(unread * self.statistics.read_ns, room))
        proposal = self._proposal()
        at_least = 0 if self._auto else min(self._k - ready, room)
        # Each costs a message: none for a token or two.
        ahead = self._worth(min(room, proposal), sure) if 2 * room >= self._best() else 0
        return max(at_least, ahead)

    def _for_this_pass(self, reading_ns: float, room: int) -> int:
        if not self._auto:
            return self._proposal()
        count = self._worth(self._proposal(), 1.0, reading_ns / min(room, _PASSES_TO_COME))
        if not count and max(
            self.statistics.verdicts_since_draft, self._workload.verdicts_since_draft
        ) >= self._probe_after(reading_ns):
            count = min(_PROBE_TOKENS, self._k)
        if count:
            self.statistics.verdicts_since_draft = self._workload.verdicts_since_draft = 0
        return count

    def _probe_after(self, reading_ns: float) -> float:
        """Verdicts until drafts are tried again: at once while as many as are tried come true.

        Those of the session or those of its workload: where answers are short, few sessions try for all.
        """
        if self._right_running >= _PROBE_TOKENS or not self._shared.share_ns:
            return 1
        spared_ns = _PROBE_SHARE * self._shared.share_ns
        after = (_ASK_NS + _PROBE_TOKENS * self.statistics.share_ns) / spared_ns
        return min(max(after, _FIRST_PROBE), _LAST_PROBE) + reading_ns / spared_ns

    def _worth(self, most: int, sure: float, reading_ns: float = 0.0) -> int:
        """How many further tokens are worth drafting; none unless those for one pass are worth asking for."""
        if not self._shared.share_ns:
            return most  # nothing was measured yet
        gains = self._gains_of_a_pass(sure, most)
        if sum(gains) * self.statistics.nonempty_rate * self.statistics.verified_rate <= _ASK_NS + reading_ns:
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
        share_ns, alpha = self._shared.share_ns, self.alpha
        row_ns = self._shared.row_ns * self._shared.confirmed_per_step
        others_ns = self.statistics.others_ns if reached < 1.0 else 0.0
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
        habits = self.statistics
        took_ns = self._shared.step_ns + self.message_ns
        if not self._shared.step_ns or not habits.token_ns:
            return min(self._k, _FIRST_TOKENS)
        token_ns = habits.token_ns + self._shared.row_ns
        alpha = self.alpha
        confirmed, chance = 1.0, 1.0
        best, best_rate = 0, confirmed / took_ns
        most = min(self._k, math.ceil(self._shared.step_ns / habits.token_ns))
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
        on_the_way = self._confirmed_in(2 * self._shared.latency_ns + self.message_ns)
        return min(2 * of_a_pass + 1 + on_the_way, max(_MOST_AHEAD, of_a_pass))

    def _of_a_pass(self) -> int:
        return min(self._k, math.ceil(2 * self.statistics.verified_len)) if self._auto else self._k

    def _confirmed_in(self, time_ns: float) -> int:
        """How many tokens the target could confirm in that time, never without drafts."""
        if not self._shared.step_ns:
            return 0
        a_pass = expected_confirmed(self.alpha, self._of_a_pass())
        return math.ceil(a_pass * time_ns / self._shared.step_ns)
