"""A replica of two ranks, as processes without Ray: it serves as one process does, and ends as one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.ray.leader import LOST
from tests.target.items import generate, slice_of, verify
from tests.target.tiny import greedy, save_tiny_model

SIZE = 2
PROMPT, COUNT = [3, 5, 8, 13, 21], 12
# A closed connection is noticed at once; this is for a slow machine.
SOON_S = 30.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass(frozen=True)
class Replica:
    process: asyncio.subprocess.Process
    followers: list[int]
    target: rpc.TargetAsyncStub

    async def ended(self) -> int:
        async with asyncio.timeout(SOON_S):
            return await self.process.wait()


@asynccontextmanager
async def running(model: Path) -> AsyncIterator[Replica]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.ray.leader", str(model), str(SIZE)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            if line.startswith(b'{"address"'):
                break
        else:
            pytest.fail("the replica did not start")
        told = json.loads(line)
        async with grpc.aio.insecure_channel(told["address"]) as channel:
            yield Replica(process, told["followers"], rpc.TargetStub(channel))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    gone = [psutil.Process(pid) for pid in told["followers"] if psutil.pid_exists(pid)]
    _, alive = await asyncio.to_thread(psutil.wait_procs, gone, SOON_S)
    assert not alive, "a follower outlived its replica"


async def test_two_ranks_serve_what_one_process_says_and_end_together(tiny: Path) -> None:
    expected = greedy(tiny, PROMPT, COUNT)
    async with running(tiny) as replica:
        info = await replica.target.GetTargetInfo(pb.GetTargetInfoRequest())
        assert info.ranks == SIZE
        assert info.deterministic

        def draft(tokens: list[int]) -> list[int]:
            done = len(tokens) - len(PROMPT)
            return expected[done : done + 3]

        tokens, accepted = await generate(replica.target, PROMPT, COUNT, draft)
        assert tokens == expected
        assert max(accepted) > 0

        os.kill(replica.followers[0], signal.SIGKILL)
        (answer,) = await verify(replica.target, pb.VerifyItem(slice=slice_of(PROMPT, session_id="new")))
        assert answer.WhichOneof("outcome") == "status", "a pass without a rank was answered"
        assert await replica.ended() == LOST
