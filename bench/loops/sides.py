"""The sides of a loop benchmark: a whole stack, or one process that reads blocks from its input."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from galley.bench.answers import Answer
from galley.bench.closed_loop import GatewayLoop, Load, LoopBlock
from galley.client.client import AsyncClient
from galley.stack.stack import Stack

SERVERS = ("valkey", "target", "draft", "gateway")
# An answer's tokens and times are one line.
_MAX_LINE_BYTES = 64 * 2**20
_STOP_S = 20

Encode = Callable[[Sequence[Mapping[str, str]]], list[int]]
"""A function from the messages of a request to token ids."""


class Cpu:
    """The CPU time of processes, user and system, all threads. With `children`, theirs counts too."""

    def __init__(self, pids: Sequence[int], *, children: bool = False) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._children = children

    def seconds(self) -> float:
        """Return the CPU seconds spent so far."""
        processes = list(self._processes)
        if self._children:
            processes += [child for one in self._processes for child in one.children(recursive=True)]
        times = [process.cpu_times() for process in processes]
        return float(sum(spent.user + spent.system for spent in times))


def stack_pids(stack: Stack) -> dict[str, int]:
    """Return the process id of each server of a stack, by part."""
    return {part: stack.pid(part) for part in stack.parts if part in SERVERS}


def stack_loop(stack: Stack, client: AsyncClient) -> GatewayLoop:
    """Return a side that asks the stack's gateway; CPU seconds are those of all its servers."""
    return GatewayLoop(client, Cpu(list(stack_pids(stack).values())).seconds)


def write_keys(path: Path, arms: Iterable[str]) -> dict[str, str]:
    """Write an API key for each arm, which is then a caller of its own; return the keys by arm."""
    keys = {arm: secrets.token_hex(32) for arm in arms}
    entries = (
        f'[[keys]]\nprincipal = "{arm}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
        for arm, key in keys.items()
    )
    path.write_text("\n".join(entries), encoding="utf-8")
    return keys


@dataclass(frozen=True, slots=True)
class Spent:
    """The CPU seconds that each process spent on one block."""

    pair: int
    arm: str
    tokens: int
    cpu_s: Mapping[str, float]


class CountedLoop:
    """A gateway's loop that also keeps CPU seconds by process, counted until `settle_s` after a block.

    Late work of a process, such as exports, then counts for the block that caused it.
    """

    def __init__(self, loop: GatewayLoop, pids: Mapping[str, int], settle_s: float = 0.0) -> None:
        self._loop = loop
        self._cpu = {part: Cpu([pid]) for part, pid in pids.items()}
        self._settle_s = settle_s
        self.spent: list[Spent] = []

    async def run(self, load: Load) -> LoopBlock:
        """Answer a load; `cpu_s` of the block is the sum over all processes."""
        before = {part: cpu.seconds() for part, cpu in self._cpu.items()}
        block = await self._loop.run(load)
        await asyncio.sleep(self._settle_s)
        spent = {part: cpu.seconds() - before[part] for part, cpu in self._cpu.items()}
        self.spent.append(Spent(load.pair, load.arm, block.given, spent))
        return replace(block, cpu_s=sum(spent.values()))


class ProcessLoop:
    """A process that answers blocks of token ids, a JSON line each (see bench/peers/peer_vllm.py)."""

    def __init__(self, process: asyncio.subprocess.Process, encode: Encode) -> None:
        self._process = process
        self._encode = encode
        self._cpu = Cpu([process.pid], children=True)
        self.ready: Any = None

    async def wait_ready(self) -> None:
        """Wait for the first line; raises RuntimeError if the process ends before."""
        self.ready = (await self._line())["ready"]

    async def run(self, load: Load) -> LoopBlock:
        """Send the load and read the answers. Raises RuntimeError if the process ends."""
        prompts = [self._encode(prompt.messages) for prompt in load.prompts]
        work = {
            "streams": load.streams,
            "prompts": prompts,
            "max_tokens": [prompt.max_tokens or load.max_tokens for prompt in load.prompts],
            "temperature": load.temperature,
            "seed": load.seed,
            "arrives_s": [prompt.arrives_s for prompt in load.prompts],
        }
        cpu_before = self._cpu.seconds()
        response = await self.answer(work)
        answers = tuple(
            Answer(
                tokens=tuple(answer["tokens"]),
                at_s=tuple(answer["at_s"]),
                wall_s=answer["at_s"][-1] if answer["at_s"] else 0.0,
            )
            for answer in response["answers"]
        )
        in_turns = len(prompts) > load.streams
        return LoopBlock(
            load,
            answers,
            response["wall_s"],
            self._cpu.seconds() - cpu_before,
            tuple(answer["began_s"] for answer in response["answers"]),
            response["busy_s"] if in_turns else None,
        )

    async def answer(self, work: Mapping[str, Any]) -> Any:
        """Send a block and return its answers, as values of JSON. Raises RuntimeError if the process ends."""
        if self._process.stdin is None:
            raise RuntimeError("the process has no input")
        self._process.stdin.write(json.dumps(work).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._line()

    async def _line(self) -> Any:
        line = b"" if self._process.stdout is None else await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {await self._process.wait()}")
        return json.loads(line)


@asynccontextmanager
async def process_loop(
    command: Sequence[str], env: Mapping[str, str], log: Path, encode: Encode
) -> AsyncIterator[ProcessLoop]:
    """Start `command`, wait until it is ready, and end it with the context. Its standard error is `log`."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(env),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_MAX_LINE_BYTES,
        )
        try:
            loop = ProcessLoop(process, encode)
            await loop.wait_ready()
            yield loop
        finally:
            if process.stdin is not None:
                process.stdin.close()
            await stop(process)


async def stop(process: asyncio.subprocess.Process) -> None:
    """Wait for a process that was told to end; kill it after _STOP_S."""
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
