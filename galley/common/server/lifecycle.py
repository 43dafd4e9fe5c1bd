"""Report how far a start has come, stop work when the process is told to stop, and flush telemetry."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from galley.common.metrics.metering import Metering
from galley.common.tracing.telemetry import Telemetry

R = TypeVar("R")


class Readiness:
    """Report the start as JSON lines on the file descriptor `fd`, or nowhere if it is None."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def stage(self, stage: str, **facts: object) -> None:
        self._write({"stage": stage, **facts})

    def ready(self, address: str, **facts: object) -> None:
        self._write({"stage": "ready", "address": address, **facts})
        self.close()

    def close(self) -> None:
        """Close the descriptor; a reader that has not read "ready" knows that the start failed."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def _write(self, line: dict[str, object]) -> None:
        if self._fd is None:
            return
        # A reader that has gone away must not keep a server from serving.
        with suppress(BrokenPipeError):
            os.write(self._fd, json.dumps(line).encode() + b"\n")


async def run_unless(stopped: asyncio.Event, work: Coroutine[Any, Any, R]) -> R | None:
    """Return the result of `work`, or None if `stopped` was set first, which cancels `work`.

    `work` has ended when this returns or raises. Exceptions of `work` pass.
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


async def flush_telemetry(telemetry: Telemetry, metering: Metering) -> None:
    """Send the remaining traces and metrics at the same time; a second call sends nothing."""
    await asyncio.gather(metering.close(), asyncio.to_thread(telemetry.shutdown))
