"""How sure a draft is, and how often it was right when it was so sure: chances from measured acceptance."""

from __future__ import annotations

from collections.abc import Sequence

# How many of the last verdicts of a bucket count, roughly: acceptance drifts with what is written about.
MEMORY = 256


class Calibration:
    """The chance that a guess is accepted, by bucket of confidence; the caller says what a bucket is.

    `prior[bucket]` is believed before there are verdicts, and weighs as much as `strength` of them. The n-th
    last verdict of a bucket counts (1 - 1 / MEMORY)^n. With an `overall` one, which learns from all that this
    one sees, what that says is believed in place of the prior: so that a new kind of session begins with what
    is known of the others.
    """

    __slots__ = ("_accepted", "_overall", "_prior", "_strength", "_verified")

    def __init__(
        self, buckets: int, prior: Sequence[float], strength: float, overall: Calibration | None = None
    ) -> None:
        """Raises ValueError unless there are `buckets` priors, each in [0, 1], and strength > 0."""
        if len(prior) != buckets or not all(0 <= chance <= 1 for chance in prior):
            raise ValueError(f"{buckets} priors, each in [0, 1], are wanted")
        if not strength > 0:
            raise ValueError(f"strength must be > 0, is {strength}")
        self._prior = tuple(prior)
        self._strength = strength
        self._overall = overall
        self._verified = [0.0] * buckets
        self._accepted = [0.0] * buckets

    def child(self) -> Calibration:
        """A new one for a part of what this one is for, which learns with it."""
        return Calibration(len(self._prior), self._prior, self._strength, self)

    def chance(self, bucket: int) -> float:
        """That a guess of this bucket is accepted where all before it are; in [0, 1]."""
        prior = self._prior[bucket] if self._overall is None else self._overall.chance(bucket)
        accepted = self._accepted[bucket] + self._strength * prior
        return min(1.0, accepted / (self._verified[bucket] + self._strength))

    def record(self, bucket: int, accepted: bool) -> None:
        """A guess of this bucket was verified, all before it having been accepted."""
        if self._overall is not None:
            self._overall.record(bucket, accepted)
        keep = 1.0 - 1.0 / MEMORY
        self._verified[bucket] = self._verified[bucket] * keep + 1.0
        self._accepted[bucket] = self._accepted[bucket] * keep + accepted
