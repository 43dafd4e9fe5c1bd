"""What forced runs and predictions are worth, on virtual time: real machines and scheduler, given costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

import pytest

from galley.core.cost.model import StepTimes
from galley.core.lookup.prediction import PredictionLookup, prediction_calibration
from galley.core.session.sources import LocalSources
from tests.fakes.pool_world import MS, Pool, Scenario
from tests.fakes.scripted_sources import scripted_sources

Sources = Callable[[Sequence[int]], LocalSources | None]

TOKENS = 240
TIMES = StepTimes.measured(
    [
        (rows, round(ms * MS))
        for rows, ms in ((1, 17), (4, 18), (8, 21), (16, 29), (32, 46), (64, 80), (128, 150), (256, 290))
    ]
)
OFF, FAIR = 0.0, 0.6
"""The acceptance of the draft pool's tokens: of a pool that is of no use, and of a fair one."""


def scenario(sessions: int, alpha: float, sources: Sources = lambda output: None) -> Scenario:
    return Scenario(
        lambda _: alpha, TIMES, lambda n: 1_500_000 + 100_000 * n, sessions, TOKENS, sources=sources
    )


def goodput(of: Scenario, k: int = 16) -> float:
    return mean(Pool(replace(of, seed=seed), k, auto=k > 0).goodput() for seed in (1, 2))


def alternating() -> frozenset[int]:
    """Return the indices of forced runs, as names of fields are in an answer of JSON: three fifths of all."""
    chance, forced, at = random.Random(1), set[int](), 0
    while at < TOKENS:
        run = chance.randint(4, 8)
        forced |= {*range(at, at + run)}
        at += run + chance.randint(3, 6)
    return frozenset(forced)


FORCED = alternating()


def extraction(output: Sequence[int]) -> LocalSources:
    return scripted_sources(output, FORCED)


def predicting(change: Callable[[list[int], random.Random], list[int]]) -> Sources:
    """Return sources that predict the output with a change. Sessions share what they learn of predictions."""
    shared = prediction_calibration()

    def sources(output: Sequence[int]) -> LocalSources:
        predicted = change(list(output), random.Random(len(output)))
        return LocalSources(prediction=PredictionLookup(predicted, shared))

    return sources


def edited(output: list[int], chance: random.Random) -> list[int]:
    """Change a token or two in every forty, to one or more others."""
    for at in range(len(output) - 5, 0, -40):
        first = max(0, at - chance.randrange(20))
        new = [chance.randrange(1, 1 << 16) for _ in range(chance.randint(1, 3))]
        output[first : first + chance.randint(1, 2)] = new
    return output


def another_text(output: list[int], chance: random.Random) -> list[int]:
    return [chance.randrange(1, 1 << 16) for _ in output]


def another_text_of_the_same_words(output: list[int], chance: random.Random) -> list[int]:
    return [chance.choice(output) for _ in output]


@pytest.mark.parametrize(
    ("sources", "sessions", "least"),
    [
        (extraction, 1, 1.9),
        (extraction, 16, 1.2),
        (predicting(edited), 1, 3.5),
        (predicting(edited), 16, 1.25),
    ],
    ids=["forced, 1", "forced, 16", "predicted, 1", "predicted, 16"],
)
def test_what_the_session_knows_pays_without_a_draft(sources: Sources, sessions: int, least: float) -> None:
    plain = goodput(scenario(sessions, OFF), k=0)
    assert goodput(scenario(sessions, OFF, sources)) >= least * plain


def test_forced_runs_and_drafts_add_up() -> None:
    forced, drafts = goodput(scenario(1, OFF, extraction)), goodput(scenario(1, FAIR))
    assert goodput(scenario(1, FAIR, extraction)) >= 1.15 * max(forced, drafts)


@pytest.mark.parametrize("change", [another_text, another_text_of_the_same_words])
@pytest.mark.parametrize("sessions", [1, 16])
def test_a_wrong_prediction_costs_little(
    change: Callable[[list[int], random.Random], list[int]], sessions: int
) -> None:
    without = goodput(scenario(sessions, FAIR))
    assert goodput(scenario(sessions, FAIR, predicting(change))) >= 0.95 * without


def test_the_pool_is_hardly_asked_while_a_prediction_goes_on() -> None:
    pool = Pool(scenario(1, FAIR, predicting(edited)), 16, auto=True)
    pool.goodput()
    alone = Pool(scenario(1, FAIR), 16, auto=True)
    alone.goodput()
    assert len(pool.proposals_ns) <= 0.1 * len(alone.proposals_ns)
