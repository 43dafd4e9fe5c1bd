"""Choose how many draft tokens a session requests: their measured worth against their cost.

A draft token is worth the chance that it is accepted times what a token costs the target now: the session's
share of a step. It costs the target a row, which delays all tokens of the step, and the request costs a
message. The draft's time counts as far as it delays the next step, or takes the target's cores; what is
drafted ahead, while the target works, takes time from other sessions. The draft has to read a session's
prompt first, and a short answer may not be worth that.

A session requests as many tokens as are worth it, down to none. Then, if perfect drafts would be worth it, it
probes: it requests a few now and again, to notice when drafts have become good. The time that all probes take
is bounded by a share of the target's time. No probe notices when the load falls: each verdict says what a row
costs. Beside the tokens for the next step, more are drafted ahead: for the step after it, and because a link
may be slow. Times are arguments, in nanoseconds.

A tree has several candidates for a position. They are requested where a second one, which is right only if
the first is wrong, is worth a row as well: the draft and the target then share the rows by survival. How
often further candidates are right is learned from all that were proposed, verified or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, repeat
from operator import mul

from galley.core.answer.answer import SessionSpec
from galley.core.cost.model import expected_confirmed
from galley.core.session.draft_statistics import SharedStatistics
from galley.core.trees import MAX_WIDTH

# Weights of the newest value: in a session, in its workload.
_SESSION, _WORKLOAD = 0.04, 0.01
# Weight of a token in the acceptance of its workload. All sessions act on it, and one that has stopped
# drafting sees few more tokens, so chance must not move it far. Quick changes show in sessions' own means.
_WORKLOAD_TOKEN = 1.0 / 256
# Probes of drafts that are not worth it: their tokens, and their share of the time of all target steps. Half
# of that is for the workload that has saved it, half for any: a workload with long prompts must save up.
_PROBE_TOKENS = 4
_PROBE_SHARE = 0.005
_MAX_BUDGET_NS = 1_000_000_000
# The draft's own time counts at least this much, so that probes cannot keep it busy.
_LEAST_WORK = 0.1
# After a probe that was right, how many more may be made in advance.
_PROBES_IN_ADVANCE = 8
# Weight of the token after a wrong one: large, because few are seen and drafts that copy differ from others.
_RECOVERY_WEIGHT = 0.15
_RECOVERS = 0.5
# Weight of a chain where a tree was requested: large, because a draft that makes no trees never does.
_CHAIN_WEIGHT = 0.15
# Requested while nothing is known; and how many requests are made before a step was measured: many sessions
# may start at once.
_FIRST_TOKENS = 4
_FIRST_REQUESTS = 4
# A draft token must be worth this much more than it costs: estimates are uncertain, and the sessions that
# request drafts are those that overestimate them.
_MARGIN = 1.05
# Reading a prompt counts at least this part of its time: meanwhile the draft works for no other session.
_LEAST_READING = 0.25
# Cost of a proposal besides drafting: messages, and the work of both ends.
_REQUEST_NS = 400_000
# Most tokens drafted ahead, however slow the link.
_MOST_AHEAD = 64
# How many more steps a session is expected to take, if it may: the length of an answer is not known.
_STEPS_TO_COME = 32


class Speculation:
    def __init__(self, spec: SessionSpec, shared: SharedStatistics, version: str = "") -> None:
        """`version` is that of the draft which the session is given, empty if it is given none by name."""
        self._k = spec.k
        self._auto = spec.auto
        self._most_width = spec.width
        # The most tokens to request now for one position, as of the last `tokens_to_draft`.
        self.width = 1
        self._workload = shared.for_workload(spec.strategy, spec.workload, spec.lora, version)
        self._parents = (self._workload, shared.for_strategy(spec.strategy, version))
        self.shared = shared
        self._takes_trees = shared.takes_trees
        self.statistics = replace(self._workload, tokens=0)
        self._weighted = ((self.statistics, _SESSION), *((parent, _WORKLOAD) for parent in self._parents))
        self._right_in_a_row = 0
        self._paid_ns: float | None = None  # what the pending probe was expected to cost
        # Tokens of the proposals since the last one with any: the draft may still have to read them.
        self._sent_before = 0
        # A proposal was given up since then: part of what counts as unread may have been read for it.
        self._was_given_up = False

    def record_proposal(
        self,
        received: int,
        unread: int,
        latency_ns: int,
        compute_ns: int,
        sessions: int,
        *,
        is_late: bool = False,
    ) -> None:
        """Record a proposal of `received` tokens, after reading `unread`, in steps of `sessions` sessions.

        It `is_late` if those tokens were confirmed before it came.
        """
        unread += self._sent_before
        # Part of a long reading may be in the time of earlier proposals.
        is_whole = not self._sent_before and not self._was_given_up
        is_measured = received > 0 and (unread <= received or is_whole)
        self._sent_before = 0 if received else unread
        self._was_given_up = self._was_given_up and not received
        for statistics, weight in self._weighted:
            statistics.record_outcome(weight, nonempty=received > 0 and not is_late)
            if is_measured:
                statistics.record_time(received, unread, compute_ns, sessions, weight)
        self.shared.record_proposal(latency_ns, compute_ns)
        if self._paid_ns is not None:
            self._charge(self._paid_ns, self._probe_ns(compute_ns / max(1, sessions)))

    def record_given_up(self, elapsed_ns: int) -> None:
        """Record that the pending proposal was given up, or has failed, so long after its request."""
        self._was_given_up = True
        if self._paid_ns is not None:
            # What the draft has worked is not known.
            self._charge(self._paid_ns, min(self._paid_ns, self._probe_ns(elapsed_ns)))

    def _charge(self, paid_ns: float, cost_ns: float) -> None:
        """Charge the pending probe with what it cost in place of what was paid in advance."""
        _, overall = self._parents
        overall.budget_ns -= cost_ns - paid_ns
        self._paid_ns = None

    def record_late(self) -> None:
        """Record a proposal that was given up because its tokens were confirmed before it came."""
        for statistics, weight in self._weighted:
            statistics.record_outcome(weight, nonempty=False)

    def record_token(self, right: bool) -> None:
        """Record a proposed token, the likeliest for its position: right, or the first that was wrong."""
        for parent in self._parents:
            parent.record_deviation(self.statistics.alpha, _WORKLOAD_TOKEN, right=right)
            parent.record_token(_WORKLOAD_TOKEN, right=right)
        self.statistics.record_token(_SESSION, right=right)
        self._right_in_a_row = self._right_in_a_row + 1 if right else 0
        if not right and self.width == 1:
            for statistics, weight in self._weighted:
                statistics.forget_side(weight)

    def record_candidates(self, count: int, rank: int | None) -> None:
        """Record the candidates for a position, of which the one of this rank was right; None: none was."""
        self.record_token(rank == 0)
        for side in range(1, count if rank is None else rank + 1):
            for statistics, weight in self._weighted:
                statistics.record_side(weight, right=side == rank)

    def record_chain(self, count: int) -> None:
        """Record a chain of `count` tokens where a tree was requested.

        If a second candidate had been likelier than the last of them, the draft makes no trees.
        """
        if self._chances(2)[1] > self.alpha**count:
            for statistics, _ in self._weighted:
                statistics.record_side(_CHAIN_WEIGHT, right=False)

    def record_recovery(self, right: bool) -> None:
        for statistics, _ in self._weighted:
            statistics.record_recovery(_RECOVERY_WEIGHT, right=right)

    @property
    def can_recover(self) -> bool:
        return self.statistics.recovery >= _RECOVERS

    @property
    def alpha(self) -> float:
        """Return the chance that a draft token is right if all before it were.

        The mean of the session's own chance, with weight `deviation_weight`, and that of its workload.
        """
        workload = self._workload
        return workload.alpha + workload.deviation_weight * (self.statistics.alpha - workload.alpha)

    def record_target(self, *, trees: bool) -> None:
        """Record whether the target of the session takes trees."""
        self._takes_trees = self.shared.takes_trees = trees

    def record_verdict(self, *, offered: bool, verified: int) -> None:
        """Record a verdict; `offered` if the target had draft tokens for it."""
        if offered:
            for statistics, weight in self._weighted:
                statistics.record_verdict(verified, weight)
        elif self._auto:
            earned_ns = _PROBE_SHARE * self.shared.share_ns / len(self._parents)
            for statistics in self._parents:
                statistics.budget_ns = min(statistics.budget_ns + earned_ns, _MAX_BUDGET_NS)

    def is_worth_a_row(self, chance: float) -> bool:
        """Return True if a token that is accepted with this chance is worth a row of a step."""
        shared = self.shared
        price_ns = _MARGIN * shared.row_ns * shared.confirmed_per_step
        return not self._auto or chance * shared.share_ns >= price_ns

    def tokens_to_draft(self, ready: int, reached: float, room: int, unread: int) -> int:
        """Return how many tokens to request now, at most `room`, after `ready` ones that are not verified.

        All ready ones are accepted with chance `reached`. The draft has `unread` tokens to read first.
        """
        self._paid_ns = None
        if not self._k or room <= 0:
            return 0
        self.width = self._width_that_pays()
        if self._auto and not self.shared.share_ns:
            self.shared.first_requests += 1
            if self.shared.first_requests > _FIRST_REQUESTS:
                return 0
        if ready == 0:
            return min(room, self._for_next_step(unread * self.statistics.reading_ns, room))
        room = min(room, self._depth() - ready)
        if room <= 0:
            return 0
        # Each request costs a message: make none for a token or two.
        proposal = self._proposal_len()
        at_least = 0 if self._auto else min(self._k - ready, room)
        ahead = self._worthwhile(min(room, proposal), reached) if 2 * room >= self._best() else 0
        return max(at_least, ahead)

    def _for_next_step(self, reading_ns: float, room: int) -> int:
        if not self._auto:
            return min(self._proposal_len(), self._depth())
        if self._token_price >= self.alpha:
            return self._probe(reading_ns)
        most = min(self._proposal_len(), self._depth())
        steps = max(1.0, min(room / expected_confirmed(self.alpha, most), _STEPS_TO_COME))
        counted_ns = max(_LEAST_READING, self.shared.contention) * reading_ns
        return self._worthwhile(most, 1.0, counted_ns / steps) or self._probe(reading_ns)

    def _width_that_pays(self) -> int:
        """Return the most candidates for a position of which each is worth its cost, from the second on."""
        if not self._takes_trees or self._most_width == 1:
            return 1
        if not self._auto:
            return max(1, self._most_width)
        if not self.shared.share_ns:
            return 1
        price, side, width = self._token_price, self._side, 1
        chance = (1.0 - self.alpha) * side
        while chance >= price and width < (self._most_width or MAX_WIDTH):
            chance *= 1.0 - side
            width += 1
        return width

    @property
    def _side(self) -> float:
        """Return the chance of a candidate if all likelier ones are wrong. The first is the likeliest."""
        return min(self.statistics.side, self.alpha)

    def _chances(self, width: int) -> list[float]:
        """Return the chance of each candidate for a position, if all tokens before it were right.

        From the second on, each is right with the same chance if those before it are wrong. That fits lists
        of the likeliest tokens under the noise that draft and target share.
        """
        alpha, side = self.alpha, self._side
        return [alpha, *((1.0 - alpha) * side * (1.0 - side) ** rank for rank in range(width - 1))]

    def _survivals(self) -> Iterator[float]:
        """Return the chance that each draft token of a proposal is accepted, the likeliest first, endless."""
        if self.width > 1:
            return best_survivals(self._chances(self.width))
        return accumulate(repeat(self.alpha), mul)

    @property
    def _token_price(self) -> float:
        """Return how likely a draft token must be right to be worth its cost; 0 while nothing is measured."""
        shared = self.shared
        if not shared.share_ns:
            return 0.0
        cost_ns = shared.row_ns + shared.contention * self.statistics.share_ns
        return _MARGIN * cost_ns * shared.confirmed_per_step / shared.share_ns

    def _probe(self, reading_ns: float) -> int:
        """Return how many tokens to request to see whether drafts have become worth it: some if paid for."""
        if self._token_price >= 1.0:
            return 0
        own, overall = self._parents
        paid_ns = self._probe_ns(_PROBE_TOKENS * self.statistics.share_ns + reading_ns)
        cost_ns = _REQUEST_NS + paid_ns
        in_advance = _PROBES_IN_ADVANCE if self._right_in_a_row >= _PROBE_TOKENS else 0
        # What a long prompt costs beyond that is owed: nothing more can be saved.
        needed_ns = min(cost_ns, _MAX_BUDGET_NS)
        if own.budget_ns + overall.budget_ns + in_advance * cost_ns < needed_ns:
            return 0
        from_own = min(max(own.budget_ns, 0.0), cost_ns)
        own.budget_ns -= from_own
        overall.budget_ns -= cost_ns - from_own
        self._paid_ns = paid_ns
        return min(_PROBE_TOKENS, self._k)

    def _probe_ns(self, work_ns: float) -> float:
        """Return what `work_ns` of the draft count for a probe: the less there is to win, the more."""
        return max(_LEAST_WORK, self.shared.contention, min(1.0, self._token_price)) * work_ns

    def _worthwhile(self, most: int, reached: float, reading_ns: float = 0.0) -> int:
        """Return how many further tokens are worth drafting: none unless one step's are worth a request."""
        if not self.shared.share_ns:
            return most  # nothing is measured yet
        gains = self._step_gains(reached, most)
        if (
            sum(gains) * self.statistics.nonempty_rate * self.statistics.verified_rate
            <= _REQUEST_NS + reading_ns
        ):
            return 0
        count = len(gains)
        if self.width > 1:
            return count  # a tree is for one step; more is requested from the end of its main path
        while count < most and (left := self._step_gains(reached * self.alpha**count, most - count)):
            count += len(left)
        return count

    def _step_gains(self, reached: float, most: int) -> list[float]:
        """Return what each token gains, in target ns, among those that are worth a row of a step.

        The step has them with chance `reached`; otherwise they cost no row. A row delays the whole step.
        """
        share_ns = self.shared.share_ns
        tokens = _MARGIN * self.shared.confirmed_per_step
        row_ns = self.shared.row_ns * tokens
        work_ns = self.shared.contention * self.statistics.share_ns * tokens
        if reached < 1.0:
            work_ns += self.statistics.others_ns
        gains: list[float] = []
        for _, chance in zip(range(most), self._survivals(), strict=False):
            if (gain := reached * (chance * share_ns - row_ns) - work_ns) <= 0.0:
                break
            gains.append(gain)
        return gains

    def _proposal_len(self) -> int:
        """Return how many tokens to request at once to confirm the most tokens per unit of time.

        A proposal that takes longer to draft than a step is requested in two parts: the step uses the first
        while the second is drafted.
        """
        # On a slow link, the target confirms some before the proposal arrives.
        return self._best() + self._confirmed_in(2 * self.shared.message_ns)

    def _best(self) -> int:
        if not self._auto:
            return self._k
        statistics = self.statistics
        took_ns = self.shared.step_ns + self.shared.message_ns
        if not self.shared.step_ns or not statistics.token_ns:
            return min(self._k, _FIRST_TOKENS)
        token_ns = statistics.token_ns + self.shared.row_ns
        confirmed = 1.0
        best, best_rate = 0, confirmed / took_ns
        most = min(self._k, math.ceil(self.shared.step_ns / statistics.token_ns))
        for count, chance in zip(range(1, most + 1), self._survivals(), strict=False):
            confirmed += chance
            rate = confirmed / (took_ns + count * token_ns)
            if rate <= best_rate:
                break
            best, best_rate = count, rate
        return best

    def _depth(self) -> int:
        """Return how many tokens may be ready: those of two steps, a bonus token, and those in transit."""
        per_step = self._per_step()
        on_the_way = self._confirmed_in(2 * self.shared.latency_ns + self.shared.message_ns)
        return min(2 * per_step + 1 + on_the_way, max(_MOST_AHEAD, per_step))

    def _per_step(self) -> int:
        return min(self._k, math.ceil(2 * self.statistics.verified_len)) if self._auto else self._k

    def _confirmed_in(self, time_ns: float) -> int:
        """Return how many tokens the target could confirm in that time, if it never lacks drafts."""
        if not self.shared.step_ns:
            return 0
        confirmed = expected_confirmed(self.alpha, self._per_step())
        return math.ceil(confirmed * time_ns / self.shared.step_ns)


def best_survivals(chances: Sequence[float]) -> Iterator[float]:
    """Yield the survival of the nodes of the best tree, the likeliest first, without an end.

    Each node has a child of each of these chances, which fall.
    """
    # By survival: that of the parent, and the rank among its children.
    open_nodes = [(-chances[0], 1.0, 0)]
    while True:
        negative, parent, rank = heappop(open_nodes)
        yield -negative
        heappush(open_nodes, (negative * chances[0], -negative, 0))
        if rank + 1 < len(chances):
            heappush(open_nodes, (-parent * chances[rank + 1], parent, rank + 1))
