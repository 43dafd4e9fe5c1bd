"""Running means of how good and how fast drafts are: per session, per workload and per strategy.

A new session starts with the means of its workload (`SharedStatistics`). Times are in nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from galley.core.lru import LruCache

_LOAD = 0.05  # weight of the newest value in the load
_PRIOR_TOKENS = 5  # the prior counts as this many tokens
_DEVIATION = 0.01  # prior: sessions differ, and every deviation shows
_READING = 1 / 8  # the time to read a token, if unknown, as a part of the time to draft one
_WORKLOADS = 1024
_SIDE = 0.3  # prior
# Weight of the prior when a single token was wrong. Otherwise lists that were once useless are never tried
# again.
_FORGET_SIDE = 1 / 32


@dataclass(slots=True)
class DraftStatistics:
    """Running means over the drafts of a session, a workload or a strategy; `tokens` is how many were judged.

    - alpha: the chance that a draft token is right if all before it were, verified or not.
    - side: the chance that the next candidate for a position is right if all likelier ones are wrong.
    - recovery: the chance that the token after a wrong one is right.
    - nonempty_rate: the share of proposals with any token that was not confirmed before.
    - verified_rate: the share of steps with a hint that verify any of it; verified_len: how many tokens then.
    - token_ns: the time to draft a token; share_ns: the session's share of it; others_ns: the part of that
      share that is taken from other sessions, which draft at the same time.
    - read_ns: the session's share of the time in which the draft reads a token that it has not seen.
    - budget_ns: the target's time that probes of a workload or strategy may take now (`speculation`).
    - deviation_squared, deviation_explained: see `deviation_weight`.
    """

    alpha: float = 0.6
    side: float = _SIDE
    recovery: float = 0.25
    nonempty_rate: float = 1.0
    verified_rate: float = 1.0
    verified_len: float = 4.0
    token_ns: float = 0.0
    share_ns: float = 0.0
    others_ns: float = 0.0
    read_ns: float = 0.0
    tokens: int = 0
    budget_ns: float = 0.0
    deviation_squared: float = _DEVIATION
    deviation_explained: float = _DEVIATION

    @property
    def deviation_weight(self) -> float:
        """Return the weight of a session's own alpha against that of its workload, in [0, 1].

        The slope of a regression of tokens on deviations: 1 if sessions differ, 0 if deviations are chance.
        """
        return min(1.0, max(0.0, self.deviation_explained / self.deviation_squared))

    @property
    def reading_ns(self) -> float:
        """Return `read_ns`, estimated from the time to draft a token until it is measured."""
        return self.read_ns or _READING * self.share_ns

    def record_deviation(self, alpha: float, weight: float, *, right: bool) -> None:
        """Record the next token of a session that has this `alpha`. Call it before `record_token`."""
        deviation = alpha - self.alpha
        self.deviation_squared += weight * (deviation * deviation - self.deviation_squared)
        self.deviation_explained += weight * (deviation * (right - self.alpha) - self.deviation_explained)

    def record_token(self, weight: float, *, right: bool) -> None:
        self.tokens += 1
        self.alpha += max(weight, 1.0 / (self.tokens + _PRIOR_TOKENS)) * (right - self.alpha)

    def record_side(self, weight: float, *, right: bool) -> None:
        self.side += weight * (right - self.side)

    def forget_side(self, weight: float) -> None:
        """Record a wrong token that was the only candidate for its position."""
        self.side += _FORGET_SIDE * weight * (_SIDE - self.side)

    def record_recovery(self, weight: float, *, right: bool) -> None:
        self.recovery += weight * (right - self.recovery)

    def record_outcome(self, weight: float, *, nonempty: bool) -> None:
        """Record whether a proposal had any token that was not confirmed before."""
        self.nonempty_rate += weight * (nonempty - self.nonempty_rate)

    def record_time(self, received: int, unread: int, compute_ns: int, sessions: int, weight: float) -> None:
        """Record the time of `received` tokens, one or more. If more were `unread`, it measures reading."""
        share = 1.0 / max(1, sessions)
        if unread > received:
            if self.token_ns:
                reading_ns = max(0.0, compute_ns - received * self.token_ns)
                # Each token that was read has this weight: long readings measure best.
                self.read_ns = _mean(
                    self.read_ns, reading_ns * share / unread, 1.0 - (1.0 - weight) ** unread
                )
        else:
            token_ns = compute_ns / received
            self.token_ns = _mean(self.token_ns, token_ns, weight)
            self.share_ns = _mean(self.share_ns, token_ns * share, weight)
            self.others_ns += weight * (token_ns * share * (1.0 - share) - self.others_ns)

    def record_verdict(self, verified: int, weight: float) -> None:
        self.verified_rate += weight * ((verified > 0) - self.verified_rate)
        if verified:
            self.verified_len += weight * (verified - self.verified_len)


def _mean(before: float, seen: float, weight: float) -> float:
    """Return the running mean, or `seen` if it is the first value."""
    return before + weight * (seen - before) if before else seen


def _named(version: str) -> tuple[str, ...]:
    return (version,) if version else ()


class SharedStatistics:
    """Statistics that the sessions of a gateway share: drafts by workload, and the load of the target.

    `step_ns` is the time of a target step, `share_ns` a session's share of it, `row_ns` what one more draft
    token adds to the step. `confirmed_per_step` counts one session's tokens. `latency_ns` is the time from
    requesting a proposal to receiving it; `message_ns` is that time without computing. Where drafts share
    cores with the target, a nanosecond of their work takes `contention` of one from it. `first_requests`
    counts requests until a step is recorded. `takes_trees`: the last target verifies trees.
    """

    def __init__(self) -> None:
        self.step_ns = 0.0
        self.share_ns = 0.0
        self.row_ns = 0.0
        self.confirmed_per_step = 1.0
        self.latency_ns = 0.0
        self.message_ns = 0.0
        self.contention = 0.0
        self.first_requests = 0
        self.takes_trees = True
        self._drafts: LruCache[tuple[str, ...], DraftStatistics] = LruCache(DraftStatistics, _WORKLOADS)

    def for_workload(
        self, strategy: str, workload: str, lora: str = "", version: str = ""
    ) -> DraftStatistics:
        """Return the statistics of a workload, which start as a copy of its strategy's (an LRU cache).

        Those of a LoRA adapter are its own: drafts propose for the model itself. So are those of a version of
        the draft that its sessions are given.
        """
        overall = self.for_strategy(strategy, version)
        key = (strategy, workload, lora, *_named(version))
        return self._drafts.get(key, lambda: replace(overall, tokens=0, budget_ns=0.0))

    def for_strategy(self, strategy: str, version: str = "") -> DraftStatistics:
        return self._drafts.get((strategy, *_named(version)))

    def record_step(self, compute_ns: int, sessions: int, row_ns: int, confirmed: int) -> None:
        """Record a step of `sessions` sessions. One got `confirmed` tokens; a draft row adds `row_ns`."""
        self.step_ns = _mean(self.step_ns, compute_ns, _LOAD)
        self.share_ns = _mean(self.share_ns, compute_ns / sessions if sessions > 1 else compute_ns, _LOAD)
        self.row_ns = _mean(self.row_ns, row_ns, _LOAD)
        self.confirmed_per_step += _LOAD * (confirmed - self.confirmed_per_step)
        self.first_requests = 0

    def record_proposal(self, latency_ns: int, compute_ns: int) -> None:
        self.latency_ns = _mean(self.latency_ns, latency_ns, _LOAD)
        self.message_ns = _mean(self.message_ns, max(0, latency_ns - compute_ns), _LOAD)
