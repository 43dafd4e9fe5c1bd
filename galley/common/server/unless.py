"""Work that is given up when the process is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


async def unless(stopped: asyncio.Event, work: Coroutine[Any, Any, R]) -> R | None:
    """The result of `work`, or None if `stopped` was set first: then `work` is cancelled.

    It has ended when this returns or raises, whatever the reason. What it raises, this raises.
    """
    task, stop = asyncio.create_task(work), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        given_up = not task.done()
    finally:
        for each in (task, stop):
            each.cancel()
        await asyncio.wait({task, stop})
    return None if given_up and task.cancelled() else task.result()
