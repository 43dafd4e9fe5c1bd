"""A target process whose device fails while it serves."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc

from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.verify_items import slice_of
from tests.fakes.waiting import PATIENCE_S

# As CUDA does after an illegal access: each call fails from then on.
_FAILING = """
import torch
from galley.engine.model import CausalModel
from services.target import __main__ as target

def fail(*_, **__):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

async def add_failing(*args, add=target.add_target):
    service = await add(*args)
    CausalModel.run_with_states = fail
    return service

target.add_target = add_failing
target.main()
"""


async def test_a_replica_whose_device_has_failed_exits(tiny: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    flags = ["--model", str(tiny), "--kv-memory-mb", "1", "--port", "0", "--ready-fd", str(write)]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _FAILING, *flags, pass_fds=[write], stdout=log, stderr=log
        )
    os.close(write)
    try:
        address = (await asyncio.to_thread(_stages, read))[-1]["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            item = pb.VerifyItem(slice=slice_of([1, 2, 3]), credit=1)
            response = await rpc.TargetStub(channel).Verify(pb.VerifyRequest(items=[item]))
        assert response.answers[0].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert "engine lost" in (tmp_path / "log").read_text()


def _stages(read: int) -> list[dict[str, str]]:
    """Return what the process reports of its start."""
    with os.fdopen(read) as lines:
        return [json.loads(line) for line in lines]
