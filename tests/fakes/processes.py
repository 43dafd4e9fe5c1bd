"""The gateway, and drafts, as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from tests.fakes.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.fakes.world import World


@asynccontextmanager
async def gateway_process(
    world: World,
    log: Path,
    environment: Mapping[str, str],
    more: Mapping[str, str] = MappingProxyType({}),
    module: str = "services.gateway",
    end: signal.Signals = signal.SIGTERM,
) -> AsyncIterator[Mapping[str, str]]:
    """Start a gateway process and yield its addresses; `end` ends it, SIGTERM cleanly."""
    settings = world.settings()
    flags = {
        "target": settings.target,
        "draft": settings.draft,
        "redis-url": settings.redis_url.get_secret_value(),
        "model": settings.model,
        "target-models": settings.target_models,
        "credit": str(settings.credit),
        **more,
    }
    async with service_process(module, log, environment, flags, end) as reported:
        yield reported


@asynccontextmanager
async def service_process(
    module: str,
    log: Path,
    environment: Mapping[str, str],
    flags: Mapping[str, str],
    end: signal.Signals = signal.SIGTERM,
) -> AsyncIterator[Mapping[str, str]]:
    read_fd, write_fd = os.pipe()
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", module, "--die-with-parent", "--ready-fd", str(write_fd)),
            *(part for name, value in flags.items() for part in (f"--{name}", value)),
            pass_fds=(write_fd,),
            env={**os.environ, **environment},
            stdout=out,
            stderr=out,
        )
    os.close(write_fd)
    try:
        yield await asyncio.to_thread(_ready, read_fd)
        process.send_signal(end)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == (0 if end is signal.SIGTERM else -end)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _ready(read_fd: int) -> Mapping[str, str]:
    with os.fdopen(read_fd) as lines:
        for line in lines:
            if (reported := json.loads(line))["stage"] == "ready":
                return {str(name): str(value) for name, value in reported.items()}
    raise RuntimeError("the process did not start")
