"""A replica on Ray, without Ray: its ports beside others of its node, and its end when a step hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from galley.engine.model import CausalModel
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target import loop
from services.target.settings import TargetSettings
from tests.fakes.verify_items import slice_of
from tests.fakes.waiting import PATIENCE_S
from tests.integration.galley.common.test_scrape import ask

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, against pydantic
    from services.target.ray import replica as leading
    from services.target.ray.replica import Leader


def settings_of(model: Path, metrics_port: int = 0) -> TargetSettings:
    return TargetSettings(
        model=str(model), dtype="float32", kv_memory_mb=1, threads=1, metrics_port=metrics_port
    )


@asynccontextmanager
async def leading_at(model: Path, metrics_port: int) -> AsyncIterator[tuple[str, str]]:
    leader = Leader(settings_of(model, metrics_port))
    try:
        yield await leader.serve(None), leader._metering.address
    finally:
        await leader.stop()


async def must_serve(address: str, metrics: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await rpc.TargetStub(channel).GetTargetInfo(pb.GetTargetInfoRequest())
    status, _, body = await ask(metrics, "GET /metrics HTTP/1.1\r\n\r\n")
    assert status == 200
    assert 'galley_build_info{service="target"' in body


async def test_replicas_that_find_the_port_taken_serve_at_others(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as replicas:
        taken = replicas.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = taken.getsockname()[1]
        first = await replicas.enter_async_context(leading_at(tiny, port))
        monkeypatch.setattr(leading, "METRICS_PORTS", 1)
        second = await replicas.enter_async_context(leading_at(tiny, port))
        served = {metrics for _, metrics in (first, second)}
        assert len(served) == 2
        assert f"127.0.0.1:{port}" not in served
        await asyncio.gather(must_serve(*first), must_serve(*second))


async def test_a_replica_whose_step_hangs_ends(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, ends, thaw = Leader(settings_of(tiny)), asyncio.Event(), threading.Event()
    monkeypatch.setattr(leader.exit, "begin", ends.set)
    monkeypatch.setattr(loop, "LONGEST_STEP_S", 0.2)
    address = await leader.serve(None)
    monkeypatch.setattr(CausalModel, "run_with_states", lambda *_, **__: thaw.wait())
    try:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(PATIENCE_S):
            item = pb.VerifyItem(slice=slice_of([1, 2, 3]), credit=1)
            verifying = rpc.TargetStub(channel).Verify(pb.VerifyRequest(items=[item]))
            await ends.wait()
            verifying.cancel()
    finally:
        thaw.set()
        await leader.stop()
