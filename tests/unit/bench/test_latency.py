"""Test how latency is measured: what is asked when, and which gaps between tokens count."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.loops import latency
from bench.loops.run import Run, loads
from bench.peers import peer_vllm
from bench.peers.arms import VLLM
from galley.bench.answers import Answer
from galley.bench.closed_loop import Load, LoopBlock, run_load
from galley.bench.workloads import Prompt
from tests.unit.galley.bench.blocks import block

THIS, OTHER = latency.OURS, VLLM


def interrupted(arm: str, gap_s: float, pair: int = 0) -> LoopBlock:
    """Return a block whose two other streams have a token every 0.1 s, and `gap_s` while a prompt is read."""
    prompts = (Prompt("a", "?"), Prompt("b", "?"), Prompt("late", "?", arrives_s=1.0))
    load = Load(pair, arm, latency.OTHERS + 1, 0.0, prompts, 40, 1, latency.INTERRUPTED)
    at_s = (0.8, 0.9, 1.0, 1.0 + gap_s, 1.1 + gap_s, 1.2 + gap_s)
    late = Answer((1,), (gap_s - 0.01,), gap_s)
    answers = (Answer((1,) * 6, at_s, 2.0), Answer((1,) * 6, at_s, 2.0), late)
    return LoopBlock(load, answers, 2.0, 0.0, requested_s=(0.0, 0.0, 1.0))


def test_gaps_count_from_the_request_of_the_late_prompt_to_its_first_token() -> None:
    assert latency.between_ms(interrupted(THIS, 0.3)) == pytest.approx([300.0, 300.0])


def test_tokens_of_one_message_are_one() -> None:
    whole = interrupted(THIS, 0.3)
    doubled = tuple(
        replace(answer, at_s=tuple(at for at in answer.at_s for _ in range(2))) for answer in whole.answers
    )
    assert latency.between_ms(replace(whole, answers=doubled)) == pytest.approx([300.0, 300.0])


def test_long_prompts_are_judged_against_vllm_and_gaps_by_their_bound() -> None:
    blocks = [
        block(arm, first_s, workload=kind, streams=streams, pair=pair)
        for pair in range(7)
        for kind in (latency.SHORT, latency.LONG)
        for streams, arms in ((1, {THIS: 0.9, OTHER: 1.0}), (16, {THIS: 1.1, OTHER: 1.0}))
        for arm, first_s in arms.items()
    ]
    blocks += [interrupted(arm, gap_s, pair) for pair in range(7) for arm, gap_s in GAPS.items()]
    run = Run(replace(latency.LATENCY.defaults, arms=tuple(GAPS)), Path(), Path(), print)
    run.blocks = blocks
    assert [(goal.name, goal.met) for goal in latency.goals(run)] == [
        ("first-token", True),
        ("first-token", False),
        ("between-tokens", True),
        ("between-tokens", False),
    ]
    assert run.facts["between_tokens_vllm_ms"].startswith("600.00")


def test_others_that_had_ended_before_the_prompt_came_meet_no_bound() -> None:
    blocks = [interrupted(THIS, 0.1, pair) for pair in range(7)]
    ended = [replace(one, requested_s=(-9.0, -9.0, 1.0)) for one in blocks]
    run = Run(replace(latency.LATENCY.defaults, arms=(THIS,)), Path(), Path(), print)
    run.blocks = [*ended[:3], *blocks[3:]]
    (goal,) = latency.goals(run)
    assert goal.met
    assert run.facts[f"between_tokens_{THIS}_ms"].endswith("of 4 blocks")
    run.blocks = ended
    (goal,) = latency.goals(run)
    assert not goal.met
    assert goal.measured == "others had ended"


GAPS = {THIS: 0.14, "off:1": 0.2, OTHER: 0.6}


@pytest.mark.parametrize("arm", ["off", "off:0", "off:x", "hybrid-4:1", "vllm:1"])
def test_an_unknown_arm_is_refused(arm: str) -> None:
    assert arm in latency.check(replace(latency.LATENCY.defaults, arms=(arm,)))
    assert not latency.check(replace(latency.LATENCY.defaults, arms=("off:1", "auto:2", VLLM)))


def test_each_workload_runs_at_its_own_numbers_of_streams_and_one_prompt_of_a_group_is_late() -> None:
    cells: dict[str, set[int]] = {}
    for load in loads(latency.LATENCY, replace(latency.LATENCY.defaults, pairs=4), life=0):
        if load.pair >= 0:
            cells.setdefault(load.workload, set()).add(load.streams)
        if load.pair >= 0 and load.workload == latency.INTERRUPTED:
            assert [bool(prompt.arrives_s) for prompt in load.prompts] == [False] * latency.OTHERS + [True]
    assert cells == {latency.SHORT: {1, 16}, latency.LONG: {1, 16}, latency.INTERRUPTED: {9}}


def test_no_two_texts_begin_alike() -> None:
    for kind in (latency.SHORT, latency.LONG):
        texts = latency.texts(kind, 24)
        assert len({text[:60] for text in texts}) == 24


async def test_a_prompt_is_asked_no_earlier_than_it_arrives() -> None:
    async def answer(_prompt: Prompt, _seed: int) -> Answer:
        return Answer((1,), (0.0,), 0.0)

    prompts = (Prompt("a", "?"), Prompt("late", "?", arrives_s=0.05))
    given = await run_load(Load(0, "off", 2, 0.0, prompts, 1, 1), answer)
    assert given.requested_s[0] < given.requested_s[1]
    assert given.requested_s[1] >= 0.05


class VirtualTime:
    """A time that passes in steps and sleeps only. A sleep takes a little longer, as real ones do."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + 1e-6


