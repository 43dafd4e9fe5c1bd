"""Waiting without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 20.0


async def with_turns(call: Awaitable[T]) -> tuple[T, int]:
    """Return the result of a call, and how many turns of the event loop another task got meanwhile."""
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    try:
        return await call, turns
    finally:
        ticking.cancel()


class Watch:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def changed(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, holds: Callable[[], bool], patience_s: float | None = PATIENCE_S) -> None:
        async with asyncio.timeout(patience_s):
            while not holds():
                await self._event.wait()


class Gate:
    def __init__(self) -> None:
        self._watch = Watch()
        self._open = True
        self._permits = 0
        self._entering = 0

    def close(self) -> None:
        self._open = False

    def close_after(self, count: int) -> None:
        self.close()
        self.permit(count)

    def open(self) -> None:
        self._open = True
        self._watch.changed()

    def permit(self, count: int = 1) -> None:
        self._permits += count
        self._watch.changed()

    async def has_waiter(self) -> None:
        await self._watch.until(lambda: self._entering > 0)

    async def enter(self) -> None:
        self._entering += 1
        self._watch.changed()
        try:
            await self._watch.until(lambda: self._open or self._permits > 0)
        finally:
            self._entering -= 1
        if not self._open:
            self._permits -= 1
