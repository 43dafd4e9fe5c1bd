"""What is remembered of drafts and of the load: by session, by workload, and of all.

What is measured of a workload is what its next session begins with (`SharedStatistics`). No clock: times are
arguments, in nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from galley.core.lru import LruCache

# Weight of what was seen last, in the load.
_LOAD = 0.05
# For how many tokens the prior counts.
_PRIOR_TOKENS = 5
# The square of what sets a session apart, and what of it shows: all, until more is known.
_APART = 0.01
_WORKLOADS = 1024


@dataclass(slots=True)
class DraftStatistics:
    """What drafts are like: running means over what was seen, of which `tokens` were judged.

    alpha: the chance that a draft token is right if all before it were, be it verified or not; recovery: that
    the one after a wrong one is; voice: that a proposal has any token; taken: that of offered tokens any is
    verified; verified: how many then are; token_ns: what drafting one takes, share_ns: the share of the
    session in that, and others_ns: what of that it takes from others, who draft at the same time; read_ns:
    the session's share of what the draft takes to read a token that it has not seen; quiet: verdicts since
    any were asked for, of a workload in all its sessions.

    Of a workload, `own` is how much of what sets a session apart from it shows in that session's next token:
    1 where sessions differ, 0 where they are alike, and what sets them apart is chance.
    """

    alpha: float = 0.6
    recovery: float = 0.25
    nonempty_rate: float = 1.0
    verified_rate: float = 1.0
    verified_len: float = 4.0
    token_ns: float = 0.0
    share_ns: float = 0.0
    others_ns: float = 0.0
    read_ns: float = 0.0
    tokens: int = 0
    verdicts_since_draft: int = 0
    deviation_squared: float = _APART
    deviation_explained: float = _APART

    @property
    def deviation_weight(self) -> float:
        """The slope of a regression of tokens on what their sessions are apart from the workload."""
        return min(1.0, max(0.0, self.deviation_explained / self.deviation_squared))

    def record_deviation(self, alpha: float, weight: float, *, right: bool) -> None:
        """The next token of a session of this `alpha`; to be told before `saw_token`."""
        apart = alpha - self.alpha
        self.deviation_squared += weight * (apart * apart - self.deviation_squared)
        self.deviation_explained += weight * (apart * (right - self.alpha) - self.deviation_explained)

    def record_token(self, weight: float, *, right: bool) -> None:
        """A draft token was right, or the first that was not."""
        self.tokens += 1
        self.alpha += max(weight, 1.0 / (self.tokens + _PRIOR_TOKENS)) * (right - self.alpha)

    def record_recovery(self, weight: float, *, right: bool) -> None:
        """The draft token after a wrong one was right, or was not."""
        self.recovery += weight * (right - self.recovery)

    def record_proposal(self, came: int, unread: int, compute_ns: int, sessions: int, weight: float) -> None:
        """A proposal of `came` tokens, which took the draft so long, for so many sessions at once.

        It had `unread` tokens to read first. Where these are many, the time tells what reading takes.
        """
        self.nonempty_rate += weight * ((came > 0) - self.nonempty_rate)
        share = 1.0 / max(1, sessions)
        if not came:
            return
        if unread > came:
            if self.token_ns:
                reading_ns = max(0.0, compute_ns - came * self.token_ns)
                self.read_ns = _mean(self.read_ns, reading_ns * share / unread, weight)
        else:
            token_ns = compute_ns / came
            self.token_ns = _mean(self.token_ns, token_ns, weight)
            self.share_ns = _mean(self.share_ns, token_ns * share, weight)
            self.others_ns += weight * (token_ns * share * (1.0 - share) - self.others_ns)

    def record_verdict(self, verified: int, weight: float) -> None:
        """Draft tokens were offered, and so many verified."""
        self.verified_rate += weight * ((verified > 0) - self.verified_rate)
        if verified:
            self.verified_len += weight * (verified - self.verified_len)


def _mean(before: float, seen: float, weight: float) -> float:
    """A running mean; 0 while nothing was seen."""
    return before + weight * (seen - before) if before else seen


class SharedStatistics:
    """What a gateway remembers beyond its sessions: the habits of each workload's drafts, and the load.

    `pass_ns` is what a pass of the target takes now, `share_ns` what each of its sessions has to bear,
    `row_ns` what a draft token more adds, and `confirmed` how many tokens a session gets of one. `latency_ns`
    is from asking for a proposal to having it, and `message_ns` what of that was not the draft's computing.
    """

    def __init__(self) -> None:
        self.step_ns = 0.0
        self.share_ns = 0.0
        self.row_ns = 0.0
        self.confirmed_per_step = 1.0
        self.latency_ns = 0.0
        self.message_ns = 0.0
        self._drafts: LruCache[tuple[str, str | None], DraftStatistics] = LruCache(
            DraftStatistics, _WORKLOADS
        )

    def for_workload(self, strategy: str, workload: str) -> DraftStatistics:
        """Of a strategy's drafts for a workload; those not met for long are forgotten.

        A workload begins with what the strategy's drafts are like whatever the workload.
        """
        overall = self.for_strategy(strategy)
        return self._drafts.get((strategy, workload), lambda: replace(overall, tokens=0))

    def for_strategy(self, strategy: str) -> DraftStatistics:
        """Of a strategy's drafts, whatever they are for."""
        return self._drafts.get((strategy, None))

    def record_step(self, compute_ns: int, sessions: int, row_ns: int, confirmed: int) -> None:
        """A pass of the target, shared by so many sessions, of which one got so many tokens."""
        self.step_ns = _mean(self.step_ns, compute_ns, _LOAD)
        self.share_ns = _mean(self.share_ns, compute_ns / max(1, sessions), _LOAD)
        self.row_ns = _mean(self.row_ns, row_ns, _LOAD)
        self.confirmed_per_step += _LOAD * (confirmed - self.confirmed_per_step)

    def record_proposal(self, latency_ns: int, compute_ns: int) -> None:
        """A proposal came, so long after it was asked for."""
        self.latency_ns = _mean(self.latency_ns, latency_ns, _LOAD)
        self.message_ns = _mean(self.message_ns, max(0, latency_ns - compute_ns), _LOAD)
