"""Who answers the loads of a closed loop: our whole stack, or one process that reads them from its input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.arms import Cpu
from galley.bench.answers import Answer
from galley.bench.closed_loop import Load, LoopBlock

# An answer's tokens and times are one line.
_MAX_LINE_BYTES = 64 * 2**20
_STOP_S = 20


class ProcessLoop:
    """A process that answers blocks of token ids, a JSON line each (see bench/peer_vllm.py)."""

    def __init__(self, process: asyncio.subprocess.Process, encode: Callable[[str], list[int]]) -> None:
        self._process = process
        self._encode = encode
        self.told: Any = None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def wait_ready(self) -> None:
        """Until it says so; RuntimeError if it ends before."""
        self.told = (await self._line())["ready"]

    async def run(self, load: Load) -> LoopBlock:
        """Hand the load over and read what came of it. RuntimeError if the process ends."""
        prompts = [self._encode(prompt.text) for prompt in load.prompts]
        work = {
            "streams": load.streams,
            "prompts": prompts,
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "seed": load.seed,
        }
        cpu_before = self._cpu_s()
        if self._process.stdin is None:
            raise RuntimeError("the process has no input")
        self._process.stdin.write(json.dumps(work).encode() + b"\n")
        await self._process.stdin.drain()
        given = await self._line()
        answers = tuple(
            Answer(
                prompt_id=prompt.id,
                prompt_tokens=len(ids),
                tokens=tuple(said["tokens"]),
                at_s=tuple(said["at_s"]),
                wall_s=said["at_s"][-1] if said["at_s"] else 0.0,
                cpu_s=0.0,
            )
            for prompt, ids, said in zip(load.prompts, prompts, given["answers"], strict=True)
        )
        return LoopBlock(load, answers, given["wall_s"], self._cpu_s() - cpu_before)

    def _cpu_s(self) -> float:
        process = psutil.Process(self._process.pid)
        return Cpu([process.pid, *(child.pid for child in process.children(recursive=True))]).seconds()

    async def _line(self) -> Any:
        line = b"" if self._process.stdout is None else await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {await self._process.wait()}")
        return json.loads(line)


@asynccontextmanager
async def process_loop(
    command: Sequence[str], env: Mapping[str, str], log: Path, encode: Callable[[str], list[int]]
) -> AsyncIterator[ProcessLoop]:
    """Start `command` and wait until it is ready; it ends with the context. Its standard error is `log`."""
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
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
