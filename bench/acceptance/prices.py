"""Price proposals whose acceptance is known at every position of an answer.

Steps that start at these positions are added up. A step verifies the first n draft tokens, or those that are
likely enough to survive: of a tree, too, these are the first ones, and a tree themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

# A row of a GPU's step that is bound by bandwidth, as a share of a step of one row.
GPU_ROW = 0.004
_LEAST_SURVIVALS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True, slots=True)
class Visit:
    """A proposal at one position of an answer: the accepted nodes in order, and of all nodes two facts."""

    accepted: tuple[int, ...]
    depths: tuple[int, ...]
    survival: tuple[float, ...]


def first(count: int, visit: Visit) -> int:
    return min(count, len(visit.depths))


def likely(least: float, visit: Visit) -> int:
    """Return how many nodes survive with at least this probability."""
    return sum(chance >= least for chance in visit.survival)


@dataclass(frozen=True, slots=True)
class Best:
    """A way to choose what is verified, the mean number of draft tokens a step then, and the speed.

    The speed is in tokens for the time of a step of one row.
    """

    choice: str
    draft_tokens: float
    speed: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The times of a target's step by rows, and of a draft's step, in units of a target's step of one row."""

    step: Callable[[int], float]
    draft_step: float = 0.0

    def best(self, answers: Sequence[Sequence[Visit]], most: int) -> Best:
        """Return the fastest choice of at most `most` draft tokens a step."""
        chosen = [self.run(f"first {n}", partial(first, n), answers) for n in range(most + 1)]
        chosen += [
            self.run(f"survival >= {least:g}", partial(likely, least), answers) for least in _LEAST_SURVIVALS
        ]
        return max(chosen, key=lambda one: one.speed)

    def run(self, choice: str, count: Callable[[Visit], int], answers: Sequence[Sequence[Visit]]) -> Best:
        """Add up steps that verify the first `count(visit)` draft tokens.

        A proposal takes as many steps of the draft as it is deep.
        """
        tokens = steps = nodes = 0
        time = 0.0
        for visits in answers:
            at = 0
            while at < len(visits):
                visit, verified = visits[at], count(visits[at])
                deep = 1 + max(visit.depths[:verified], default=-1)
                time += self.step(1 + verified) + self.draft_step * deep
                nodes, steps = nodes + verified, steps + 1
                at += 1 + sum(node < verified for node in visit.accepted)
            tokens += len(visits)
        return Best(choice, round(nodes / steps, 2), round(tokens / time, 4))


GPU = Costs(lambda rows: 1 + GPU_ROW * (rows - 1))
