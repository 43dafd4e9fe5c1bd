"""A second principal, which streams and calls beside an attack, and notes how long it waits.

It uses one protocol of the gateway (`PROTOCOLS`), in the event loop of a test, or in a process of its own
(`python -m tests.attack.bystander PROTOCOL ADDRESS`), where an attacker's work in Python does not delay it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from http import HTTPStatus
from itertools import count
from typing import Protocol

import grpc

from galley.client.client import AsyncClient, GalleyRpcError
from tests.fakes.http_client import BODY, HttpClient, http_client
from tests.fakes.truth import SEED, text_of, true_output
from tests.fakes.waiting import PATIENCE_S, Watch
from tests.fakes.world import MAX_TOKENS as TOKENS
from tests.fakes.world import PROMPT

GOOD = "good-3f9a1c77"
TRUTH = true_output(list(PROMPT.encode()), TOKENS)
_EVERY_S = 0.01


class Caller(Protocol):
    """A caller with the key GOOD, by one protocol of the gateway."""

    def stream(self) -> AsyncIterator[str]:
        """Yield the texts of a streamed answer of TOKENS tokens to PROMPT, with SEED."""

    async def call(self) -> None:
        """Make a unary call; fail if its response is not the expected one."""


class GrpcCaller:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._calls = count()

    async def stream(self) -> AsyncIterator[str]:
        stream = self._client.stream(PROMPT, max_tokens=TOKENS, seed=SEED, ignore_eos=True)
        async for event in stream:
            yield event.chunk.text
        assert stream.tokens == TRUTH, f"disturbed: {stream.tokens} is not {TRUTH}"

    async def call(self) -> None:
        """Ask for the model, or, every second time, for something that only the store can answer."""
        if next(self._calls) % 2:
            await self._abort_nothing()
        else:
            assert (await self._client.model_info(timeout_s=PATIENCE_S)).max_sessions

    async def _abort_nothing(self) -> None:
        try:
            await self._client.abort("0" * 32, timeout_s=PATIENCE_S)
        except GalleyRpcError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise


@asynccontextmanager
async def grpc_caller(address: str) -> AsyncIterator[Caller]:
    async with AsyncClient(address, api_key=GOOD) as client:
        yield GrpcCaller(client)


class HttpCaller:
    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._calls = count()

    async def stream(self) -> AsyncIterator[str]:
        last = ""
        async with self._client.open("/v1/completions", BODY) as response:
            assert response.status_code == HTTPStatus.OK, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])["choices"][0]["text"]
                last = line or last
        assert last == "data: [DONE]", f"disturbed: {last}"

    async def call(self) -> None:
        """Ask for the model, or, every second time, for something that only the store can answer."""
        path, status = "/v1/models", HTTPStatus.OK
        if next(self._calls) % 2:
            path, status = f"/v1/sessions/{'0' * 32}", HTTPStatus.NOT_FOUND
        response = await self._client.raw.get(path)
        assert response.status_code == status, response.text


@asynccontextmanager
async def http_caller(address: str) -> AsyncIterator[Caller]:
    async with http_client(address, x_api_key=GOOD) as client:
        yield HttpCaller(client)


GRPC = "grpc"
PROTOCOLS: dict[str, Callable[[str], AbstractAsyncContextManager[Caller]]] = {
    GRPC: grpc_caller,
    "http": http_caller,
}
"""By name: makes a caller of the gateway at an address."""


class Waits:
    """Waiting times from now on. A long one counts as all those that would have begun in it, one every 10 ms.

    Without this correction for coordinated omission (as in HdrHistogram), a pause of 3 s is one wait among
    thousands.
    """

    def __init__(self) -> None:
        self._waits_s: list[float] = []
        self._since_s = time.monotonic()

    def add(self, began_s: float) -> None:
        """Note a wait that ends now; what came before these waits is left out."""
        wait_s = time.monotonic() - max(began_s, self._since_s)
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
    def __init__(self, caller: Caller) -> None:
        self.answers = self.calls = 0
        self._chunks, self._responses = Waits(), Waits()
        self._caller = caller
        self._progress = Watch()
        self._stopping = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._stream())
            loops.create_task(self._call())

    def stop(self) -> None:
        """End `run` after the stream and the call that are open."""
        self._stopping = True

    async def progress(self, count: int = 2) -> None:
        """Wait until `count` answers and calls have ended; of two, one began after now."""
        answers, calls = self.answers + count, self.calls + count
        await self._progress.until(lambda: self.answers >= answers and self.calls >= calls)

    def report(self) -> dict[str, float]:
        """Return what was noted since the last report; waits are in milliseconds."""
        chunks, responses = self._chunks, self._responses
        self._chunks, self._responses = Waits(), Waits()
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
            text = await self._read_stream()
            assert text == text_of(TRUTH), f"disturbed: {text!r}"
            self.answers += 1
            self._progress.changed()

    async def _read_stream(self) -> str:
        texts: list[str] = []
        received_s = time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            async for text in self._caller.stream():
                texts.append(text)
                self._chunks.add(received_s)
                received_s = time.monotonic()
        return "".join(texts)

    async def _call(self) -> None:
        while not self._stopping:
            began_s = time.monotonic()
            async with asyncio.timeout(PATIENCE_S):
                await self._caller.call()
            self._responses.add(began_s)
            self.calls += 1
            self._progress.changed()
            await asyncio.sleep(_EVERY_S)


@asynccontextmanager
async def beside(caller: Caller) -> AsyncIterator[Bystander]:
    """Run a bystander, which must end without a wrong answer."""
    bystander = Bystander(caller)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bystander.run())
        await bystander.progress(1)
        yield bystander
        bystander.stop()


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
        line = self._process.stdout.readline()
        assert line, "the bystander was disturbed"
        report: dict[str, float] = json.loads(line)
        return report


@contextmanager
def bystander_process(protocol: str, address: str) -> Iterator[BystanderProcess]:
    command = (sys.executable, "-m", "tests.attack.bystander", protocol, address)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield BystanderProcess(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0, "the bystander was disturbed"
        finally:
            process.kill()


async def _serve(protocol: str, address: str) -> None:
    async with PROTOCOLS[protocol](address) as caller, beside(caller) as bystander:
        while await asyncio.to_thread(sys.stdin.readline):
            sys.stdout.write(json.dumps(bystander.report()) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
