"""Calibrate a draft's confidence: compare its tokens with the confirmed ones, at each level of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# Roughly how many of the last verdicts of a bucket count: acceptance drifts with the text.
MEMORY = 256
LEAST_SURVIVAL = 0.02
"""A token that is less likely to be accepted is not worth its bytes."""


class Calibration:
    """The chance that a draft token is accepted, by bucket of confidence; the caller defines the buckets.

    `prior[bucket]` weighs as much as `strength` verdicts; the n-th last verdict counts (1 - 1 / MEMORY)^n.
    `overall` learns from everything recorded here, and replaces the prior.
    """

    __slots__ = ("__weakref__", "_accepted", "_overall", "_prior", "_strength", "_verified")

    def __init__(self, prior: Sequence[float], strength: float, overall: Calibration | None = None) -> None:
        self._prior = prior
        self._strength = strength
        self._overall = overall
        self._verified = [0.0] * len(prior)
        self._accepted = [0.0] * len(prior)

    def child(self) -> Calibration:
        return Calibration(self._prior, self._strength, self)

    def chance(self, bucket: int) -> float:
        """Return the chance in [0, 1] that a token of this bucket is accepted if all before it are."""
        prior = self._prior[bucket] if self._overall is None else self._overall.chance(bucket)
        accepted = self._accepted[bucket] + self._strength * prior
        return min(1.0, accepted / (self._verified[bucket] + self._strength))

    def survival(self, buckets: Iterable[int]) -> list[float]:
        """Return for the token of each bucket the chance that it and those before it are accepted.

        End at the first token below LEAST_SURVIVAL.
        """
        chances: list[float] = []
        surviving = 1.0
        for bucket in buckets:
            surviving *= self.chance(bucket)
            if surviving < LEAST_SURVIVAL:
                break
            chances.append(surviving)
        return chances

    def record(self, bucket: int, accepted: bool) -> None:
        if self._overall is not None:
            self._overall.record(bucket, accepted)
        keep = 1.0 - 1.0 / MEMORY
        self._verified[bucket] = self._verified[bucket] * keep + 1.0
        self._accepted[bucket] = self._accepted[bucket] * keep + accepted


# Proposals kept: more than are made ahead of one verdict.
_MOST = 16


@dataclass(slots=True)
class _Proposal:
    """Tokens `ahead` from `start` on, then the `proposed` ones; the first `right` of both were right."""

    start: int
    ahead: Sequence[int]
    proposed: Sequence[int]
    record: Callable[[int, bool], None]
    right: int = 0

    def compare(self, confirmed: Sequence[int]) -> bool:
        """Record what is known now. Return True if more may follow."""
        while (position := self.start + self.right) < len(confirmed):
            of_proposed = self.right - len(self.ahead)
            if of_proposed >= len(self.proposed):
                return False
            token = self.ahead[self.right] if of_proposed < 0 else self.proposed[of_proposed]
            accepted = token == confirmed[position]
            if of_proposed >= 0:
                self.record(of_proposed, accepted)
            if not accepted:
                return False
            self.right += 1
        return True


class ProposalOutcomes:
    def __init__(self) -> None:
        self._waiting: list[_Proposal] = []

    def add(
        self, start: int, ahead: Sequence[int], proposed: Sequence[int], record: Callable[[int, bool], None]
    ) -> None:
        """Add the `proposed` tokens, which may still grow, after `start` confirmed tokens and those `ahead`.

        As tokens are confirmed, calls `record(i, accepted)` for each proposed one up to the first that is
        wrong; for none if one of those ahead was wrong.
        """
        self._waiting = [*self._waiting[1 - _MOST :], _Proposal(start, ahead, proposed, record)]

    def confirm(self, confirmed: Sequence[int]) -> None:
        self._waiting = [proposal for proposal in self._waiting if proposal.compare(confirmed)]
