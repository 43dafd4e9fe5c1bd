"""Price proposals whose acceptance is known at every position of an answer.

Steps that start at these positions are added up for any number of draft tokens: the first n nodes of a tree
are the best tree of n nodes, and the first n tokens of a chain the chain of n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A row of a GPU's step that is bound by bandwidth, as a share of a step of one row.
GPU_ROW = 0.004


@dataclass(frozen=True, slots=True)
class Visit:
    """A proposal at one position of an answer: the accepted nodes in order, and the depths of all nodes."""

    accepted: tuple[int, ...]
    depths: tuple[int, ...]


def tokens_per_time(
    answers: Sequence[Sequence[Visit]], nodes: int, step: Callable[[int], float], draft_step: float
) -> float:
    """Return the tokens per time of steps that verify the first `nodes` draft tokens of each visit.

    `step(rows)` is the time of a step, `draft_step` that of a step of the draft, of which a proposal takes as
    many as it is deep.
    """
    tokens, time = 0, 0.0
    for visits in answers:
        at = 0
        while at < len(visits):
            depth = max(visits[at].depths[:nodes], default=-1)
            time += step(1 + len(visits[at].depths[:nodes])) + draft_step * (depth + 1)
            at += 1 + sum(node < nodes for node in visits[at].accepted)
        tokens += len(visits)
    return tokens / time


@dataclass(frozen=True, slots=True)
class Best:
    """The number of draft tokens that is best for a form of proposals, and the tokens a step's time then."""

    draft_tokens: int
    tokens_per_step_time: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The times of a target's step by rows, and of a draft's step, in units of a target's step of one row."""

    step: Callable[[int], float]
    draft_step: float

    def best(self, answers: Sequence[Sequence[Visit]], most: int) -> Best:
        speeds = {n: tokens_per_time(answers, n, self.step, self.draft_step) for n in range(most + 1)}
        best = max(speeds, key=lambda n: speeds[n])
        return Best(best, round(speeds[best], 4))


GPU = Costs(lambda rows: 1 + GPU_ROW * (rows - 1), 0.0)
