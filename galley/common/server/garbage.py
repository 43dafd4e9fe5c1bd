"""Full garbage collections once a process has grown, and not after so many new objects.

A full collection visits all objects while every stream waits: 0.25 s where a gateway has 400 streams, or a
target 5,000 idle ones. Ended calls are freed without one (docs/decisions/076).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from galley.common.metrics.process import resident_bytes

_YOUNG = (700, 5)
"""New objects before a collection of these, and such collections before one of those that outlived one."""
_NEVER = 2**31 - 1
_GROWTH_BYTES = 256 << 20
_LOOK_S = 1.0


async def collect_as_it_grows(resident: Callable[[], int] = resident_bytes, look_s: float = _LOOK_S) -> None:
    """Collect all garbage whenever resident memory has grown by 256 MiB since the last time; never return.

    Collections skip what exists now, such as modules and a model, which lives as long as the process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_YOUNG, _NEVER)
    least = resident()
    while True:
        await asyncio.sleep(look_s)
        size = resident()
        least = min(least, size)
        if size - least >= _GROWTH_BYTES:
            gc.collect()
            least = resident()
