"""Work that is given up when the process is told to stop."""

from __future__ import annotations

import asyncio

import pytest

from galley.common.server.process import run_unless


class Work:
    def __init__(self, last_words: Exception | None = None) -> None:
        self.started, self.go = asyncio.Event(), asyncio.Event()
        self.ended = False
        self._last_words = last_words

    async def run(self) -> str:
        try:
            self.started.set()
            await self.go.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            if self._last_words is not None:
                raise self._last_words from None
            raise
        finally:
            self.ended = True
        return "done"


async def test_it_is_the_result_of_the_work() -> None:
    work = Work()
    work.go.set()
    assert await run_unless(asyncio.Event(), work.run()) == "done"
    assert_nothing_runs()


async def test_finished_work_counts_despite_a_stop() -> None:
    stopped, work = asyncio.Event(), Work()
    stopped.set()
    work.go.set()
    assert await run_unless(stopped, work.run()) == "done"


async def test_error_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise OSError("no such thing")

    with pytest.raises(OSError, match="no such thing"):
        await run_unless(asyncio.Event(), fail())
    assert_nothing_runs()


async def test_work_that_cancels_itself_raises_cancelled_error() -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run_unless(asyncio.Event(), give_up())


async def test_stop_ends_the_work_and_returns_none() -> None:
    stopped, work = asyncio.Event(), Work()
    waiting = asyncio.create_task(run_unless(stopped, work.run()))
    await work.started.wait()
    stopped.set()
    assert await waiting is None
    assert work.ended
    assert_nothing_runs()


async def test_error_at_the_end_of_work_is_raised() -> None:
    stopped, work = asyncio.Event(), Work(OSError("cannot end"))
    waiting = asyncio.create_task(run_unless(stopped, work.run()))
    await work.started.wait()
    stopped.set()
    with pytest.raises(OSError, match="cannot end"):
        await waiting


async def test_cancelled_it_takes_the_work_along_and_stays_cancelled() -> None:
    work = Work()
    waiting = asyncio.create_task(run_unless(asyncio.Event(), work.run()))
    await work.started.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.ended
    assert_nothing_runs()


def assert_nothing_runs() -> None:
    assert asyncio.all_tasks() == {asyncio.current_task()}
