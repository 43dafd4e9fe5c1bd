"""Start parts of a stack again that ended, while another part of their pool does their work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from galley.stack.part import Part, PartFailed

OnChange: TypeAlias = "Callable[[str], None]"
"""A function that is told, in a sentence for the operator, what ended or serves again."""

_MAX_STARTS = 5
"""Starts in a row of a part that ends within `_SETTLED_S` after each; then it is given up."""
_SETTLED_S = 60.0


def _ignore(_: str) -> None: ...


class Restarts:
    """The watch over `parts`, which run. `start` starts one again, or raises PartFailed.

    Without `on_change` none is started again. The first start follows at once, the second after `pause_s`,
    each further one after twice the pause before.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        start: Callable[[Part], Awaitable[None]],
        on_change: OnChange | None,
        pause_s: float,
    ) -> None:
        self._parts = parts
        self._start = start
        self._on_change = on_change or _ignore
        self._restarts = on_change is not None
        self._pause_s = pause_s
        self._serving = {part.spec.name for part in parts}

    async def failure(self) -> PartFailed:
        """Return the failure of the first part that no other part of its pool can stand in for."""
        watches = [asyncio.create_task(self._watch(part)) for part in self._parts]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.wait(watches)

    async def _watch(self, part: Part) -> PartFailed:
        starts = 0
        while True:
            since_s = time.monotonic()
            failed = await part.died()
            self._serving.discard(part.spec.name)
            if not self._has_stand_in(part):
                return failed
            if time.monotonic() - since_s > _SETTLED_S:
                starts = 0
            starts = await self._restart(part, failed, starts)

    def _has_stand_in(self, part: Part) -> bool:
        pool = part.spec.pool
        return (
            self._restarts
            and bool(pool)
            and any(other.spec.pool == pool and other.spec.name in self._serving for other in self._parts)
        )

    async def _restart(self, part: Part, failed: PartFailed, starts: int) -> int:
        """Start the part; return its starts in a row, `starts` included. If it is given up, never return."""
        while starts < _MAX_STARTS:
            pause_s = self._pause_s * 2 ** (starts - 1) if starts else 0.0
            when = f"in {pause_s:g} s" if starts else "now"
            self._on_change(f"{failed}; starting it again {when}; log: {failed.log}")
            await asyncio.sleep(pause_s)
            starts += 1
            try:
                await self._start(part)
            except PartFailed as again:
                failed = again
                await part.kill()
            else:
                self._serving.add(part.spec.name)
                self._on_change(f"{part.spec.name} serves again")
                return starts
        self._on_change(
            f"{failed}; given up after {starts} starts in a row, the stack goes on without it; "
            f"log: {failed.log}"
        )
        forever: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        return await forever
