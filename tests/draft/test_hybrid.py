"""Which of its two the hybrid takes, by what they have been worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.core.errors import Broken
from services.draft.strategies.base import DraftSession, Guess
from services.draft.strategies.hybrid import HybridStrategy
from services.draft.strategies.ngram import NgramStrategy
from tests.draft.jobs import job_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.draft.strategies.base import DraftJob

NEW = 1000


class Stepwise:
    """A model that guesses the token above the last one, one a step."""

    def __init__(self) -> None:
        self.steps = 0

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        return [Guess(job, done=job.k == 0) for job in jobs]

    def advance(self, guesses: Sequence[Guess]) -> None:
        self.steps += 1
        for guess in guesses:
            guess.tokens.append((guess.tokens or guess.job.session.tokens)[-1] + 1)
            guess.survival.append(0.5 ** len(guess.tokens))
            guess.done = len(guess.tokens) == guess.job.k


def run(strategy: HybridStrategy, *jobs: DraftJob) -> list[Guess]:
    guesses = strategy.begin(jobs)
    while going := [guess for guess in guesses if not guess.done]:
        strategy.advance(going)
    return guesses


def ask(strategy: HybridStrategy, session: DraftSession, tokens: list[int], ahead: int = 0) -> Guess:
    (guess,) = run(strategy, job_of(session, tokens, 4, ahead=ahead))
    return guess


def hybrid() -> tuple[HybridStrategy, Stepwise]:
    model = Stepwise()
    return HybridStrategy(NgramStrategy(), model), model


def taught(*, right: bool) -> tuple[HybridStrategy, Stepwise]:
    """A hybrid whose model was always right of late, or always wrong."""
    strategy, model = hybrid()
    session, tokens = DraftSession(), [NEW]
    for _ in range(60):
        ask(strategy, session, tokens)
        tokens.append(tokens[-1] + (1 if right else 2))
    model.steps = 0
    return strategy, model


def test_the_lookup_stands_where_its_match_is_long() -> None:
    strategy, model = hybrid()
    guess = ask(strategy, DraftSession(), [*range(30), *range(20)])
    assert guess.tokens == [20, 21, 22, 23]
    assert guess.done
    assert model.steps == 0
    assert guess.survival[0] > 0.8


def test_the_model_drafts_where_there_is_no_match_or_a_short_one() -> None:
    strategy, model = hybrid()
    assert ask(strategy, DraftSession(), [1, 2, 3]).tokens == [4, 5, 6, 7]
    assert ask(strategy, DraftSession(), [3, 9, 8, 7, 3]).tokens == [4, 5, 6, 7]
    assert model.steps == 8


def test_a_lookup_that_still_follows_a_long_prompt_is_not_waited_for() -> None:
    strategy, model = hybrid()
    session, tokens = DraftSession(), [*range(1500), *range(20)]
    assert ask(strategy, session, tokens).tokens == [20, 21, 22, 23]
    assert model.steps == 4
    assert ask(strategy, session, [*tokens, 20]).tokens == [21, 22, 23, 24]
    assert model.steps == 4


def test_it_is_decided_for_each_job_of_a_step() -> None:
    strategy, model = hybrid()
    jobs = [
        job_of(DraftSession(), tokens, 4, prompt_len=len(tokens))
        for tokens in ([1, 2, 3], [*range(30), *range(20)], [51], [*range(100, 130), *range(100, 110)])
    ]
    assert [guess.tokens[0] for guess in run(strategy, *jobs)] == [4, 20, 52, 110]
    assert model.steps == 4


def test_a_model_that_is_wrong_of_late_loses_to_short_matches() -> None:
    strategy, model = taught(right=False)
    assert ask(strategy, DraftSession(), [3, 9, 8, 7, 3]).tokens == [9, 8, 7, 3]
    assert model.steps == 0


def test_a_model_that_is_right_of_late_wins_over_all_but_the_longest() -> None:
    strategy, model = taught(right=True)
    assert ask(strategy, DraftSession(), [*range(10), 99, *range(8)]).tokens == [8, 9, 10, 11]
    assert model.steps == 4


def test_nothing_is_learnt_of_drafts_after_a_wrong_guess() -> None:
    strategy, model = hybrid()
    for _ in range(60):
        session = DraftSession()
        ask(strategy, session, [NEW, NEW + 5], ahead=1)
        ask(strategy, session, [NEW, NEW + 1, NEW + 2, NEW + 3])
    model.steps = 0
    ask(strategy, DraftSession(), [3, 9, 8, 7, 3])
    assert model.steps == 4


@pytest.mark.parametrize(("salt", "workload", "steps"), [(b"other", "", 4), (b"", "chat", 0)])
def test_tenants_are_told_apart_and_a_new_workload_begins_as_its_tenants_others(
    salt: bytes, workload: str, steps: int
) -> None:
    strategy, model = taught(right=False)
    model.steps = 0
    run(strategy, job_of(DraftSession(), [3, 9, 8, 7, 3], 4, salt=salt, workload=workload))
    assert model.steps == steps


def test_the_models_error_is_the_outcome_of_its_own_job() -> None:
    class Sick(Stepwise):
        def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
            return [Guess(job, done=True, error=Broken("sick")) for job in jobs]

    strategy = HybridStrategy(NgramStrategy(), Sick())
    jobs = [job_of(DraftSession(), tokens, 4) for tokens in ([1, 2, 3], [*range(30), *range(20)])]
    sick, well = strategy.begin(jobs)
    assert isinstance(sick.error, Broken)
    assert (well.error, well.tokens) == (None, [20, 21, 22, 23])
