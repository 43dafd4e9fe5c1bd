"""A target process whose device fails or hangs while it serves."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.verify_items import slice_of
from tests.fakes.waiting import PATIENCE_S

_SERVES_UNTIL_A_STEP = """
import threading
import torch
from galley.engine.model import CausalModel
from services.target import __main__ as target
from services.target import loop

loop.LONGEST_STEP_S = {longest_s}

def fail(*_, **__):
    {failure}

async def add_failing(*args, add=target.add_target):
    service = await add(*args)
    CausalModel.run_with_states = fail
    return service

target.add_target = add_failing
target.main()
"""


# As CUDA does after an illegal access, each call fails; or a kernel never ends.
_FAILURES = {
    "fails": ('raise torch.AcceleratorError("CUDA error: an illegal memory access")', "engine lost"),
    "hangs": ("threading.Event().wait()", "step hangs"),
}


@dataclass(frozen=True, slots=True)
class _Replica:
    process: asyncio.subprocess.Process
    address: str
    log: Path

    async def verify(self) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(self.address) as channel:
            item = pb.VerifyItem(slice=slice_of([1, 2, 3]), credit=1)
            return await _status(rpc.TargetStub(channel), item)

    async def ends(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@asynccontextmanager
async def _replica(code: str, tiny: Path, log: Path) -> AsyncIterator[_Replica]:
    read, write = os.pipe()
    flags = ["--model", str(tiny), "--kv-memory-mb", "1", "--port", "0", "--ready-fd", str(write)]
    command = [sys.executable, "-c", code, *flags, "--drain-timeout-s", "0.1"]
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*command, pass_fds=[write], stdout=file, stderr=file)
    os.close(write)
    try:
        yield _Replica(process, (await asyncio.to_thread(_stages, read))[-1]["address"], log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(("failure", "logged"), _FAILURES.values(), ids=_FAILURES)
async def test_a_replica_whose_device_does_not_work_exits(
    failure: str, logged: str, tiny: Path, tmp_path: Path
) -> None:
    code = _SERVES_UNTIL_A_STEP.format(failure=failure, longest_s=0.5)
    async with _replica(code, tiny, tmp_path / "log") as replica:
        assert await replica.verify() == grpc.StatusCode.UNAVAILABLE
        assert await replica.ends() == 1
    assert logged in replica.log.read_text()


async def test_a_replica_that_is_stopped_while_a_step_hangs_exits(tiny: Path, tmp_path: Path) -> None:
    failure = 'print("in the step", flush=True); threading.Event().wait()'
    code = _SERVES_UNTIL_A_STEP.format(failure=failure, longest_s=3)
    async with _replica(code, tiny, tmp_path / "log") as replica:
        asked = asyncio.create_task(replica.verify())
        async with asyncio.timeout(PATIENCE_S):
            while "in the step" not in replica.log.read_text():  # noqa: ASYNC110  # a process has no event
                await asyncio.sleep(0.05)
        replica.process.terminate()
        assert await replica.ends() == 1
        await asked
    assert "step hangs" in replica.log.read_text()


async def _status(target: rpc.TargetAsyncStub, item: pb.VerifyItem) -> grpc.StatusCode:
    """Return the status of the item, or of the call if the process ends before."""
    try:
        response = await target.Verify(pb.VerifyRequest(items=[item]))
    except grpc.aio.AioRpcError as error:
        return error.code()
    code = response.answers[0].status.code
    return next(known for known in grpc.StatusCode if known.value[0] == code)


def _stages(read: int) -> list[dict[str, str]]:
    """Return what the process reports of its start."""
    with os.fdopen(read) as lines:
        return [json.loads(line) for line in lines]
