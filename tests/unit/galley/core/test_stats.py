"""What plain decoding would have taken, by what is known of a round."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from galley.core.session.events import RoundEnded, Timing
from galley.core.session.stats import plain_ns

MS = 1_000_000
PLAIN = RoundEnded(
    position=9,
    started_ns=0,
    ended_ns=40 * MS,
    drafted=0,
    verified=0,
    accepted=0,
    confirmed=1,
    draft_wait_ns=0,
    exposed_draft_ns=0,
    verify_wait_ns=40 * MS,
    orchestration_ns=0,
    draft=Timing(),
    target=Timing(queue_ns=5 * MS, compute_ns=30 * MS),
    plain_ns=30 * MS,
)


def test_a_round_without_drafts_took_what_it_took() -> None:
    assert plain_ns(PLAIN) == 40 * MS


def test_what_drafts_added_is_not_plain_decodings() -> None:
    drafted = replace(
        PLAIN,
        ended_ns=60 * MS,
        confirmed=4,
        verified=4,
        accepted=3,
        exposed_draft_ns=10 * MS,
        target=Timing(queue_ns=15 * MS, compute_ns=40 * MS, linger_ns=10 * MS),
    )
    # 10 ms of waiting for the draft, and 10 ms in which the pass verified.
    assert plain_ns(drafted) == 4 * 40 * MS


def test_a_draft_that_is_wrong_makes_a_round_slower_than_plain_decoding() -> None:
    assert plain_ns(replace(PLAIN, verified=4, plain_ns=25 * MS)) == 35 * MS


def test_prompts_in_the_pass_are_read_once_however_many_tokens_it_confirms() -> None:
    beside = replace(PLAIN, confirmed=3, prefill_ns=20 * MS)
    assert plain_ns(beside) == (3 * 20 + 20) * MS


def test_a_target_that_does_not_say_is_taken_to_have_had_no_drafts_to_verify() -> None:
    assert plain_ns(replace(PLAIN, plain_ns=0)) == 40 * MS


@given(st.lists(st.integers(0, 100), min_size=7, max_size=7), st.integers(1, 20))
def test_it_is_never_more_than_a_round_for_each_token(times_ms: list[int], confirmed: int) -> None:
    round_ns, queue_ns, compute_ns, linger_ns, without_ns, prefill_ns, exposed_ns = (
        ms * MS for ms in times_ms
    )
    done = replace(
        PLAIN,
        ended_ns=round_ns,
        target=Timing(queue_ns, compute_ns, linger_ns),
        plain_ns=without_ns,
        prefill_ns=prefill_ns,
        exposed_draft_ns=exposed_ns,
        confirmed=confirmed,
    )
    assert 0 <= plain_ns(done) <= confirmed * round_ns
