"""Statistics of the round benchmark."""

from __future__ import annotations

import pytest

from bench import summary
from bench.arms import PEER_LOOKUP
from bench.harness import Block
from galley.bench.answers import Answer, Rounds
from galley.bench.gateway import PLAIN

PLAIN_ROUNDS = Rounds(
    rounds=40,
    orchestration_ns=(1_500_000,) * 40,
    round_ns=40 * 41_500_000,
    target_compute_ns=40 * 40_000_000,
)
NGRAM_ROUNDS = Rounds(
    rounds=20,
    drafted=60,
    verified=50,
    accepted=20,
    accepted_at=(15, 5),
    verified_at=(20, 20, 10),
    orchestration_ns=(2_000_000,) * 19 + (9_000_000,),
    round_ns=20 * 43_000_000,
    draft_compute_ns=20 * 1_000_000,
    target_compute_ns=20 * 40_000_000,
)


def block(
    pair: int, arm: str, token_ms: float, prompt_set: str = "rewrite", temperature: float = 0.0
) -> Block:
    tokens = tuple(range(40))
    kind = None if arm == PEER_LOOKUP else PLAIN_ROUNDS if arm == PLAIN else NGRAM_ROUNDS
    answered = Answer(
        prompt_id=f"{prompt_set}-{pair}",
        prompt_tokens=12,
        tokens=tokens,
        at_s=tuple(token_ms / 1e3 * (at + 1) for at in tokens),
        wall_s=token_ms / 1e3 * len(tokens),
        cpu_s=1.25 * token_ms / 1e3 * len(tokens),
        from_draft=tuple(arm != PLAIN and at % 2 == 1 for at in tokens),
        rounds=kind,
    )
    return Block(pair, arm, prompt_set, temperature, (answered,))


def run_of(ngram_token_ms: float) -> list[Block]:
    """Seven pairs on a machine that slows down, in which plain decoding starts at 40 ms a token."""
    return [
        block(pair, arm, token_ms * (1 + pair / 10), prompt_set, temperature)
        for pair in range(7)
        for prompt_set in ("chat", "rewrite")
        for temperature in (0.0, 0.7)
        for arm, token_ms in (
            (PLAIN, 40.0),
            ("ngram-4", 30.0),
            ("ngram-8", ngram_token_ms),
            (PEER_LOOKUP, 50.0),
        )
    ]


def test_speeds_are_ratios_of_pairs_and_not_of_a_slowing_machine() -> None:
    rows = {(row.prompt_set, row.temperature, row.arm): row for row in summary.speeds(run_of(16.0), PLAIN)}
    assert len(rows) == 3 * 2 * 4
    fast = rows["rewrite", 0.0, "ngram-8"]
    assert (fast.ratio.median, fast.ratio.low, fast.ratio.high) == pytest.approx((2.5, 2.5, 2.5))
    assert rows["all", 0.7, PEER_LOOKUP].ratio.median == pytest.approx(0.8)
    plain = rows["chat", 0.0, PLAIN]
    assert plain.ratio.median == 1
    assert plain.cpu_ms_per_token == pytest.approx(1.25 * 1e3 / plain.tokens_per_s)
    assert plain.same_answers == 1
    assert rows["chat", 0.7, PLAIN].same_answers is None


def test_acceptance_is_over_verified_tokens_by_position_too() -> None:
    rows = summary.acceptances(run_of(16.0))
    assert {row.arm for row in rows} == {"ngram-4", "ngram-8"}
    row = next(row for row in rows if (row.arm, row.prompt_set) == ("ngram-4", "chat"))
    assert row.rounds == 7 * 20
    assert row.accepted_per_verified == pytest.approx(20 / 50)
    assert row.mean_acceptance_length == pytest.approx(1 + 20 / 20)
    assert row.by_position == pytest.approx((0.75, 0.25, 0.0))
    assert row.draft_share == pytest.approx(0.5)


def test_orchestration_has_median_and_tail() -> None:
    rows = {row.arm: row for row in summary.orchestrations(run_of(16.0))}
    assert set(rows) == {PLAIN, "ngram-4", "ngram-8"}
    assert rows["ngram-4"].median_ms == pytest.approx(2.0)
    assert rows["ngram-4"].p99_ms == pytest.approx(9.0)
    assert (rows["ngram-4"].round_ms, rows["ngram-4"].draft_ms, rows["ngram-4"].target_ms) == (43, 1, 40)
    assert rows[PLAIN].median_ms == pytest.approx(1.5)
