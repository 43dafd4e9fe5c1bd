"""The batching loop: all that wait go together, and what is given up is never computed."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from services.common.batching import Batcher
from services.core.errors import DeadlinePassed, Overloaded, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


class Engine:
    """Answers each job with itself; waits for `gate` first."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.batches: list[list[str]] = []

    def step(self, jobs: Sequence[str]) -> list[str]:
        self.batches.append(list(jobs))
        self.begun.release()
        if not self.gate.wait(10):
            raise TimeoutError
        if "bad" in jobs:
            raise ValueError("secret")
        return list(jobs)


@asynccontextmanager
async def batching(max_waiting: int = 8) -> AsyncIterator[tuple[Engine, Batcher[str, str]]]:
    engine = Engine()
    batcher = Batcher(engine.step, max_waiting=max_waiting)
    try:
        yield engine, batcher
    finally:
        engine.gate.set()
        await batcher.close()


async def held(engine: Engine, batcher: Batcher[str, str]) -> asyncio.Future[object]:
    """A step that is under way until the gate opens."""
    engine.gate.clear()
    future = batcher.submit("first", "first")
    await asyncio.to_thread(engine.begun.acquire)
    return asyncio.ensure_future(asyncio.wait_for(future, 10))


async def test_all_that_wait_go_into_the_next_step_one_of_a_key() -> None:
    async with batching() as (engine, batcher):
        first = await held(engine, batcher)
        futures = [batcher.submit(key, key + n) for key, n in (("a", "1"), ("b", "1"), ("a", "2"))]
        engine.gate.set()
        done = await asyncio.gather(*futures)
        await first
    assert engine.batches == [["first"], ["a1", "b1"], ["a2"]]
    assert [(one.outcome, one.batch) for one in done] == [("a1", 2), ("b1", 2), ("a2", 1)]
    assert all(one.queue_ns > 0 and one.compute_ns > 0 for one in done)


async def test_what_is_given_up_or_late_is_never_computed() -> None:
    async with batching() as (engine, batcher):
        first = await held(engine, batcher)
        given_up = batcher.submit("a", "a")
        late = batcher.submit("b", "b", remaining_ns=1)
        kept = batcher.submit("c", "c", remaining_ns=10**10)
        given_up.cancel()
        engine.gate.set()
        await kept
        await first
        with pytest.raises(DeadlinePassed):
            await late
    assert engine.batches == [["first"], ["c"]]


async def test_a_failed_step_fails_its_own_jobs_and_the_loop_goes_on() -> None:
    async with batching() as (_, batcher):
        with pytest.raises(Unavailable) as failed:  # asking again may help
            await batcher.submit("a", "bad")
        assert "secret" not in str(failed.value)
        assert (await batcher.submit("a", "good")).outcome == "good"


async def test_too_many_waiting_are_refused() -> None:
    async with batching(max_waiting=1) as (engine, batcher):
        first = await held(engine, batcher)
        kept = batcher.submit("a", "a")
        with pytest.raises(Overloaded):
            batcher.submit("b", "b")
        engine.gate.set()
        await kept
        await first


async def test_draining_answers_what_is_here_and_refuses_the_rest() -> None:
    async with batching() as (engine, batcher):
        first = await held(engine, batcher)
        waiting = batcher.submit("a", "a")
        draining = asyncio.ensure_future(batcher.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            batcher.submit("b", "b")
        assert not draining.done()
        engine.gate.set()
        await draining
        assert waiting.result().outcome == "a"
        await first


async def test_closing_leaves_no_one_waiting() -> None:
    async with batching() as (engine, batcher):
        first = await held(engine, batcher)
        waiting = batcher.submit("a", "a")
        closing = asyncio.ensure_future(batcher.close())
        engine.gate.set()
        await closing
        for future in (first, waiting):
            with pytest.raises(Unavailable):
                await future
