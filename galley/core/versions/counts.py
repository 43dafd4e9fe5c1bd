"""Counts of the sessions of a draft's version: sums that can be added, and the ratios that they give.

A session is the unit: its tokens are alike, so that tokens do not count as independent. Each ratio is one of
two sums over sessions, and its standard error is that of a ratio estimator by the delta method (Cochran 1977,
"Sampling Techniques", section 6.4). The sums of squares and products that this needs are kept too.

A ratio of sums is mostly that of the sessions with most of the divisor. Beside one long session, others say
next to nothing, and sessions without the divisor nothing. So what counts as the number of sessions is Kish's
effective sample size, (sum x)² / sum x²: the number of equal sessions that would say as much (Kish 1965,
"Survey Sampling", section 8.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

_MS = 1e6


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio, its standard error, and the effective number of sessions that it is of."""

    value: float
    error: float
    sessions: float

    def interval(self, z: float) -> tuple[float, float]:
        """Return the bounds at `z` standard errors; with few sessions they are wider (`widened`)."""
        if self.sessions < 2:
            return (-math.inf, math.inf)
        width = widened(z, self.sessions - 1) * self.error
        return (self.value - width, self.value + width)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """Return how much greater `one` is than `other`, which is of other sessions.

    Both count as spread as the wider of them: a few sessions may all be alike by chance.
    """
    fewer = min(one.sessions, other.sessions)
    if fewer < 2:
        return Estimate(one.value - other.value, math.inf, fewer)
    spread = max(one.error * math.sqrt(one.sessions), other.error * math.sqrt(other.sessions))
    error = spread * math.sqrt(1 / one.sessions + 1 / other.sessions)
    return Estimate(one.value - other.value, error, fewer)


def effective(total: float, total_sq: float) -> float:
    """Return the effective number of sessions whose divisors, and the squares of these, have such sums."""
    return round(total * total / total_sq, 6)


def widened(z: float, freedom: float) -> float:
    """Return the quantile of Student's t that `z` is of the normal distribution, with `freedom` >= 1.

    It is the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5) to its second term.
    """
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """Sums over the sessions of a version; `_sq` are sums of squares, and names of two are of products.

    `accepted` are draft tokens that drafts proposed, and `output_tokens` all that the sessions confirmed.
    `proposals` arrived, `failures` did not. `plain_ns` is an estimate of what plain decoding would have taken
    for the rounds of `round_ns`. Squares of times are in ms². `groups` has the sums of `GAIN_FIELDS` by group
    of principals (`split.group_of`); sessions of gateways of earlier versions are in none.
    """

    sessions: int = 0
    output_tokens: int = 0
    accepted: int = 0
    proposals: int = 0
    failures: int = 0
    round_ns: int = 0
    plain_ns: int = 0
    draft_compute_ns: int = 0
    output_sq: int = 0
    accepted_sq: int = 0
    accepted_output: int = 0
    requests_sq: int = 0
    failures_sq: int = 0
    failures_requests: int = 0
    round_sq: float = 0.0
    plain_sq: float = 0.0
    plain_round: float = 0.0
    draft_sq: float = 0.0
    draft_output: float = 0.0
    groups: Mapping[int, VersionCounts] = field(default_factory=dict, hash=False)

    def __add__(self, other: VersionCounts) -> VersionCounts:
        groups = dict(self.groups)
        for group, counts in other.groups.items():
            groups[group] = groups.get(group, VersionCounts()) + counts
        sums = {name: getattr(self, name) + getattr(other, name) for name in FIELDS}
        return VersionCounts(**sums, groups=groups)

    def of_group(self, group: int) -> VersionCounts:
        """Return these counts as those of a group of principals."""
        sums = {name: getattr(self, name) for name in GAIN_FIELDS}
        return replace(self, groups={group: VersionCounts(**sums)})

    @property
    def gain(self) -> Estimate:
        """Return the share of output tokens that drafts gave."""
        return self._ratio(
            self.accepted, self.output_tokens, self.accepted_sq, self.output_sq, self.accepted_output
        )

    @property
    def speed_up(self) -> Estimate:
        """Return the estimated time of plain decoding over the real one."""
        plain, taken = self.plain_ns / _MS, self.round_ns / _MS
        return self._ratio(plain, taken, self.plain_sq, self.round_sq, self.plain_round)

    @property
    def cost_ms(self) -> Estimate:
        """Return the computing time of drafts for each output token, in ms."""
        computed = self.draft_compute_ns / _MS
        return self._ratio(computed, self.output_tokens, self.draft_sq, self.output_sq, self.draft_output)

    @property
    def failure_rate(self) -> Estimate:
        """Return the share of requests to drafts that failed."""
        requests = self.proposals + self.failures
        return self._ratio(
            self.failures, requests, self.failures_sq, self.requests_sq, self.failures_requests
        )

    def _ratio(self, y: float, x: float, y_sq: float, x_sq: float, product: float) -> Estimate:
        """Return the ratio of the sums `y` and `x`; 0 if `x` is 0."""
        if x <= 0:
            return Estimate(0.0, 0.0, 0)
        ratio, n = y / x, effective(x, x_sq)
        if n < 2:
            return Estimate(ratio, math.inf, n)
        residual = max(0.0, y_sq - 2 * ratio * product + ratio * ratio * x_sq)
        return Estimate(ratio, math.sqrt(residual * n / (n - 1)) / x, n)


FIELDS = tuple(each.name for each in fields(VersionCounts) if each.name != "groups")
FLOATS = frozenset(each.name for each in fields(VersionCounts) if each.type == "float")
GAIN_FIELDS = ("sessions", "output_tokens", "accepted", "output_sq", "accepted_sq", "accepted_output")
"""The sums that `VersionCounts.gain` is of."""


def session_counts(
    *,
    output_tokens: int,
    accepted: int,
    proposals: int = 0,
    failures: int = 0,
    round_ns: int = 0,
    plain_ns: int = 0,
    draft_compute_ns: int = 0,
) -> VersionCounts:
    """Return the counts of one session."""
    requests = proposals + failures
    taken, plain, computed = round_ns / _MS, plain_ns / _MS, draft_compute_ns / _MS
    return VersionCounts(
        sessions=1,
        output_tokens=output_tokens,
        accepted=accepted,
        proposals=proposals,
        failures=failures,
        round_ns=round_ns,
        plain_ns=plain_ns,
        draft_compute_ns=draft_compute_ns,
        output_sq=output_tokens**2,
        accepted_sq=accepted**2,
        accepted_output=accepted * output_tokens,
        requests_sq=requests**2,
        failures_sq=failures**2,
        failures_requests=failures * requests,
        round_sq=taken**2,
        plain_sq=plain**2,
        plain_round=plain * taken,
        draft_sq=computed**2,
        draft_output=computed * output_tokens,
    )
