"""What a round reports of its times, and the sums over rounds."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from galley.core.session.events import RoundEnded, SourceTokens, Timing, Verified
from galley.core.session.round import Round, SpeculationStats, VerifiedNodes
from galley.core.trees import follow

VERDICT = Verified(1, 9, (7, 8, 9), 2, 4, 10, "build", timing=Timing(50, 300, 20), kv_reused=6)


def finished(*, with_credit: bool, now: int = 1000) -> RoundEnded:
    here = Round(100, with_credit=with_credit)
    here.record_proposal(Timing(10, 100), 250)
    here.record_proposal(Timing(5, 50), 350)
    here.exposed_ns = 250
    here.verify_ns = 400
    here.drafted = 4
    return here.finish(VERDICT, 2, now, k=4, strategy="model", reads_prompt=True)


@pytest.mark.parametrize(
    ("with_credit", "exposed_ns", "orchestration_ns"),
    [(False, 250, 900 - 150 - 300), (True, 20, 600 - 50 - 300)],
)
def test_a_round_accounts_for_its_time(with_credit: bool, exposed_ns: int, orchestration_ns: int) -> None:
    assert finished(with_credit=with_credit) == RoundEnded(
        verdict=VERDICT,
        started_ns=100,
        ended_ns=1000,
        drafted=4,
        accepted=2,
        confirmed=2,
        draft_wait_ns=250,
        verify_wait_ns=600,
        exposed_draft_ns=exposed_ns,
        orchestration_ns=orchestration_ns,
        draft=Timing(15, 150),
        k=4,
        strategy="model",
        reads_prompt=True,
    )
    assert finished(with_credit=with_credit, now=410).orchestration_ns == 0, "the replicas' times overlap"


def test_a_round_without_proposal() -> None:
    here = Round(100, with_credit=True)
    verdict = replace(VERDICT, tokens=(7,), accepted=0, verified=0)
    done = here.finish(verdict, 1, 600, k=4, strategy="model", reads_prompt=False)
    assert (done.draft_wait_ns, done.drafted, done.draft, done.strategy) == (0, 0, Timing(), "none")
    assert (done.verify_wait_ns, done.exposed_draft_ns) == (500, 20)
    assert replace(done, exposed_draft_ns=0).parts.draft_ns == 0
    assert Round(100, with_credit=False).finish(
        verdict, 1, 600, k=0, strategy="", reads_prompt=False
    ).exposed_draft_ns == 0  # fmt: skip


def test_the_parts_of_a_round() -> None:
    parts = finished(with_credit=False).parts
    assert (parts.compute_ns, parts.draft_ns, parts.queue_ns) == (300, 250, 30)
    assert parts.wire_ns == 900 - 300 - 250 - 30


def test_sums_over_rounds() -> None:
    stats = SpeculationStats()
    assert (stats.proposed, stats.cancelled) == (0, 0)
    stats.add(finished(with_credit=False))
    later = replace(VERDICT, accepted=1, verified=1, tokens=(7, 8), kv_reused=99)
    stats.add(replace(finished(with_credit=True), verdict=later, accepted=1))
    assert stats == SpeculationStats(
        rounds=2,
        drafted=8,
        verified=5,
        accepted=3,
        round_ns=1800,
        draft_ns=500,
        verify_ns=1200,
        draft_compute_ns=300,
        verify_compute_ns=600,
        orchestration_ns=deque([450, 250]),
        accepted_at=[2, 1],
        verified_at=[2, 1, 1, 1],
        proposed=0,
        cancelled=0,
        exposed_draft_ns=270,
        cached_tokens=6,
        accepted_by_rank=[3],
        verified_by_rank=[5],
    )


def test_sums_over_rounds_with_trees() -> None:
    # 7 and 5 are candidates for the first position, 8 and 6 follow 7.
    tokens, parents = (7, 5, 8, 6), (-1, -1, 0, 0)
    verdict = replace(VERDICT, tokens=(7, 6, 9), accepted=2, verified=len(tokens))
    sources = ("model", "model", "model", "ngram")
    nodes = VerifiedNodes(sources, parents, follow(tokens, parents, verdict.tokens))
    stats = SpeculationStats()
    for confirmed in (3, 1):  # the answer ended after one token of the second round
        done = Round(100, with_credit=False).finish(
            verdict, confirmed, 1000, nodes=nodes, k=4, strategy="model", reads_prompt=False
        )
        stats.add(done)
        assert done.depth == 2
    assert (stats.verified, stats.accepted) == (8, 3)
    assert (stats.verified_at, stats.accepted_at) == ([2, 2], [2, 1])
    assert (stats.verified_by_rank, stats.accepted_by_rank) == ([4, 4], [2, 1])
    assert stats.sources == {
        "model": SourceTokens("model", 0, 6, 2),
        "ngram": SourceTokens("ngram", 0, 2, 1),
    }
