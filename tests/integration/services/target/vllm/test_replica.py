"""A replica with vLLM as a process: it serves like any other, and ends when one of vLLM's ranks does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.tiny_model import VLLM_HEAD_SIZE, greedy, save_tiny_model
from tests.integration.services.ray.test_replica import COUNT, LOST, PROMPT, SIZE, running, serves
from tests.integration.services.target.vllm.conftest import MARKS

pytestmark = [*MARKS, pytest.mark.proof]
# vLLM waits for its other processes before it reports one that has ended.
SOON_S = 240.0


def rank_processes(pids: list[int]) -> list[psutil.Process]:
    """Return the ranks; Python also starts a tracker of shared memory."""
    children = (psutil.Process(pid) for pid in pids)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), head_size=VLLM_HEAD_SIZE)


async def test_a_replica_serves_and_ends_with_a_rank(tiny_dir: Path) -> None:
    expected = greedy(tiny_dir, PROMPT, COUNT)
    async with running(tiny_dir, "--engine", "vllm") as replica:
        info = await replica.target.GetTargetInfo(pb.GetTargetInfoRequest())
        assert info.ranks == SIZE
        assert info.fingerprint
        await serves(replica.target, expected)
        # Noticed although no step runs.
        os.kill(rank_processes(replica.followers)[0].pid, signal.SIGKILL)
        assert await replica.ended(SOON_S) == LOST
