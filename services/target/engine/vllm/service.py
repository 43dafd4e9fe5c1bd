"""A target replica whose engine is vLLM; it ends when the engine core or one of its ranks fails."""

from __future__ import annotations

import asyncio

import grpc

from galley.common.server.process import in_passing_thread, limit_threads
from galley.common.server.server import Parts, Service
from services.target.engine.vllm.core import VllmCore
from services.target.engine.vllm.loading import load_core
from services.target.engine.vllm.target import VllmEngine
from services.target.ranks.ranks import LossExit, withdraw
from services.target.servicer import TargetService, add_target, registered_target
from services.target.settings import TargetSettings, memory_reported


class _ServedCore:
    grpc_services = TargetService.grpc_services

    def __init__(self, core: VllmCore) -> None:
        self._core = core
        self._target: TargetService | None = None
        self._service: Service | None = None
        self._exit = LossExit(self._withdraw, "engine core lost")
        core.on_loss = self._exit.begin

    async def serve(self, server: grpc.aio.Server, parts: Parts, settings: TargetSettings) -> None:
        self._target = await add_target(server, parts, VllmEngine(self._core), settings)
        self._target.call_on_loss(self._exit.begin)
        self._service = registered_target(self._target, settings, parts.address)

    async def drain(self) -> None:
        if self._service is not None:
            await self._service.drain()

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()  # which waits for the running step, also for one that hangs
        self._exit.disarmed = True
        await asyncio.to_thread(self._core.close)

    async def _withdraw(self) -> None:
        if self._service is not None and self._target is not None:
            await withdraw(self._service, self._target)


async def start_vllm_target(settings: TargetSettings, server: grpc.aio.Server, parts: Parts) -> Service:
    """Return the started target. Raise UnsupportedModel, OutOfMemory or ValueError."""
    limit_threads(settings.thread_count)  # before torch is imported
    parts.readiness.stage("loading model", detail=settings.model)
    with memory_reported(settings):
        core = await in_passing_thread(load_core, settings, settings.vllm_arguments)
    served = _ServedCore(core)
    try:
        await served.serve(server, parts, settings)
    except BaseException:
        await served.close()
        raise
    return served
