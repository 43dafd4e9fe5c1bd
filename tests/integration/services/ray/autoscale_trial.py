"""A deployment that grows while its replicas are busy, and shrinks when they idle again, on a real Ray."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc

from galley.common.registry.leases import TARGET_POOL, ReplicaRegistry
from galley.core.routing.choice import TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.redis_servers import VALKEY, running
from tests.fakes.tiny_model import CONTEXT, save_tiny_model
from tests.fakes.verify_items import slice_of

# More than autoscaling.BUSY_QUEUE a replica, also when there are two.
SESSIONS = 24
SOON_S = 90.0


@asynccontextmanager
async def deployed(model: Path, redis_url: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.target.ray", "--model", str(model), "--kv-memory-mb", "8"),
        *("--replicas", "1", "--max-replicas", "2", "--upscale-delay-s", "0", "--downscale-delay-s", "1"),
        env={**os.environ, "OMP_NUM_THREADS": "1", "GALLEY_TARGET_REDIS_URL": redis_url},
    )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def until(registry: ReplicaRegistry, replicas: int) -> list[TargetLease]:
    async with asyncio.timeout(SOON_S):
        while True:
            if len(leases := await registry.read(TARGET_POOL)) == replicas:
                return leases
            await asyncio.sleep(0.1)


async def keep_busy(address: str) -> None:
    async def session(target: rpc.TargetAsyncStub, name: str) -> None:
        for turn in range(10**6):
            item = pb.VerifyItem(slice=slice_of([turn % 7, 3, 5], session_id=name), credit=CONTEXT)
            call = target.VerifyStream()
            await call.write(pb.VerifyStreamRequest(items=[item]))
            async for response in call:
                if not all(answer.result.more for answer in response.answers):
                    break
            call.cancel()

    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        target = rpc.TargetStub(channel)
        for number in range(SESSIONS):
            group.create_task(session(target, f"s{number}"))


async def run(scratch: Path) -> dict[str, float]:
    model = save_tiny_model(scratch)
    with running(VALKEY) as store:
        registry = ReplicaRegistry(store.url)
        async with deployed(model, store.url):
            (first,) = await until(registry, 1)
            since = time.monotonic()
            busy = asyncio.create_task(keep_busy(first.address))
            both = await until(registry, 2)
            grown = time.monotonic()
            busy.cancel()
            with suppress(asyncio.CancelledError):
                await busy
            (left,) = await until(registry, 1)
            seconds = {"growing": grown - since, "shrinking": time.monotonic() - grown}
            assert left.incarnation in {lease.incarnation for lease in both}
        await registry.close()
    return seconds
