"""Do work once for all callers that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedWork(Generic[T]):
    """Work that is done once for all callers that arrive meanwhile; all get its result or error."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._under_way: asyncio.Future[T] | None = None

    async def done(self) -> T:
        """Return the result of the work; cancelling one caller does not affect the others."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(self._work())
            self._under_way.add_done_callback(_take_error)
        return await asyncio.shield(self._under_way)


def _take_error(work: asyncio.Future[T]) -> None:
    """Keep asyncio from logging an error for which no caller waits any more."""
    if not work.cancelled():
        work.exception()
