"""Draft services in a real grpc.aio server, without a process of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from galley.common.server.server import Parts, RunningServer, start_server
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.__main__ import build
from services.draft.settings import DraftSettings


@asynccontextmanager
async def drafting(**given: Any) -> AsyncIterator[rpc.DraftAsyncStub]:
    async with (
        draft_server(**given) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        yield rpc.DraftStub(channel)


@asynccontextmanager
async def draft_server(parts: Parts | None = None, /, **given: Any) -> AsyncIterator[RunningServer]:
    settings = DraftSettings(**{"max_draft_tokens": 8, "drain_timeout_s": 5} | given)
    running = await start_server(settings, build(settings), parts)
    try:
        yield running
    finally:
        await running.stop()
