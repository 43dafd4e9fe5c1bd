"""Two replicas of several ranks on a local Ray: streams survive a killed rank and a removed replica.

A rank is killed while streams run. Then the deployment is scaled to one replica, which keeps its sessions.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import torch
from transformers import AutoModelForCausalLM

from galley.client.client import AsyncClient
from galley.client.options import GenerateOptions, Speculation
from galley.common.models.tokenizer import Tokenizer
from galley.common.registry.leases import TARGET_POOL, ReplicaRegistry
from galley.core.routing.choice import TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from galley.stack.stack import Stack, StackOptions
from tests.e2e.prompts import PROMPTS, encode
from tests.e2e.reference import TIE
from tests.fakes.verify_items import slice_of, verify

REPLICAS, RANKS = 2, 3
SESSION = [5, 8, 13, 21, 34]
HEALED_S = 120.0


@dataclass(slots=True)
class Trial:
    """One stack of the model in `directory`; `seconds` is how long each part took."""

    directory: Path
    streams: int
    max_tokens: int
    ranks: int = RANKS
    # Kill Ray's head at the end instead of stopping in order.
    lose_head: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    # Tokens that differ from transformers' where its two best logits are a tie.
    ties: int = 0

    async def run(self, scratch: Path) -> None:
        """Run the trial. Raises AssertionError if a client notices anything."""
        since = time.monotonic()
        count_file = scratch / "replicas"
        count_file.write_text(str(REPLICAS))
        async with Stack(self._options(count_file)) as stack:
            since = self._note("start", since)
            before = await leases(stack)
            assert len(before) == REPLICAS, "ready, but not all replicas are registered"
            assert {lease.ranks for lease in before.values()} == {self.ranks}
            assert len({lease.fingerprint for lease in before.values()}) == 1

            kill = follower(stack.pid("target")).kill
            answers = await self._answers_while(stack, self.streams, kill)
            since = self._note("streams while a rank is killed", since)
            healed = await until(stack, lambda now: len(now) == REPLICAS and set(now) != set(before))
            assert len(set(healed) & set(before)) == REPLICAS - 1, "the other replica did not live on"
            since = self._note("until the replica is there again", since)

            answers += await self._scale_down(stack, healed, count_file)
            since = self._note("scaling down", since)
            if self.lose_head:
                await lose_head(stack)
        since = self._note("stop", since)
        self._check(answers)
        self._note("checking tokens", since)

    def _options(self, count_file: Path) -> StackOptions:
        return StackOptions(
            model=str(self.directory),
            dtype="float32",
            replicas=REPLICAS,
            tensor_parallel=self.ranks,
            draft_model="none",
            extra_args={
                "target": ["--kv-memory-mb", "64", "--replicas-file", str(count_file)],
                "gateway": ["--target-timeout-s", "60"],
            },
            stop_grace_s=30.0,
        )

    async def _scale_down(
        self, stack: Stack, replicas: dict[str, TargetLease], count_file: Path
    ) -> list[list[int]]:
        """Scale to one replica while streams run; the one that stays must keep its session's KV."""
        held = {name: await open_session(lease.address) for name, lease in replicas.items()}

        def fewer() -> None:
            count_file.write_text("1")
            stack.send("target", signal.SIGHUP)

        answers = await self._answers_while(stack, self.streams // 4, fewer)
        (stays,) = await until(stack, lambda now: len(now) == 1)
        assert stays in replicas, "the replica that stayed was started anew"
        await continue_session(replicas[stays].address, held[stays])
        return answers

    async def _answers_while(self, stack: Stack, count: int, disturb: Any) -> list[list[int]]:
        """Return answers to the first prompts; call `disturb` once all have begun and none has ended."""
        started = [asyncio.Event() for _ in range(count)]

        async def answer(index: int) -> list[int]:
            tokens: list[int] = []
            options = GenerateOptions(
                temperature=0.0,
                max_tokens=self.max_tokens,
                ignore_eos=True,
                speculation=Speculation(off=True),
            )
            async for event in client.stream(PROMPTS[index], **options):
                if event.WhichOneof("event") == "chunk":
                    tokens += event.chunk.token_ids
                    started[index].set()
            return tokens

        async with AsyncClient(stack.gateways[0]) as client, asyncio.TaskGroup() as group:
            answers = [group.create_task(answer(index)) for index in range(count)]
            await asyncio.gather(*(event.wait() for event in started))
            assert not any(task.done() for task in answers), "an answer ended too early"
            disturb()
        return [task.result() for task in answers]

    def _check(self, answers: Sequence[Sequence[int]]) -> None:
        """Each token must be the likeliest by transformers, after those before it."""
        model = cast("Any", AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)).eval()
        token_ids = encode(Tokenizer.load(str(self.directory)), PROMPTS[: self.streams])
        for prompt, answer in zip([*token_ids, *token_ids[: self.streams // 4]], answers, strict=True):
            assert len(answer) == self.max_tokens
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            short_by = logits.max(dim=-1).values - logits[range(len(answer)), list(answer)]
            assert float(short_by.max()) <= TIE, f"token {int(short_by.argmax())} is not the likeliest"
            self.ties += int((short_by > 0).sum())

    def _note(self, what: str, since: float) -> float:
        now = time.monotonic()
        self.seconds[what] = round(now - since, 1)
        return now


async def lose_head(stack: Stack) -> None:
    """Kill Ray's head: the deployment must say so by its end, and leave no process behind."""
    left = psutil.Process(stack.pid("target")).children(recursive=True)
    next(process for process in left if "gcs_server" in process.name()).kill()
    async with asyncio.timeout(HEALED_S):
        failure = await stack.failure()
    stack.forget()
    assert (failure.name, failure.problem) == ("target", "ended with exit code 1"), failure
    _, alive = await asyncio.to_thread(psutil.wait_procs, left, HEALED_S)
    assert not alive, alive


def follower(pid: int) -> psutil.Process:
    """A rank other than 0 of some replica of the deployment `pid`."""
    return next(
        process
        for process in psutil.Process(pid).children(recursive=True)
        if "ray::Follower" in " ".join(process.cmdline())
    )


async def leases(stack: Stack) -> dict[str, TargetLease]:
    """The replicas that are registered, by the name of their life."""
    registry = ReplicaRegistry(f"unix://{stack.address('valkey')}")
    try:
        return {lease.incarnation: lease for lease in await registry.read(TARGET_POOL)}
    finally:
        await registry.close()


async def until(stack: Stack, is_so: Any) -> dict[str, TargetLease]:
    """The leases, once they are so. Raises TimeoutError."""
    async with asyncio.timeout(HEALED_S):
        while True:
            if is_so(now := await leases(stack)):
                return now
            await asyncio.sleep(0.1)


async def open_session(address: str) -> list[int]:
    """The tokens of a session that the replica holds from now on."""
    async with target_at(address) as target:
        (answer,) = await verify(target, pb.VerifyItem(slice=slice_of(SESSION)))
    assert answer.WhichOneof("outcome") == "result", answer
    return [*SESSION, *answer.result.tokens]


async def continue_session(address: str, tokens: list[int]) -> None:
    """Send the last token alone: a replica that holds the others takes it."""
    async with target_at(address) as target:
        item = pb.VerifyItem(slice=slice_of(tokens, start=len(tokens) - 1))
        (answer,) = await verify(target, item)
    assert answer.WhichOneof("outcome") == "result", answer


@asynccontextmanager
async def target_at(address: str) -> AsyncIterator[rpc.TargetAsyncStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield rpc.TargetStub(channel)
