"""Threads for work of callers, each of whom has one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from galley.core.errors import Broken

T = TypeVar("T")


class FairThreads:
    """Do work in threads, one piece at a time for each caller.

    Otherwise the work of one caller would fill the threads, and others would wait for all of it.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        """Use the threads of `executor`, which serves in the order of arrival, or those of the event loop."""
        self._executor = executor
        self._turns: WeakValueDictionary[str | bytes, asyncio.Semaphore] = WeakValueDictionary()

    async def run(
        self,
        caller: str | bytes,
        work: Callable[[], T],
        abandoned: Callable[[asyncio.Future[T]], object] | None = None,
    ) -> T:
        """Return `work()`, called in a thread. Raise what it raises; a panic of native code is Broken.

        If the call is cancelled while a thread works, `abandoned` is called with its future, once done.
        """
        turn = self._turns.setdefault(caller, asyncio.Semaphore())
        await turn.acquire()
        loop, contained = asyncio.get_running_loop(), partial(_contain_panic, work)
        working = loop.run_in_executor(self._executor, copy_context().run, contained)

        def end(worked: asyncio.Future[T]) -> None:
            turn.release()
            if not worked.cancelled():
                worked.exception()  # nobody else asks for it if the caller has gone

        working.add_done_callback(end)
        # The thread goes on when its call is cancelled, and so does the caller's turn.
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            if abandoned is not None:
                working.add_done_callback(abandoned)
            raise


def _contain_panic(work: Callable[[], T]) -> T:
    """Return `work()`. A panic of a library in Rust is no Exception, and would end all who await the work."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise Broken("a native library failed") from error