@dataclass
class OneTokenAStep:
    """A stand-in for vLLM's engine: each step gives every request a token, and takes 10 ms."""

    time: VirtualTime
    requests: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)

    def add_request(self, name: str, _prompt: Any, params: int) -> None:
        self.requests[name] = (0, params)

    def step(self) -> list[Any]:
        self.time.sleep(0.01)
        self.steps.append(len(self.requests))
        outputs = []
        for name, (given, most) in list(self.requests.items()):
            self.requests[name] = (given + 1, most)
            if given + 1 == most:
                del self.requests[name]
            output = SimpleNamespace(token_ids=[7] * (given + 1))
            outputs.append(SimpleNamespace(request_id=name, outputs=[output], finished=given + 1 == most))
        return outputs


def answered(streams: int, lengths: list[int], arrives_s: list[float]) -> tuple[dict[str, Any], list[int]]:
    passing = VirtualTime()
    engine = OneTokenAStep(passing)
    work = {
        "streams": streams,
        "prompts": [[1]] * len(lengths),
        "max_tokens": lengths,
        "seed": 1,
        "arrives_s": arrives_s,
    }
    loop = peer_vllm.ClosedLoop(engine, work, lambda params: params["max_tokens"], passing)
    return loop.run(), engine.steps


def test_vllm_gets_a_late_prompt_when_it_arrives_and_its_wait_counts() -> None:
    found, steps = answered(3, [8, 8, 2], [0.0, 0.0, 0.035])
    assert steps == [2, 2, 2, 2, 3, 3, 2, 2]
    late = found["answers"][2]
    assert late["began_s"] == 0.035
    assert late["at_s"] == pytest.approx([0.015, 0.025], abs=1e-4)


def test_vllm_waits_for_a_prompt_that_arrives_after_all_others_ended() -> None:
    found, steps = answered(1, [1, 1], [0.0, 0.05])
    assert steps == [1, 1]
    assert found["wall_s"] == pytest.approx(0.06, abs=1e-4)


def test_vllm_keeps_as_many_requests_as_there_are_streams() -> None:
    found, steps = answered(2, [2, 1, 1], [0.0, 0.0, 0.0])
    assert steps == [2, 2]
    assert found["busy_s"] == found["wall_s"] == pytest.approx(0.02, abs=1e-4)
