"""Follow a text that the caller predicts: propose what comes next in it, where the answer has got to.

While the answer agrees with the prediction, the place moves on by a token. After a difference the place is
found anew: among the nearest places of the answer's last token, the one where the most tokens before it
agree as well. An edit changes a text in a few places and keeps its order. A suffix automaton would give the
longest match, or the latest; in code, where lines repeat, the right place is usually the next one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

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


def prediction_calibration() -> Calibration:
    """Return the chances that tokens of predictions are right, for the sessions of a gateway to share."""
    return Calibration(PRIOR, STRENGTH)


def count_predicted(prediction: Sequence[int], output: Sequence[int]) -> tuple[int, int]:
    """Return how many tokens of the prediction the output has, and how many it does not have."""
    lookup = PredictionLookup(prediction, prediction_calibration())
    lookup.follow(output if prediction else ())
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
        self._places: dict[int, list[int]] = {}
        self._indexed = 0

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many tokens of the prediction the output has, and how many it does not have."""
        return self.accepted, len(self._tokens) - self.accepted

    def index(self, tokens: Sequence[int]) -> None:
        """Index the next `tokens` of the prediction, in half a µs each. A difference indexes what is left."""
        for position, token in enumerate(tokens, self._indexed):
            self._places.setdefault(token, []).append(position)
        self._indexed += len(tokens)

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
        if self._indexed < len(self._tokens):
            self.index(self._tokens[self._indexed :])
        positions = self._places.get(token, ())
        middle = bisect_left(positions, near)
        best = max(
            (
                (1 + self._agreeing(position, recent), position >= near, -abs(position - near), position + 1)
                for position in positions[max(0, middle - _NEAREST) : middle + _NEAREST]
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
