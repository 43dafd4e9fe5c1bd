"""Follow a text that the caller predicts: propose what comes next in it, where the answer has got to.

While the answer agrees with the prediction, the place moves on by a token. After a difference the place is
found anew: among the nearest places of the answer's last token, the one where the most tokens before it
agree as well. An edit changes a text in a few places and keeps its order. A suffix automaton would give the
longest match, or the latest; in code, where lines repeat, the right place is usually the next one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate

from galley.core.lookup.calibration import Calibration
from galley.core.values import value

# Places of a token that are compared on either side, and tokens compared at each: this bounds the work that
# a text of repetitions can cause.
_NEAREST = 16
_LONGEST = 16
# The least number of tokens that agree, by class; class 1 is a place that is only assumed, after one token
# that differs. The first class is the beginning of the prediction.
_AGREEING = (0, 1, 2, 3, 5, 9, 17)
PRIOR = (0.8, 0.5, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97)
STRENGTH = 10.0
_COUNTED_SLICE, _SUMMED_SLICE, _FOLLOWED_SLICE = 2048, 16_384, 64
"""Tokens and buckets that are indexed, and output tokens that are followed, in one step of up to 1 ms."""
_BUCKETS = 8
"""Most buckets for each token of a prediction: few tokens share one, and a short prediction has few."""


def prediction_calibration() -> Calibration:
    """Return the chances that tokens of predictions are right, for the sessions of a gateway to share."""
    return Calibration(PRIOR, STRENGTH)


def counting(prediction: Sequence[int], output: Sequence[int]) -> Generator[None, None, tuple[int, int]]:
    """Return the steps that count the tokens of the prediction that the output has, and that it lacks."""
    lookup = PredictionLookup(prediction, prediction_calibration())
    if prediction and output:
        yield from lookup.index()
        for at in range(0, len(output), _FOLLOWED_SLICE):
            lookup.follow(output[at : at + _FOLLOWED_SLICE])
            yield
    return lookup.counts


@value
class _Place:
    """A place in the prediction: its token `next` should follow, since `agreed` tokens before it do.

    `near` is where to look for the place after a difference.
    """

    next: int
    agreed: int
    near: int

    def evidence(self, further: int = 0) -> int:
        """Return the class of the place after `further` tokens that agree."""
        return bisect_right(_AGREEING, self.agreed + further) if self.next + further else 0


class PredictionLookup:
    """One session's place in its prediction. `accepted` counts its tokens that the output has had."""

    def __init__(self, tokens: Sequence[int], calibration: Calibration) -> None:
        self.accepted = 0
        self._tokens = tokens
        self._had = bytearray(len(tokens))
        self._calibration = calibration.child()
        self._place = _Place(0, 0, 0)
        self._recent: list[int] = []
        # Token t is in bucket b = t % (len(_starts) - 2), whose positions, in order, are
        # _positions[_starts[b] : _starts[b + 1]]. A dict of lists takes twenty times the memory.
        self._starts = self._positions = array("i")

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many tokens of the prediction the output has, and how many it does not have."""
        return self.accepted, len(self._tokens) - self.accepted

    def index(self) -> Iterator[None]:
        """Index the prediction; yield after each step of up to 1 ms. Without it, a difference does it all.

        The positions are sorted by bucket, by counting. Tokens have buckets of their own if these are no more
        than there may be.
        """
        buckets = max(1, min(_BUCKETS * len(self._tokens), max(self._tokens, default=0) + 1))
        # Bucket b is counted at b + 2. Then b + 1 has the start of b, which grows to its end while positions
        # are filled in.
        starts, positions = array("i", bytes(4 * (buckets + 2))), array("i", bytes(4 * len(self._tokens)))
        yield
        for tokens in self._slices():
            for token in tokens:
                starts[token % buckets + 2] += 1
            yield
        for at in range(0, len(starts), _SUMMED_SLICE):
            before = starts[at - 1] if at else 0
            sums = accumulate(starts[at : at + _SUMMED_SLICE], initial=before)
            next(sums)
            starts[at : at + _SUMMED_SLICE] = array("i", sums)
            yield
        position = 0
        for tokens in self._slices():
            for token in tokens:
                positions[starts[token % buckets + 1]] = position
                starts[token % buckets + 1] += 1
                position += 1
            yield
        self._starts, self._positions = starts, positions

    def _slices(self) -> Iterator[Sequence[int]]:
        starts = range(0, len(self._tokens), _COUNTED_SLICE)
        return (self._tokens[at : at + _COUNTED_SLICE] for at in starts)

    def follow(self, tokens: Sequence[int]) -> None:
        """Follow further tokens of the output."""
        for token in tokens:
            place = self._place
            if place.next < len(self._tokens):
                right = token == self._tokens[place.next]
                self._calibration.record(place.evidence(), right)
                if right and not self._had[place.next]:  # an output that repeats itself comes back here
                    self._had[place.next] = True
                    self.accepted += 1
            self._place = self._step(place, token, self._recent)
            self._recent = [*self._recent[1 - _LONGEST :], token]

    def find(self, ahead: Sequence[int], count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return up to `count` tokens that should follow the output and `ahead`, and their survival."""
        place, recent = self._place, list(self._recent)
        for token in ahead:
            place = self._step(place, token, recent)
            recent.append(token)
        most = min(count, len(self._tokens) - place.next)
        survival = self._calibration.survival(map(place.evidence, range(most)))
        return tuple(self._tokens[place.next : place.next + len(survival)]), tuple(survival)

    def _step(self, place: _Place, token: int, recent: Sequence[int]) -> _Place:
        """Return the place after one more `token`, which follows the `recent` ones."""
        end = len(self._tokens)
        if place.next < end and self._tokens[place.next] == token:
            return _Place(place.next + 1, place.agreed + 1, place.next + 1)
        found = self._find(token, place.near, recent)
        if found is not None:
            return found
        # One token may have been replaced by another. If more differ, nothing is known until one is found.
        is_first = place.next == place.near
        return _Place(min(end, place.near + 1) if is_first else end, 0, place.near)

    def _find(self, token: int, near: int, recent: Sequence[int]) -> _Place | None:
        if not self._starts:
            for _ in self.index():
                pass
        bucket = token % (len(self._starts) - 2)
        positions, start, end = self._positions, self._starts[bucket], self._starts[bucket + 1]
        middle = bisect_left(positions, near, start, end)
        best = max(
            (
                (1 + self._agreeing(position, recent), position >= near, -abs(position - near), position + 1)
                for position in positions[max(start, middle - _NEAREST) : min(end, middle + _NEAREST)]
                if self._tokens[position] == token
            ),
            default=None,
        )
        return None if best is None else _Place(best[-1], best[0], best[-1])

    def _agreeing(self, position: int, recent: Sequence[int]) -> int:
        """Return how many tokens before `position` are also the last of the `recent` ones."""
        most = min(position, len(recent), _LONGEST)
        for count in range(most):
            if self._tokens[position - 1 - count] != recent[-1 - count]:
                return count
        return most
