"""What a process has to tell of itself at its end: traces and metrics leave at the same time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.common.metrics.metering import Metering
    from services.common.telemetry import Telemetry


async def say_last_words(telemetry: Telemetry, metering: Metering) -> None:
    """Send what is left, for at most FLUSH_S (`services.common.otlp`) in all; a second time sends nothing."""
    await asyncio.gather(metering.close(), asyncio.to_thread(telemetry.shutdown))
