"""The closed loop without models: its order, its prompts, its streams, its rows and goals."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from bench import loop_run, peers, throughput
from bench.closed_loop import LoopPlan, loads, run_loads
from bench.loop_run import LoopOptions, Result
from bench.loop_sides import process_loop
from bench.loop_summary import loop_rows
from galley.bench.answers import Answer, Prompt
from galley.bench.closed_loop import WARM_UP, Load, LoopBlock, in_streams

PLAN = LoopPlan(("plain", "ngram-4"), (1, 8), (0.0, 0.7), pairs=7, max_tokens=8, seed=1)


def test_a_pair_is_the_same_work_for_every_arm() -> None:
    plan = [load for load in loads(PLAN) if load.pair != WARM_UP]
    assert len(plan) == 7 * 2 * 2 * 2
    for one, other in zip(plan[::2], plan[1::2], strict=True):
        assert {one.arm, other.arm} == {"plain", "ngram-4"}
        assert (one.pair, one.streams, one.temperature) == (other.pair, other.streams, other.temperature)
        assert [prompt.id for prompt in one.prompts] == [prompt.id for prompt in other.prompts]
        assert one.seed == other.seed


def test_each_arm_goes_first_in_turn() -> None:
    plan = [load for load in loads(PLAN) if load.pair != WARM_UP]
    firsts = Counter(load.arm for load in plan[::2])
    assert set(firsts.values()) <= {12, 16}


def test_no_prompt_is_asked_twice_so_that_no_prefix_cache_helps() -> None:
    asked = [prompt.text.split(")")[0] for load in loads(PLAN) for prompt in load.prompts]
    assert len(set(asked)) == len(asked)


def _load(arm: str = "plain", pair: int = 0, streams: int = 2, prompts: int = 5) -> Load:
    asked = tuple(Prompt(f"p{at}", f"prompt {at}") for at in range(prompts))
    return Load(pair, arm, streams, 0.0, asked, max_tokens=4, seed=100)


def _answer(prompt: Prompt, tokens: int = 4) -> Answer:
    at_s = tuple(0.1 * (at + 1) for at in range(tokens))
    return Answer(prompt.id, 3, tuple(range(tokens)), at_s, at_s[-1], 0.0)


async def test_so_many_streams_run_at_once_and_answers_come_in_order() -> None:
    running, most, seeds = 0, 0, []

    async def answer(prompt: Prompt, seed: int) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seeds.append(seed)
        await asyncio.sleep(0)
        running -= 1
        return _answer(prompt)

    came = await in_streams(_load(streams=3, prompts=7), answer)
    assert most == 3
    assert [given.prompt_id for given in came.answers] == [f"p{at}" for at in range(7)]
    assert sorted(seeds) == list(range(100, 107))


async def test_it_is_measured_while_every_stream_has_work() -> None:
    short, slow = asyncio.Event(), asyncio.Event()

    async def answer(prompt: Prompt, seed: int) -> Answer:
        if prompt.id == "p0":  # one stream is busy with it until the other has found nothing waiting
            await slow.wait()
            return Answer(prompt.id, 3, (1, 2), (0.0, 3600.0), 3600.0, 0.0)
        if prompt.id == "p2":
            short.set()
        return Answer(prompt.id, 3, (1, 2, 3), (0.0, 0.0, 0.0), 0.1, 0.0)

    load = _load(streams=2, prompts=3)
    loop = asyncio.create_task(in_streams(load, answer))
    await short.wait()
    slow.set()
    came = await loop
    assert came.busy_s is not None
    block = LoopBlock(load, came.answers, 3600.0, 0.0, came.asked_s, came.busy_s)
    assert (block.given, block.timed_tokens) == (8, 7)
    assert block.timed_s == came.busy_s
    assert LoopBlock(load, came.answers, 3600.0, 0.0).timed_tokens == 8


async def test_streams_of_one_prompt_each_are_measured_to_their_end() -> None:
    async def answer(prompt: Prompt, seed: int) -> Answer:
        return _answer(prompt)

    assert (await in_streams(_load(streams=3, prompts=3), answer)).busy_s is None


class _Side:
    def __init__(self, wall_s: float) -> None:
        self._wall_s = wall_s

    async def run(self, load: Load) -> LoopBlock:
        answers = [_answer(prompt) for prompt in load.prompts]
        timed = [replace(a, at_s=tuple(self._wall_s * at_s for at_s in a.at_s)) for a in answers]
        return LoopBlock(load, tuple(timed), self._wall_s, 0.5)


async def test_rows_goals_and_record(tmp_path: Path) -> None:
    """Ours is half as fast through the gateway, twice as fast alone."""
    options = LoopOptions(peers.ARMS, streams=(1, 8), temperatures=(0.0,))
    plan = LoopPlan(options.arms, options.streams, options.temperatures, 7, 4, 1)
    sides = {"gateway": _Side(2.0), "engine": _Side(0.5), "vllm": _Side(1.0)}
    told: list[str] = []
    blocks = await run_loads(plan, dict(sides), told.append)
    assert len(blocks) == 7 * 2 * 3
    assert len(told) == len(blocks) + 3

    rows = {(row.arm, row.streams): row for row in loop_rows(blocks, "vllm")}
    gateway, engine = rows["gateway", 8].ratio, rows["engine", 8].ratio
    assert gateway is not None
    assert engine is not None
    assert gateway.median == pytest.approx(0.5)
    assert engine.median == pytest.approx(2.0)
    assert rows["vllm", 8].inter_token_ms == pytest.approx((100.0, 100.0))

    goals = peers.goals(options, blocks)
    assert [goal.met for goal in goals] == [False, False, True, True]
    console = Console(file=io.StringIO(), width=200)
    record = tmp_path / "peers" / "abc.json"
    loop_run.report(Result("peers", "vllm", blocks, goals, {"cores": [0]}), options, console, record)
    said = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "| 0.50 [0.50, 0.50]x | >= 0.8x | missed" in said
    found = json.loads(record.read_text())
    assert len(found["blocks"]) == len(blocks)
    assert record.with_suffix(".png").stat().st_size > 0


_ECHO = """
import json, sys
print(json.dumps({"ready": "echo 1"}), flush=True)
for line in sys.stdin:
    block = json.loads(line)
    answers = [{"tokens": ids, "at_s": [0.5] * len(ids)} for ids in block["prompts"]]
    print(json.dumps({"answers": answers, "wall_s": 2.0}), flush=True)
"""


async def test_a_process_answers_blocks_and_is_gone_after(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ECHO]
    async with process_loop(command, os.environ, tmp_path / "log", lambda text: [len(text)] * 3) as side:
        assert side.told == "echo 1"
        block = await side.run(_load())
        pid = side.pid
    assert [given.tokens for given in block.answers] == [(8, 8, 8)] * 5
    assert block.wall_s == 2.0
    assert not psutil.pid_exists(pid)


async def test_a_process_that_ends_early_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status 3"):
        async with process_loop(
            [sys.executable, "-c", "exit(3)"], os.environ, tmp_path / "log", lambda _: []
        ):
            pass


@pytest.mark.parametrize("parse", [throughput.parse_options, peers.parse_options])
def test_flags(parse: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(parse)
    options, root = parse(["--streams", "1,8", "--quick"])
    assert (options.streams, options.pairs, root) == ((1, 8), 1, None)
    for wrong in (["--pairs", "3"], ["--arms", "engine"], ["--streams", "x"]):
        with pytest.raises(SystemExit, match="2"):
            parse(wrong)
    assert "at least 7" in capsys.readouterr().err
