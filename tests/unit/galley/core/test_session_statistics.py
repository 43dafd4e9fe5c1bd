"""What a session records of its drafts for the sessions after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galley.core.answer.answer import Answer
from galley.core.content import prefix_hash
from galley.core.names import LOOKUP
from galley.core.session import events as ev
from galley.core.session.draft_statistics import DraftStatistics, SharedStatistics
from galley.core.session.machine import Session, SessionLimits
from tests.fakes.session_world import MS, spec
from tests.fakes.truth import letters, true_id, true_output

SPEC = spec(k=4, stop_token_ids=frozenset[int]())
TRUE = (*SPEC.prompt, *true_output(SPEC.prompt, 20, stops=frozenset(), next_token=true_id))


class Driven:
    """A session with credit whose replicas are the test."""

    def __init__(self) -> None:
        self.shared = SharedStatistics()
        self.session = Session(Answer(SPEC, letters), SessionLimits(credit=32), shared=self.shared)
        self.propose, self.verify = self.started(self.session.start(0))

    @staticmethod
    def started(effects: list[ev.Effect]) -> tuple[ev.Propose, ev.Verify]:
        propose, verify = effects
        assert isinstance(propose, ev.Propose)
        assert isinstance(verify, ev.Verify)
        return propose, verify

    @property
    def workload(self) -> DraftStatistics:
        return self.shared.for_workload(SPEC.strategy, SPEC.workload)

    def hint(self, now: int, *tokens: int) -> list[ev.Effect]:
        position = len(self.session.answer.tokens)
        anchor = prefix_hash(self.session.answer.tokens)
        proposed = ev.Proposed(self.propose.request_id, position, anchor, tokens, cache_len=position)
        return self.session.step(proposed, now=now)

    def verdict(self, now: int, *, verified: int, compute_ns: int) -> list[ev.Effect]:
        at = len(self.session.answer.tokens)
        verdict = ev.Verified(
            self.verify.request_id, at, TRUE[at : at + verified + 1], verified, verified, at, "build",
            more=True, timing=ev.Timing(0, compute_ns),
        )  # fmt: skip
        return self.session.step(verdict, now=now)


@pytest.mark.parametrize(
    ("compute_ms", "verified", "rate"),
    [
        (1, 0, 0.99),  # the target had the hint and verified nothing of it
        (1, 2, 1.0),
        (9, 0, 1.0),  # the hint came during the step, after its beginning
    ],
)
def test_a_hint_that_is_not_verified_counts_if_it_came_in_time(
    compute_ms: int, verified: int, rate: float
) -> None:
    here = Driven()
    here.hint(2 * MS, *TRUE[3:7])
    here.shared.message_ns = 0.0
    here.verdict(10 * MS, verified=verified, compute_ns=compute_ms * MS)
    assert here.workload.verified_rate == pytest.approx(rate)


def test_the_probe_of_a_session_that_ends_costs_what_the_draft_may_have_worked() -> None:
    shared, here = SharedStatistics(), spec(k=4, auto=True, width=1)
    workload, overall = shared.for_workload(here.strategy, here.workload), shared.for_strategy(here.strategy)
    shared.share_ns, shared.row_ns = 10.0 * MS, 5.0 * MS
    workload.alpha, workload.share_ns, workload.budget_ns = 0.1, 100.0 * MS, 1_000.0 * MS
    session = Session(Answer(here, letters), SessionLimits(credit=32), shared=shared)
    Driven.started(session.start(0))
    session.step(ev.Aborted(), now=10 * MS)
    # A message, and what counts of 10 ms, in place of 400.
    assert workload.budget_ns + overall.budget_ns == pytest.approx((1_000 - 0.4 - 5.25) * MS)


@pytest.mark.parametrize(("tokens", "rate"), [(3, 0.99), (4, 1.0)])
def test_a_proposal_of_which_all_tokens_are_confirmed_counts_as_empty(tokens: int, rate: float) -> None:
    here = Driven()
    for _ in range(3):
        here.verdict(10 * MS, verified=0, compute_ns=MS)
    at, anchor = len(SPEC.prompt), prefix_hash(SPEC.prompt)
    late = ev.Proposed(here.propose.request_id, at, anchor, TRUE[at : at + tokens], cache_len=at)
    here.session.step(late, now=20 * MS)
    assert here.workload.nonempty_rate == pytest.approx(rate)


def test_a_verdict_without_any_hint_says_nothing_of_hints() -> None:
    here = Driven()
    here.verdict(10 * MS, verified=0, compute_ns=MS)
    assert here.workload.verified_rate == 1.0


@pytest.mark.parametrize(
    ("strategy", "used", "counts"),
    [("model", False, (1, 0)), ("model", True, (1, 1)), (LOOKUP, False, (0, 0))],
)
def test_proposals_of_drafts_count_and_those_with_the_targets_states(
    strategy: str, used: bool, counts: tuple[int, int]
) -> None:
    driven = Driven()
    at, anchor = len(SPEC.prompt), prefix_hash(SPEC.prompt)
    proposed = ev.Proposed(
        driven.propose.request_id, at, anchor, TRUE[at : at + 2], at, strategy=strategy, used_features=used
    )
    driven.session.step(proposed, now=MS)
    stats = driven.session.stats
    assert (stats.proposals, stats.proposals_with_features) == counts


@pytest.mark.parametrize("credit", [0, 32])
@pytest.mark.parametrize("again", [ev.CacheMissed(0, 0, b""), ev.Failed(0, "", elsewhere=True)])
def test_draft_tokens_that_are_sent_again_count_once(credit: int, again: ev.CacheMissed | ev.Failed) -> None:
    session = Session(Answer(SPEC, letters), SessionLimits(credit=credit))
    at, drafted = len(SPEC.prompt), 0
    effects = session.start(0)
    for right in (2, 3):
        tokens = (*TRUE[at : at + right], TRUE[at + right] ^ 1, *TRUE[at + right + 1 : at + 4])
        propose = next(effect for effect in effects if isinstance(effect, ev.Propose))
        anchor = prefix_hash(session.answer.tokens)
        effects += session.step(ev.Proposed(propose.request_id, at, anchor, tokens, at), now=MS)
        opened = next(effect for effect in effects if isinstance(effect, ev.Verify))
        effects = session.step(replace(again, request_id=opened.request_id), now=2 * MS)
        verify = next(effect for effect in effects if isinstance(effect, ev.Verify))
        assert verify.draft_tokens == tokens
        confirmed = TRUE[at : at + right + 1]
        verdict = ev.Verified(verify.request_id, at, confirmed, right, 4, at, "build")
        effects = session.step(verdict, now=3 * MS)
        at, drafted = at + right + 1, drafted + 4
        assert session.stats.drafted == drafted
