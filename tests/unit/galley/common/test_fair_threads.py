"""Threads for the work of callers: each has one at a time, and holds up nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from galley.common.fair_threads import FairThreads
from galley.core.errors import Broken
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
    threads = FairThreads()
    tasks = [asyncio.create_task(threads.run("bad", prompts.parse)) for _ in range(MANY)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(prompts.began.wait, PATIENCE_S)
        assert await threads.run("good", lambda: "at once") == "at once"
        prompts.go_on.set()
        assert await asyncio.gather(*tasks) == ["parsed"] * MANY
    assert prompts.most == 1


async def test_a_cancelled_call_keeps_its_thread_until_the_prompt_is_parsed(prompts: Prompts) -> None:
    threads = FairThreads()
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
    threads = FairThreads()

    def refuse() -> None:
        raise ValueError("text: must not be empty")

    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            with pytest.raises(ValueError, match="must not be empty"):
                await threads.run("p", refuse)


class Panic(BaseException):
    """As pyo3 raises where a library panics."""


async def test_a_panic_of_a_native_library_is_an_error_of_its_call_alone() -> None:
    threads = FairThreads()

    def panic() -> None:
        raise Panic("index out of bounds")

    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            with pytest.raises(Broken, match="native library"):
                await threads.run("p", panic)


async def test_where_one_thread_serves_all_a_caller_waits_for_one_of_each_other(prompts: Prompts) -> None:
    done: list[str] = []

    async def run(caller: str) -> None:
        await threads.run(caller, lambda: done.append(caller))

    with ThreadPoolExecutor(1) as thread:
        threads = FairThreads(thread)
        held = asyncio.create_task(threads.run("first", prompts.parse))
        await asyncio.to_thread(prompts.began.wait, PATIENCE_S)
        tasks = [asyncio.create_task(run(caller)) for caller in ["bad"] * 9 + ["good"]]
        await asyncio.sleep(0)
        prompts.go_on.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(held, *tasks)
    assert done[:3] == ["bad", "good", "bad"]
