"""The estimated time of plain decoding for the tokens of a round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galley.core.session.events import RoundEnded, Timing, Verified
from galley.core.session.round import SpeculationStats, plain_ns

MS = 1_000_000
PLAIN = RoundEnded(
    verdict=Verified(
        1, 9, (7,), 0, 0, 10, "build", timing=Timing(queue_ns=5 * MS, compute_ns=30 * MS), plain_ns=30 * MS
    ),
    started_ns=0,
    ended_ns=40 * MS,
    drafted=0,
    accepted=0,
    confirmed=1,
    draft_wait_ns=0,
    exposed_draft_ns=0,
    verify_wait_ns=40 * MS,
    orchestration_ns=0,
    draft=Timing(),
)


@pytest.mark.parametrize(
    ("changes", "in_verdict", "expected_ms"),
    [
        ({}, {}, 40),
        # 10 ms of waiting for the draft, and 10 ms in which the step verified.
        (
            {"ended_ns": 60 * MS, "confirmed": 4, "exposed_draft_ns": 10 * MS},
            {"timing": Timing(queue_ns=15 * MS, compute_ns=40 * MS, linger_ns=10 * MS)},
            4 * 40,
        ),
        ({}, {"verified": 4, "plain_ns": 25 * MS}, 35),  # slower than plain decoding
        ({"confirmed": 3}, {"prefill_ns": 20 * MS}, 3 * 20 + 20),  # prompt rows count once
        ({}, {"plain_ns": 0}, 40),  # the target gives no estimate
    ],
)
def test_plain_time(changes: dict[str, Any], in_verdict: dict[str, Any], expected_ms: int) -> None:
    verdict = replace(PLAIN.verdict, **in_verdict)
    assert plain_ns(replace(PLAIN, verdict=verdict, **changes)) == expected_ms * MS


@given(st.lists(st.integers(0, 100), min_size=7, max_size=7), st.integers(1, 20))
def test_plain_time_is_at_most_a_round_per_token(times_ms: list[int], confirmed: int) -> None:
    round_ns, queue_ns, compute_ns, linger_ns, without_ns, prefill_ns, exposed_ns = (
        ms * MS for ms in times_ms
    )
    done = replace(
        PLAIN,
        ended_ns=round_ns,
        verdict=replace(
            PLAIN.verdict,
            timing=Timing(queue_ns, compute_ns, linger_ns),
            plain_ns=without_ns,
            prefill_ns=prefill_ns,
        ),
        exposed_draft_ns=exposed_ns,
        confirmed=confirmed,
    )
    assert 0 <= plain_ns(done) <= confirmed * round_ns


def test_what_a_long_stream_keeps_of_its_rounds_is_bounded() -> None:
    stats = SpeculationStats()
    for index in range(3000):
        stats.add(replace(PLAIN, orchestration_ns=index))
    assert stats.rounds == 3000
    assert list(stats.orchestration_ns) == list(range(3000 - 1024, 3000))
