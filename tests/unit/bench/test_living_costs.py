"""Tests of how the costs of audits, canaries and swaps are computed from what was measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.living.costs.__main__ import main
from bench.living.costs.audits import OFF, ON, AuditCosts, Share
from bench.living.costs.blocks import Figures, compare, differing, load_of, new_prompts, next_prompts
from bench.living.costs.canary import DRAINED, HALF, NONE, SMALL, CanaryCosts
from bench.living.costs.swap import Run, Stream, SwapCosts, compared
from galley.bench.answers import Answer
from galley.bench.closed_loop import LoopBlock


def figures(pair: int, arm: str, speed: float, cpu_ms: float = 1.0, temperature: float = 0.0) -> Figures:
    return Figures(pair, arm, temperature, 100, speed, cpu_ms, {"target": 0.1}, (10.0, 20.0, 30.0))


def test_a_run_of_a_part_leaves_the_record_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "living-costs.json"
    record.write_text('{"took_s": 1, "audit": {}, "swap": {}}')
    monkeypatch.setattr(sys, "argv", ["costs", "--parts", "audit,canary", "--result", str(record)])
    with pytest.raises(SystemExit):
        main()
    assert f"--result: {record} has swap, which --parts audit,canary would remove" in capsys.readouterr().err
    assert record.read_text() == '{"took_s": 1, "audit": {}, "swap": {}}'


def test_an_arm_is_compared_with_its_base_of_the_same_pair_and_temperature() -> None:
    measured = [
        figures(0, ON, 99.0, 1.01),
        figures(0, OFF, 100.0, 1.0),
        figures(1, OFF, 200.0, 2.0),
        figures(1, ON, 196.0, 2.0),
        figures(1, OFF, 50.0, temperature=0.7),
        figures(1, ON, 50.0, temperature=0.7),
        figures(2, OFF, 1.0),
    ]
    found = compare(measured, ON, OFF)
    assert found.speed.median == pytest.approx(0.99)
    assert found.speed.count == 3
    assert found.speed.low == pytest.approx(0.98)
    assert found.cpu.high == pytest.approx(1.01)
    assert found.first_token.median == 1.0


def test_prompts_of_two_blocks_or_names_are_never_the_same() -> None:
    prompts = new_prompts("load")
    texts = [prompt.text for _ in range(8) for prompt in next_prompts(prompts, 32)]
    texts += [prompt.text for prompt in next_prompts(new_prompts("met"), 32)]
    assert len(set(texts)) == 9 * 32


def test_answers_differ_from_those_of_the_same_prompts_alone() -> None:
    prompts = new_prompts("load")

    def block(arm: str, *answers: int) -> LoopBlock:
        load = load_of(0, arm, 0.0, chosen, 8)
        return LoopBlock(load, tuple(Answer((token,), (0.1,), 0.1) for token in answers), 1.0, 1.0)

    chosen = next_prompts(prompts, 2)
    blocks = [block(OFF, 1, 2), block(ON, 1, 3)]
    chosen = next_prompts(prompts, 2)
    blocks += [block(ON, 4, 4), block(OFF, 4, 4)]
    assert differing(blocks) == 1


def audit_costs(speed: float, share: float) -> AuditCosts:
    load = [
        figures(pair, arm, 100.0 * (speed if arm == ON else 1.0), temperature=temperature)
        for pair in range(7)
        for temperature in (0.0, 0.7)
        for arm in (ON, OFF)
    ]
    pauses = [one for one in load if not one.temperature]
    shares = [Share(share * 6.0, 6.0), Share(share * 9.0, 9.0)]
    return AuditCosts(load, pauses, pauses, shares, {"load": (1, 10)}, 0)


def test_audits_meet_their_goals_at_one_per_cent_and_not_above() -> None:
    assert all(goal.met for goal in audit_costs(0.99, 0.01).goals())
    missed = [goal.what for goal in audit_costs(0.98, 0.0101).goals() if not goal.met]
    assert missed == [
        "tokens/s, load, T = 0",
        "tokens/s, load, T = 0.7",
        "tokens/s, pauses",
        "share of the target's time, pauses",
    ]


def test_a_canary_is_compared_with_the_same_division_of_sessions() -> None:
    speeds = {HALF: 99.5, NONE: 100.0, SMALL: 79.0, DRAINED: 80.0}
    measured = [figures(pair, arm, speed) for pair in range(7) for arm, speed in speeds.items()]
    costs = CanaryCosts(measured, {}, 0)
    assert costs.compared()[SMALL].base == DRAINED
    assert [goal.met for goal in costs.goals()] == [True, True, False, True]
    assert "0.9875 [0.9875, 0.9875]x" in str(costs.goals()[2])


def stream(*at_s: float, missed: int = 1) -> Stream:
    return Stream(at_s, tuple(range(len(at_s))), rounds=len(at_s), missed=missed)


def test_a_swap_is_compared_with_the_same_streams_without_it() -> None:
    calm = Run([stream(*(n / 10 for n in range(20)))] * 2, began_s=0.35, load_s=0.5)
    late = stream(*(n / 10 + 0.25 * (n > 6) for n in range(20)), missed=2)
    found = compared(replace(calm, streams=[late, calm.streams[1]]), calm)
    assert found is not None
    assert found.missed == [1, 0]
    assert found.round_ms == pytest.approx(100)
    assert found.delays == pytest.approx([2.5, 0])
    assert found.differing_answers == 0
    assert found.speed == pytest.approx((8 + 10) / 20)
    rounds, delay = SwapCosts([found], [2]).goals()
    assert rounds.met
    assert not delay.met


def test_a_delay_that_outlasts_the_time_after_a_load_counts_whole() -> None:
    calm = Run([stream(*(n / 10 for n in range(20)))], began_s=0.35, load_s=0.5)
    for last_before in (6, 3):  # the latter has no message between the begin of the load and the end
        stopped = stream(*(n / 10 + 3.0 * (n > last_before) for n in range(20)))
        found = compared(replace(calm, streams=[stopped]), calm)
        assert found is not None
        assert found.delays == pytest.approx([30])
        assert not SwapCosts([found], [1]).goals()[1].met


def test_a_swap_meets_no_goal_where_streams_have_no_drafts() -> None:
    calm = Run([stream(*(n / 10 for n in range(20)), missed=20)], began_s=0.35, load_s=0.5)
    found = compared(calm, calm)
    assert found is not None
    assert found.delays == [0]
    assert not any(goal.met for goal in SwapCosts([found], [1]).goals())


def test_streams_that_end_before_the_load_show_nothing() -> None:
    short = Run([stream(0.0, 0.1, 0.2)], began_s=0.05, load_s=0.5)
    assert compared(short, short) is None


def test_a_number_of_streams_without_a_pair_is_a_missed_goal() -> None:
    calm = Run([stream(*(n / 10 for n in range(20)))], began_s=0.35, load_s=0.5)
    found = compared(calm, calm)
    assert found is not None
    assert [goal.met for goal in SwapCosts([found], [1, 16]).goals()] == [True, True, False]
