"""A second principal, which streams and calls beside an attack, and notes how long it waits.

It runs in the event loop of a test, or in a process of its own (`python -m tests.attack.bystander ADDRESS`):
there an attacker's work in Python does not count as a wait.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from galley.client.client import AsyncClient, GalleyRpcError
from tests.fakes.truth import SEED, true_output
from tests.fakes.waiting import PATIENCE_S

GOOD = "good-3f9a1c77"
_PROMPT = "Tell me more."
_TOKENS = 40
_TRUTH = true_output(list(_PROMPT.encode()), _TOKENS)
_EVERY_S = 0.01


class Waits:
    """Waiting times. A long one counts as all those that would have begun in it, one every 10 ms.

    Without this correction for coordinated omission (as in HdrHistogram), a pause of 3 s is one wait among
    thousands.
    """

    def __init__(self) -> None:
        self._waits_s: list[float] = []

    def add(self, wait_s: float) -> None:
        self._waits_s.append(wait_s)
        for missed in range(1, int(wait_s / _EVERY_S)):
            self._waits_s.append(wait_s - missed * _EVERY_S)

    @property
    def longest_s(self) -> float:
        return max(self._waits_s, default=0.0)

    @property
    def p99_s(self) -> float:
        return sorted(self._waits_s)[int(0.99 * len(self._waits_s))] if self._waits_s else 0.0


class Bystander:
    def __init__(self, client: AsyncClient) -> None:
        self.answers = self.calls = 0
        self.chunks, self.responses = Waits(), Waits()
        self.began = asyncio.Event()
        self._client = client
        self._stopping = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._stream())
            loops.create_task(self._call())

    def stop(self) -> None:
        """End `run` after the stream and the call that are open."""
        self._stopping = True

    def report(self) -> dict[str, float]:
        """Return what was noted since the last report; waits are in milliseconds."""
        chunks, responses = self.chunks, self.responses
        self.chunks, self.responses = Waits(), Waits()
        return {
            "answers": self.answers,
            "calls": self.calls,
            "chunk_p99_ms": round(1000 * chunks.p99_s, 1),
            "chunk_longest_ms": round(1000 * chunks.longest_s, 1),
            "call_p99_ms": round(1000 * responses.p99_s, 1),
            "call_longest_ms": round(1000 * responses.longest_s, 1),
        }

    async def _stream(self) -> None:
        while not self._stopping:
            tokens = await self._read_stream()
            assert tokens == _TRUTH, f"disturbed: {tokens} is not {_TRUTH}"
            self.answers += 1

    async def _read_stream(self) -> list[int]:
        tokens: list[int] = []
        received_s = time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            stream = self._client.generate(_PROMPT, max_tokens=_TOKENS, seed=SEED, ignore_eos=True)
            async for event in stream:
                tokens += event.chunk.token_ids
                self.chunks.add(time.monotonic() - received_s)
                received_s = time.monotonic()
                if tokens:
                    self.began.set()
        return tokens

    async def _call(self) -> None:
        while not self._stopping:
            began_s = time.monotonic()
            if self.calls % 2:
                await self._abort_nothing()
            else:
                assert (await self._client.model_info(timeout_s=PATIENCE_S)).max_sessions
            self.responses.add(time.monotonic() - began_s)
            self.calls += 1
            await asyncio.sleep(_EVERY_S)

    async def _abort_nothing(self) -> None:
        try:
            await self._client.abort("0" * 32, timeout_s=PATIENCE_S)
        except GalleyRpcError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise


class BystanderProcess:
    """A bystander in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    async def report(self) -> dict[str, float]:
        return await asyncio.to_thread(self._report)

    def _report(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"report\n")
        self._process.stdin.flush()
        report: dict[str, float] = json.loads(self._process.stdout.readline())
        return report


@contextmanager
def bystander_process(address: str) -> Iterator[BystanderProcess]:
    """Run a bystander, which must end without a wrong answer."""
    command = (sys.executable, "-m", "tests.attack.bystander", address)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield BystanderProcess(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0, "the bystander was disturbed"
        finally:
            process.kill()


async def _serve(address: str) -> None:
    async with AsyncClient(address, api_key=GOOD) as client, asyncio.TaskGroup() as tasks:
        bystander = Bystander(client)
        tasks.create_task(bystander.run())
        await bystander.began.wait()
        while await asyncio.to_thread(sys.stdin.readline):
            sys.stdout.write(json.dumps(bystander.report()) + "\n")
            sys.stdout.flush()
        bystander.stop()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
