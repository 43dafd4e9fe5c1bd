"""Calibrate a draft's confidence: the measured acceptance of tokens at each level of it."""

from __future__ import annotations

from collections.abc import Sequence

# Roughly how many of the last verdicts of a bucket count: acceptance drifts with the text.
MEMORY = 256


class Calibration:
    """The chance that a draft token is accepted, by bucket of confidence; the caller defines the buckets.

    `prior[bucket]` weighs as much as `strength` verdicts; the n-th last verdict counts (1 - 1 / MEMORY)^n.
    `overall` learns from everything recorded here, and replaces the prior.
    """

    __slots__ = ("_accepted", "_overall", "_prior", "_strength", "_verified")

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

    def record(self, bucket: int, accepted: bool) -> None:
        if self._overall is not None:
            self._overall.record(bucket, accepted)
        keep = 1.0 - 1.0 / MEMORY
        self._verified[bucket] = self._verified[bucket] * keep + 1.0
        self._accepted[bucket] = self._accepted[bucket] * keep + accepted
