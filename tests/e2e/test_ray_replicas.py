"""Two replicas of three ranks on a local Ray: a rank dies while 16 streams run, and no stream notices."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from services.cli.stack import Stack, StackOptions
from services.client.client import GalleyClient
from services.client.options import GenerateOptions, Speculation
from services.common.registry import TARGET_POOL, ReplicaRegistry
from services.core.routing import ReplicaLease
from services.gateway.tokenizer import Tokenizer
from tests.e2e.prompts import PROMPTS, encode
from tests.e2e.reference import Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

REPLICAS, RANKS, STREAMS = 2, 3, 16
MAX_TOKENS = 12
OPTIONS = GenerateOptions(temperature=0.0, max_tokens=MAX_TOKENS, speculation=Speculation(off=True))
HEALED_S = 120.0


async def test_a_killed_rank_is_a_pause(default_model_dir: Path) -> None:
    prompts = PROMPTS[:STREAMS]
    options = StackOptions(
        dtype="float32",
        replicas=REPLICAS,
        tensor_parallel=RANKS,
        extra_args={
            "target": ["--kv-memory-mb", "64"],
            "gateway": ["--target-timeout-s", "60"],
        },
        stop_grace_s=30.0,
    )
    async with Stack(options) as stack, GalleyClient(stack.gateways[0]) as client:
        before = await replaced(stack, {})
        assert {lease.ranks for lease in before.values()} == {RANKS}
        assert len({lease.fingerprint for lease in before.values()}) == 1

        underway = [asyncio.Event() for _ in prompts]

        async def answer(index: int) -> list[int]:
            tokens: list[int] = []
            async for event in client.generate(prompts[index], **OPTIONS):
                if event.WhichOneof("event") == "chunk":
                    tokens += event.chunk.token_ids
                    underway[index].set()
            return tokens

        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(answer(index)) for index in range(STREAMS)]
            await asyncio.gather(*(event.wait() for event in underway))
            assert not all(task.done() for task in answers), "nothing was under way any more"
            follower(stack.pid("target")).send_signal(signal.SIGKILL)
        healed = await replaced(stack, before)
        assert len(set(healed) & set(before)) == REPLICAS - 1, "the other replica did not live on"

    reference = Reference(default_model_dir)
    token_ids = encode(Tokenizer.load(str(default_model_dir)), prompts)
    for ids, task in zip(token_ids, answers, strict=True):
        reference.excuse(ids, task.result(), reference.greedy(ids, MAX_TOKENS))


def follower(pid: int) -> psutil.Process:
    """A rank other than 0 of some replica of the deployment `pid`."""
    return next(
        process
        for process in psutil.Process(pid).children(recursive=True)
        if "ray::Follower" in " ".join(process.cmdline())
    )


async def leases(stack: Stack) -> dict[str, ReplicaLease]:
    """The replicas that are registered, by the name of their life."""
    registry = ReplicaRegistry(f"unix://{stack.address('valkey')}")
    try:
        return {lease.incarnation: lease for lease in await registry.read(TARGET_POOL)}
    finally:
        await registry.close()


async def replaced(stack: Stack, before: dict[str, ReplicaLease]) -> dict[str, ReplicaLease]:
    """The leases once all replicas are registered, not all of them as `before`."""
    async with asyncio.timeout(HEALED_S):
        while True:
            now = await leases(stack)
            if len(now) == REPLICAS and set(now) != set(before):
                return now
            await asyncio.sleep(0.1)
