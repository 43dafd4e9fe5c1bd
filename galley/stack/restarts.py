"""Start parts of a stack again that ended."""

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

    Without `on_change` none is started again, nor is a part without a pool. The first start follows at once,
    the second after `pause_s`, each further one after twice the pause before.
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
        self._given_up: set[str] = set()

    async def failure(self) -> PartFailed:
        """Return the failure of the first part without which the stack cannot go on."""
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
            if not (self._restarts and part.spec.pool):
                return failed
            if time.monotonic() - since_s > _SETTLED_S:
                starts = 0
            again = await self._restart(part, failed, starts)
            if isinstance(again, PartFailed):
                return await self._give_up(part, again)
            starts = again

    async def _restart(self, part: Part, failed: PartFailed, starts: int) -> int | PartFailed:
        """Start the part; return its starts in a row, `starts` included, or its failure after the last."""
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
                self._on_change(f"{part.spec.name} serves again")
                return starts
        return failed

    async def _give_up(self, part: Part, failed: PartFailed) -> PartFailed:
        """Return the failure, or never if another part of the pool has not been given up."""
        self._given_up.add(part.spec.name)
        others = [other.spec.name for other in self._parts if other.spec.pool == part.spec.pool]
        has_other = not self._given_up.issuperset(others)
        self._on_change(
            f"{failed}; given up after {_MAX_STARTS} starts in a row, the stack "
            f"{'goes on without it' if has_other else 'ends'}; log: {failed.log}"
        )
        if has_other:
            await asyncio.get_running_loop().create_future()
        return failed
