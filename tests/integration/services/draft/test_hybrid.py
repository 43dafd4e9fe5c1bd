"""Token by token, whom the hybrid believes: by what both have been worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from galley.core.errors import Broken
from galley.core.lookup.lookup import AnswerPart
from galley.core.names import MODEL, NGRAM, SHARED
from services.draft.answers.mailbox import SharedAnswers
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.draft.strategies.hybrid import HybridStrategy
from services.draft.strategies.model import CONFIDENCES, Drawn, ModelProposal, ModelSteps
from services.draft.strategies.ngram import Lookups
from tests.fakes.tiny_model import load_tiny_model
from tests.integration.services.draft.jobs import job_of

NEW = 1000
HALF = CONFIDENCES.index(0.55)


class Counting(ModelSteps):
    def __init__(self, tiny: Path) -> None:
        super().__init__(load_tiny_model(tiny, kv_blocks=64))
        self.steps = 0
        self.reach = 64

    def open(self, job: DraftJob) -> ModelProposal:
        proposal = super().open(job)
        proposal.limit = proposal.reach = min(job.k, self.reach)
        return proposal

    def advance(self, proposals: Sequence[ModelProposal]) -> list[Drawn]:
        self.steps += 1
        return [
            Drawn(proposal, (proposal.tokens or proposal.job.session.tokens)[-1] + 1, HALF)
            for proposal in proposals
        ]


@pytest.fixture
def model(tiny: Path) -> Counting:
    return Counting(tiny)


@pytest.fixture
def hybrid(model: Counting) -> HybridStrategy:
    return HybridStrategy(Lookups(), model)


def run(strategy: HybridStrategy, *jobs: DraftJob) -> list[Proposal]:
    proposals = strategy.begin(jobs)
    while going := [proposal for proposal in proposals if not proposal.done]:
        strategy.advance(going)
    return proposals


def ask(
    strategy: HybridStrategy, session: DraftSession, tokens: list[int], ahead: int = 0, **given: object
) -> Proposal:
    (proposal,) = run(strategy, job_of(session, tokens, 4, ahead=ahead, **given))  # type: ignore[arg-type]  # as given
    return proposal


def teach(strategy: HybridStrategy, above: int, salt: bytes = b"") -> None:
    session, tokens = DraftSession(), [NEW]
    for _ in range(120):
        ask(strategy, session, tokens, salt=salt)
        tokens.append(tokens[-1] + above)


def test_long_match_needs_no_model_step(hybrid: HybridStrategy, model: Counting) -> None:
    proposal = ask(hybrid, DraftSession(), [*range(30), *range(20)])
    assert proposal.tokens == [20, 21, 22, 23]
    assert proposal.done
    assert model.steps == 0
    assert proposal.survival[0] > 0.8


def test_the_model_drafts_where_there_is_no_match_or_a_short_one(
    hybrid: HybridStrategy, model: Counting
) -> None:
    assert ask(hybrid, DraftSession(), [1, 2, 3]).tokens == [4, 5, 6, 7]
    assert ask(hybrid, DraftSession(), [3, 9, 8, 7, 3]).tokens == [4, 5, 6, 7]
    assert model.steps == 8


def test_each_token_names_what_drafted_it(model: Counting) -> None:
    shared = SharedAnswers()
    strategy = HybridStrategy(Lookups(shared), model)
    assert ask(strategy, DraftSession(), [*range(30), *range(20)]).sources == [NGRAM] * 4
    assert ask(strategy, DraftSession(), [1, 2, 3]).sources == [MODEL] * 4
    # Two more tokens came from another replica; then the answer there ended.
    [kind] = shared.take()
    shared.deliver(kind, [AnswerPart(b"session1", 0, range(NEW, NEW + 20))])
    shared.work()
    proposal = ask(strategy, DraftSession(), [1, *range(NEW, NEW + 18)])
    assert proposal.tokens == [*range(NEW + 18, NEW + 22)]
    assert proposal.sources == [SHARED, SHARED, MODEL, MODEL]


def test_agreed_token_has_higher_survival(hybrid: HybridStrategy) -> None:
    both = ask(hybrid, DraftSession(), [50, 51, 52, 7, 50, 51], salt=b"a")
    alone = ask(hybrid, DraftSession(), [50, 51], salt=b"b")
    against = ask(hybrid, DraftSession(), [51, 80, 7, 51], salt=b"c")
    assert both.tokens[0] == alone.tokens[0] == against.tokens[0] == 52
    assert both.survival[0] > alone.survival[0] >= against.survival[0]


def test_a_lookup_that_still_follows_a_long_prompt_is_not_waited_for(
    hybrid: HybridStrategy, model: Counting
) -> None:
    session, tokens = DraftSession(), [*range(1500), *range(20)]
    assert ask(hybrid, session, tokens).tokens == [20, 21, 22, 23]
    assert model.steps == 4
    assert ask(hybrid, session, [*tokens, 20, 21, 22, 23, 24]).tokens == [25, 26, 27, 28]
    assert model.steps == 4


def test_it_is_decided_for_each_job_of_a_step(hybrid: HybridStrategy, model: Counting) -> None:
    jobs = [
        job_of(DraftSession(), tokens, 4, prompt_len=len(tokens))
        for tokens in ([1, 2, 3], [*range(30), *range(20)], [51], [*range(100, 130), *range(100, 120)])
    ]
    assert [proposal.tokens[0] for proposal in run(hybrid, *jobs)] == [4, 20, 52, 120]
    assert model.steps == 4


def test_a_model_that_is_wrong_of_late_loses_to_short_matches(hybrid: HybridStrategy) -> None:
    assert ask(hybrid, DraftSession(), [3, 9, 8, 7, 3]).tokens[0] == 4
    session, tokens = DraftSession(), [3, 9]
    for i in range(60):
        tokens += [NEW + 13 * i, 3]
        ask(hybrid, session, tokens)
        tokens.append(9)
    assert ask(hybrid, DraftSession(), [3, 9, 8, 7, 3]).tokens[0] == 9


def test_beyond_the_models_window_there_is_still_the_lookup(hybrid: HybridStrategy, model: Counting) -> None:
    model.reach = 0
    assert ask(hybrid, DraftSession(), [*range(30), *range(20)]).tokens == [20, 21, 22, 23]
    assert ask(hybrid, DraftSession(), [1, 2, 3]).tokens == []
    assert model.steps == 0


def test_nothing_is_learnt_of_drafts_after_a_wrong_guess(hybrid: HybridStrategy) -> None:
    before = ask(hybrid, DraftSession(), [1, 2, 3]).survival
    for _ in range(60):
        session = DraftSession()
        ask(hybrid, session, [NEW, NEW + 5], ahead=1)
        ask(hybrid, session, [NEW, NEW + 1, NEW + 2, NEW + 3])
    assert ask(hybrid, DraftSession(), [1, 2, 3]).survival == pytest.approx(before, rel=0.25)


@pytest.mark.parametrize(("salt", "workload", "same"), [(b"other", "", False), (b"", "chat", True)])
def test_new_workload_inherits_acceptance_of_its_tenant(
    hybrid: HybridStrategy, salt: bytes, workload: str, same: bool
) -> None:
    new = ask(hybrid, DraftSession(), [1, 2, 3], salt=b"third").survival[0]
    teach(hybrid, 2)
    taught = ask(hybrid, DraftSession(), [1, 2, 3]).survival[0]
    request = ask(hybrid, DraftSession(), [1, 2, 3], salt=salt, workload=workload).survival[0]
    assert taught < new / 2
    assert (request < new / 2) == same
    assert same or request == new


def test_known_draft_tokens_need_no_step(hybrid: HybridStrategy, model: Counting) -> None:
    session = DraftSession()
    whole = ask(hybrid, session, [1, 2, 3]).tokens
    model.steps = 0
    assert ask(hybrid, session, [1, 2, 3, *whole[:2]]).tokens[:2] == whole[2:]
    assert model.steps == 2


def test_drafts_that_can_hardly_survive_are_not_drafted(hybrid: HybridStrategy, model: Counting) -> None:
    teach(hybrid, 2)
    model.steps = 0
    proposal = ask(hybrid, DraftSession(), [1, 2, 3])
    assert len(proposal.tokens) == model.steps < 4
    assert proposal.done


def test_the_models_error_is_the_outcome_of_its_own_job(tiny: Path) -> None:
    class Sick(Counting):
        def advance(self, proposals: Sequence[ModelProposal]) -> list[Drawn]:
            for proposal in proposals:
                proposal.done, proposal.error = True, Broken("sick")
            return []

    strategy = HybridStrategy(Lookups(), Sick(tiny))
    jobs = [job_of(DraftSession(), tokens, 4) for tokens in ([1, 2, 3], [*range(30), *range(20)])]
    sick, well = run(strategy, *jobs)
    assert isinstance(sick.error, Broken)
    assert (well.error, well.tokens) == (None, [20, 21, 22, 23])
