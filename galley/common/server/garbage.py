"""Seldom make full garbage collections: all streams wait for each.

A full collection visits all objects: it takes 0.25 s where a gateway has 400 streams, or a target 5,000 idle
ones. Ended calls leave few objects that only a collection frees (docs/decisions/076).
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable
from contextlib import suppress

from galley.common.metrics.process import resident_bytes

_YOUNG = (700, 5)
"""The thresholds of the two younger generations, whose collections take about a millisecond."""
_NEVER = 2**31 - 1
_GROWTH_BYTES = 256 << 20
_LOOK_S = 1.0
_MOST_LOOKS = 600


def collect_seldom(
    resident: Callable[[], int] = resident_bytes, look_s: float = _LOOK_S
) -> asyncio.Task[None]:
    """Collect all garbage now, and whenever memory has grown by 256 MiB, or ten minutes have passed.

    Return the task that does so. Collections skip what exists now, such as modules and a model, which lives
    as long as the process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_YOUNG, _NEVER)
    return asyncio.create_task(_collect_when_due(resident, look_s))


async def _collect_when_due(resident: Callable[[], int], look_s: float) -> None:
    size = least = math.inf  # not known yet
    looks = 0
    while True:
        await asyncio.sleep(look_s)
        with suppress(OSError):  # all file descriptors are taken, or this is not Linux
            size = resident()
        least, looks = min(least, size), looks + 1
        if size - least >= _GROWTH_BYTES or looks == _MOST_LOOKS:
            gc.collect()
            least, looks = math.inf, 0
