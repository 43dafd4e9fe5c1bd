"""`make bench-slow-links` without a stack: its plan, its goals, its record."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.slow_links import goals, parse_options, report
from bench.slow_links_run import FAR, FAR_STORE, NEAR, LinkOptions, Outcome, differing, plan
from galley.bench.closed_loop import WARM_UP, LoopBlock
from tests.benching.blocks import block, rounds_of

OPTIONS = LinkOptions(max_tokens=40)
FIXED, AUTO = OPTIONS.speculations[1:]


def blocks(far_by: float, pairs: int = 7) -> list[LoopBlock]:
    """Speculation three times as fast as none; far so many times as fast as near."""
    speed = {NEAR: 1.0, FAR: far_by, FAR_STORE: 0.5}
    return [
        block(
            f"{place}-{how}",
            (0.03 if how == "off" else 0.01) / speed[place],
            workload="mixed",
            pair=pair,
            rounds=None if how == "off" else rounds_of(40, 36),
        )
        for pair in range(pairs)
        for place in speed
        for how in OPTIONS.speculations
    ]


def test_every_prompt_is_taught_before_it_is_asked_of_every_arm() -> None:
    teaching, measured = plan(OPTIONS)
    taught = {load.prompts[0].text: [prompt.text for prompt in load.prompts] for load in teaching}
    assert {load.pair for load in measured} == {WARM_UP, *range(OPTIONS.pairs)}
    for load in measured:
        assert [prompt.text for prompt in load.prompts] == taught[load.prompts[0].text]
    for pair in range(OPTIONS.pairs):
        mine = [load for load in measured if load.pair == pair]
        assert sorted(load.arm for load in mine) == sorted(OPTIONS.arms)
        assert len({load.seed for load in mine}) == 1


def test_near_and_far_take_turns_to_lead() -> None:
    _, measured = plan(OPTIONS)
    arms = [[load.arm for load in measured if load.pair == pair] for pair in range(2)]
    assert arms[0] == arms[1][::-1]


@pytest.mark.parametrize(("far_by", "met"), [(0.9, True), (0.7, False)])
def test_four_fifths_of_the_near_speed_are_asked_for(far_by: float, met: bool) -> None:
    found = goals(blocks(far_by), OPTIONS)
    assert [goal.met for goal in found] == [met, met]
    for goal, how in zip(found, (FIXED, AUTO), strict=True):
        assert str(goal).startswith(f"slow-links | tokens/s of {how} with 20 ms each way")
        assert f"| {far_by:.2f} [" in str(goal)


def test_an_answer_that_is_not_the_target_s_is_counted() -> None:
    of = blocks(0.9, pairs=1)
    texts = tuple(prompt.text for prompt in of[0].load.prompts)
    right = tuple(answer.tokens for answer in of[0].answers)
    assert differing(of, {texts: right}) == 0
    assert differing(of, {texts: (right[0][:-1],)}) == len(of)


def test_the_record_holds_figures_goals_and_what_else_was_seen(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=150)
    path = tmp_path / "slow_links" / "abc.json"
    report(Outcome(blocks(0.9), facts={"took_s": 1}), OPTIONS, console, {"commit": "abc"}, path)
    record = json.loads(path.read_text())
    assert path.with_suffix(".png").stat().st_size > 1000
    assert [goal["met"] for goal in record["goals"]] == [True, True]
    assert record["facts"]["differing_answers"] == 0
    assert record["facts"]["against_near"]["far-store-auto"].startswith("0.50")
    assert record["commit"] == "abc"


def test_too_few_pairs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--pairs", "3"])
    assert "--pairs: at least 7" in capsys.readouterr().err
    options, root = parse_options(["--quick"])
    assert (options.pairs, root) == (1, None)
