"""What a process has to tell of itself at its end: traces and metrics leave at the same time."""

from __future__ import annotations

import asyncio

from galley.common.metrics.metering import Metering
from galley.common.tracing.telemetry import Telemetry


async def say_last_words(telemetry: Telemetry, metering: Metering) -> None:
    """Send what is left within FLUSH_S (`galley.common.tracing.otlp`); a second time sends nothing."""
    await asyncio.gather(metering.close(), asyncio.to_thread(telemetry.shutdown))
