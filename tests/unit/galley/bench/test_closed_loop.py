"""Test a closed loop: which prompt a stream asks next, and which time counts."""

from __future__ import annotations

from galley.bench.answers import Answer
from galley.bench.closed_loop import Load, run_load
from galley.bench.workloads import Prompt


def load_of(*prompts: Prompt, streams: int = 1) -> Load:
    return Load(0, "off", streams, 0.0, prompts, max_tokens=2, seed=7)


async def test_a_stream_asks_later_turns_with_the_answers_before_them() -> None:
    asked: list[tuple[list[str], int]] = []

    async def answer(prompt: Prompt, seed: int) -> Answer:
        asked.append(([message["content"] for message in prompt.messages], seed))
        return Answer((1, 2), (0.1, 0.2), 0.2, text=f"answer {len(asked)}")

    block = await run_load(load_of(Prompt("a", "One?", later_turns=("Two?",)), Prompt("b", "Other?")), answer)
    assert asked == [(["One?"], 7), (["One?", "answer 1", "Two?"], 7), (["Other?"], 8)]
    assert [given.text for given in block.answers] == ["answer 1", "answer 2", "answer 3"]
    assert len(block.requested_s) == 3
    assert list(block.requested_s) == sorted(block.requested_s)
    assert block.given == 6
