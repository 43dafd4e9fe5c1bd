"""The report of a round: its parts sum to it; k, strategy and overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galley.core.session import events as ev
from galley.core.session.events import RoundEnded
from galley.core.session.machine import SessionLimits
from tests.fakes.session_world import World, spec

TIMES = st.integers(0, 10**9)


@given(st.tuples(*[TIMES] * 4), st.tuples(*[TIMES] * 3))
def test_the_parts_of_a_round_sum_to_it(
    waits: tuple[int, int, int, int], timing: tuple[int, int, int]
) -> None:
    started_ns, took_ns, draft_ns, exposed_ns = waits
    target = ev.Timing(*timing)
    done = RoundEnded(
        verdict=ev.Verified(1, 3, (7,), 0, 0, 4, "build", timing=target),
        started_ns=started_ns,
        ended_ns=started_ns + took_ns,
        drafted=0,
        accepted=0,
        confirmed=1,
        draft_wait_ns=draft_ns,
        exposed_draft_ns=exposed_ns,
        verify_wait_ns=took_ns,
        orchestration_ns=0,
        draft=ev.Timing(),
    )
    parts = done.parts
    assert min(parts.draft_ns, parts.queue_ns, parts.compute_ns, parts.wire_ns) >= 0
    assert parts.draft_ns + parts.queue_ns + parts.compute_ns + parts.wire_ns == took_ns
    assert parts.compute_ns == min(target.compute_ns, took_ns)


def world(k: int, credit: int) -> World:
    limits = SessionLimits(credit=credit)
    return World(spec(k=k, stop_token_ids=frozenset[int](), max_position=43, strategy="model"), limits)


@pytest.mark.parametrize("credit", [0, 32])
def test_a_round_reports_k_strategy_and_overlap(credit: int) -> None:
    here = world(4, credit)
    here.run_to_end()
    assert [done.verdict.position for done in here.rounds] == sorted(
        {done.verdict.position for done in here.rounds}
    )
    assert sum(done.confirmed for done in here.rounds) == 40
    first, *others = here.rounds
    assert (first.overlap, first.k) == ("miss", 4)
    drafted = [done for done in others if done.verdict.verified]
    assert drafted
    assert {done.strategy for done in drafted} == {"model"}
    assert "hit" in {done.overlap for done in drafted}


@pytest.mark.parametrize("credit", [0, 32])
def test_a_round_without_speculation(credit: int) -> None:
    here = world(0, credit)
    here.run_to_end()
    assert {(done.k, done.strategy, done.overlap) for done in here.rounds} == {(0, "none", "none")}
