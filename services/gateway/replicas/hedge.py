"""The same item at a second replica, while the first is later than most: whoever answers first goes on.

Both are of one build, so that their tokens are the same; the second holds the prefix already, so that it
computes no more than the verdict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from galley.core.session import events as ev
from services.gateway.replicas.clients import PoolVerification
from services.gateway.replicas.targets import Target


class Hedge:
    """`first` is the second replica's verdict, once it is there."""

    def __init__(self, member: Target, item: PoolVerification, rows: int, won: Callable[[], None]) -> None:
        """`won` is called with the first verdict; `rows` are counted at `member` until then."""
        self.member = member
        self.item = item
        self.first: ev.Verified | None = None
        self._rows = rows
        self._won = won
        member.take(rows)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        answer = await anext(aiter(self.item), None)
        if isinstance(answer, ev.Verified):
            self.first = answer
            self._won()

    async def drop(self) -> None:
        """It is not wanted any more."""
        self.member.let_go(self._rows)  # first: who waits for the rest may be cancelled
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.item.aclose()
