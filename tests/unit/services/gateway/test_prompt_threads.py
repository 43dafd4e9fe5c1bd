"""Threads for prompts: a principal has one at a time, and holds up nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from services.gateway.request.threads import PromptThreads
from tests.fakes.waiting import PATIENCE_S

MANY = 64
"""More than there are threads."""


class Prompts:
    """Prompts that are parsed once `go_on` is set; `most` is how many were parsed at once."""

    def __init__(self) -> None:
        self.go_on, self.began = threading.Event(), threading.Event()
        self._lock, self._now, self.most = threading.Lock(), 0, 0

    def parse(self) -> str:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.began.set()
        self.go_on.wait(PATIENCE_S)
        with self._lock:
            self._now -= 1
        return "parsed"


@pytest.fixture
def prompts() -> Iterator[Prompts]:
    made = Prompts()
    yield made
    made.go_on.set()


async def test_prompts_of_one_principal_do_not_hold_up_another(prompts: Prompts) -> None:
    threads = PromptThreads()
    tasks = [asyncio.create_task(threads.run("bad", prompts.parse)) for _ in range(MANY)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(prompts.began.wait, PATIENCE_S)
        assert await threads.run("good", lambda: "at once") == "at once"
        prompts.go_on.set()
        assert await asyncio.gather(*tasks) == ["parsed"] * MANY
    assert prompts.most == 1


async def test_a_cancelled_call_keeps_its_thread_until_the_prompt_is_parsed(prompts: Prompts) -> None:
    threads = PromptThreads()
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(MANY):
            task = asyncio.create_task(threads.run("bad", prompts.parse))
            await asyncio.to_thread(prompts.began.wait, PATIENCE_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        prompts.go_on.set()
        assert await threads.run("bad", lambda: "later") == "later"
    assert prompts.most == 1


async def test_an_error_of_the_prompt_is_raised_and_ends_the_turn() -> None:
    threads = PromptThreads()

    def refuse() -> None:
        raise ValueError("text: must not be empty")

    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            with pytest.raises(ValueError, match="must not be empty"):
                await threads.run("p", refuse)
