"""Count the tasks that the event loop starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def count_tasks() -> Callable[[], int]:
    """Return a function that returns how many tasks the running loop has started since this call."""
    loop, tasks = asyncio.get_running_loop(), 0

    def make(of: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal tasks
        tasks += 1
        return asyncio.Task(work, loop=of, **options)

    loop.set_task_factory(make)
    return lambda: tasks
