"""The benchmark of schemas and predictions: what its arms send, and its goals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.loops.run import Run, Scenario, loads
from bench.loops.structured import MASKS, PLAIN, PREDICTED, STRUCTURED, Plain, from_prediction
from galley.bench.answers import Answer, Rounds
from galley.bench.closed_loop import AUTO, OFF, WARM_UP, Load, LoopBlock
from galley.core.names import PREDICTION
from galley.core.session.events import SourceTokens
from tests.unit.galley.bench.blocks import block

LOCAL = "none-16"


class Recorded:
    """A side that notes its loads."""

    def __init__(self) -> None:
        self.loads: list[Load] = []

    async def run(self, load: Load) -> LoopBlock:
        self.loads.append(load)
        return LoopBlock(load, (), wall_s=1.0, cpu_s=0.0)


def loads_of(scenario: Scenario, arm: str) -> list[Load]:
    options = replace(scenario.defaults, arms=(arm,), pairs=1, streams=(1,), temperatures=(0.0,))
    return [load for load in loads(scenario, options, life=0) if load.pair != WARM_UP]


async def test_a_plain_arm_sends_neither_schema_nor_prediction_and_keeps_its_name() -> None:
    for scenario, arm in ((PREDICTED, AUTO), (MASKS, OFF)):
        side = Recorded()
        [load] = loads_of(scenario, arm + PLAIN)
        assert all(prompt.schema or prompt.prediction for prompt in load.prompts)
        assert (await Plain(side).run(load)).load == load
        [sent] = side.loads
        assert sent.arm == arm
        assert [prompt.text for prompt in sent.prompts] == [prompt.text for prompt in load.prompts]
        assert not any(prompt.schema or prompt.prediction for prompt in sent.prompts)


def test_answers_are_as_long_at_any_number_of_streams() -> None:
    options = replace(STRUCTURED.defaults, pairs=1)
    found = [load for load in loads(STRUCTURED, options, life=0) if load.max_tokens == options.max_tokens]
    assert {load.streams for load in found} == {1, 16}
    assert {prompt.max_tokens for load in found for prompt in load.prompts} == {options.max_tokens}


def test_warm_ups_are_short_although_prompts_have_bounds() -> None:
    found = [one for one in loads(STRUCTURED, STRUCTURED.defaults, life=0) if one.pair == WARM_UP]
    assert {prompt.max_tokens for load in found for prompt in load.prompts} <= set(range(13))


def run_of(scenario: Scenario, blocks: list[LoopBlock]) -> Run:
    arms = tuple(dict.fromkeys(block.load.arm for block in blocks))
    run = Run(replace(scenario.defaults, arms=arms), Path(), Path(), print)
    run.blocks = blocks
    return run


def test_goals_are_against_speculation_off_at_each_number_of_streams() -> None:
    arms = {OFF: 1.0, LOCAL: 0.6, AUTO: 0.4}
    blocks = [
        block(arm, seconds if streams == 1 else 1.0, streams=streams, pair=pair)
        for pair in range(7)
        for streams in (1, 16)
        for arm, seconds in arms.items()
    ]
    run = run_of(STRUCTURED, blocks)
    met = {goal.what: goal.met for goal in STRUCTURED.goals(run)}
    assert met == {
        "answers whose tokens differ from those of off": True,
        "tokens/s of auto against off, 1 streams at 0": True,
        "tokens/s of auto against off, 16 streams at 0": False,
    }
    assert run.facts["differing_answers"] == {LOCAL: 0, AUTO: 0}


def test_an_answer_with_other_tokens_than_those_of_off_misses_a_goal() -> None:
    other = block(AUTO, 0.5)
    changed = replace(other, answers=(Answer((1, 2), (0.5, 1.0), 1.0),))
    run = run_of(STRUCTURED, [block(OFF, 1.0), block(LOCAL, 1.0), changed])
    met = {goal.what: goal.met for goal in STRUCTURED.goals(run)}
    assert not met["answers whose tokens differ from those of off"]
    assert run.facts["differing_answers"] == {LOCAL: 0, AUTO: 1}


def test_an_answer_that_was_cut_before_its_json_was_complete_is_counted() -> None:
    whole, cut = Answer((1,), (1.0,), 1.0, text='{"a": 1}'), Answer((1,), (1.0,), 1.0, text='{"a": ')
    blocks = [replace(block(arm, 1.0), answers=(whole, cut, cut)) for arm in (OFF, LOCAL, AUTO)]
    run = run_of(STRUCTURED, blocks)
    STRUCTURED.goals(run)
    assert run.facts["incomplete_answers"] == dict.fromkeys((OFF, LOCAL, AUTO), 2)


def test_the_record_says_how_much_came_from_the_prediction() -> None:
    rounds = Rounds(sources=(SourceTokens(PREDICTION, 5, 4, 3), SourceTokens("model", 4, 4, 4)))
    answer = Answer(tuple(range(4)), (1.0,) * 4, 1.0, rounds)
    run = run_of(PREDICTED, [block(OFF, 1.0), replace(block(AUTO, 1.0), answers=(answer, answer))])
    assert from_prediction(run) == 0.75


def test_masks_are_judged_against_streams_without_a_schema() -> None:
    blocks = [
        block(arm, seconds, streams=16, pair=pair)
        for pair in range(7)
        for arm, seconds in ((OFF, 1.2), (OFF + PLAIN, 1.0))
    ]
    [goal] = MASKS.goals(run_of(MASKS, blocks))
    assert (goal.met, goal.measured) == (False, "0.83 [0.83, 0.83]x")


def test_masks_are_judged_at_each_temperature() -> None:
    blocks = [
        block(arm, seconds, streams=16, pair=pair, temperature=temperature)
        for pair in range(7)
        for temperature, masked_s in ((0.0, 1.2), (0.7, 1.0))
        for arm, seconds in ((OFF, masked_s), (OFF + PLAIN, 1.0))
    ]
    run = run_of(MASKS, blocks)
    run.options = replace(run.options, temperatures=(0.0, 0.7))
    assert [goal.met for goal in MASKS.goals(run)] == [False, True]
