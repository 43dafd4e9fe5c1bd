"""A target process whose device fails or hangs while it serves."""

from __future__ import annotations

import asyncio
import json
import os
import sys
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

loop.LONGEST_STEP_S = 0.5

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


@pytest.mark.parametrize(("failure", "logged"), _FAILURES.values(), ids=_FAILURES)
async def test_a_replica_whose_device_does_not_work_exits(
    failure: str, logged: str, tiny: Path, tmp_path: Path
) -> None:
    read, write = os.pipe()
    flags = ["--model", str(tiny), "--kv-memory-mb", "1", "--port", "0", "--ready-fd", str(write)]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _SERVES_UNTIL_A_STEP.format(failure=failure),
            *flags,
            pass_fds=[write],
            stdout=log,
            stderr=log,
        )
    os.close(write)
    try:
        address = (await asyncio.to_thread(_stages, read))[-1]["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            item = pb.VerifyItem(slice=slice_of([1, 2, 3]), credit=1)
            assert await _status(rpc.TargetStub(channel), item) == grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert logged in (tmp_path / "log").read_text()


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
