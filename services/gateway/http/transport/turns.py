"""Let requests that come together begin in different turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4
"""To begin a request takes about a millisecond, and nothing should hold the event loop for five."""


class Turns:
    """AT_ONCE requests begin in a turn of the event loop, in the order in which they came.

    No stream gets a token while requests begin: forty that came together would hold up all for 50 ms.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._count = 0

    async def turn(self) -> None:
        """Return at once if few requests have begun in this turn, else in a later one."""
        loop = asyncio.get_running_loop()
        if self._count == AT_ONCE:
            mine: asyncio.Future[None] = loop.create_future()
            self._waiting.append(mine)
            await mine
            return
        if not self._count:
            loop.call_soon(self._pass_on)
        self._count += 1

    def _pass_on(self) -> None:
        """Let the next ones begin that still wait."""
        self._count = 0
        while self._waiting and self._count < AT_ONCE:
            following = self._waiting.popleft()
            if not following.done():
                following.set_result(None)
                self._count += 1
        if self._count:
            asyncio.get_running_loop().call_soon(self._pass_on)
