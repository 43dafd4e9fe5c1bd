"""Measure HTTP beside gRPC: the gateway's CPU time a token, and the time to first token, over both.

Both arms send the same chats with the same seeds to one gateway; prompts are in the target's prefix cache.
The target's model is tiny and of random weights, so that the gateway's own time shows. Speculation is off.
CPU time is that of the gateway's process alone. Both clients run in this process: Galley's own, and for HTTP
one that only splits events, as a client that takes longer would delay the tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bench.harness import Goal, at_most
from bench.loops.options import Options
from bench.loops.run import Run, Scenario, of_arm
from bench.loops.sides import Cpu
from galley.bench.answers import Answer
from galley.bench.closed_loop import OFF, GatewayLoop, Load, LoopBlock, LoopSide, run_load
from galley.bench.summary import Interval, median_interval, percentile, ratio_interval
from galley.bench.workloads import Prompt
from galley.client.client import AsyncClient
from galley.stack.stack import Stack, StackOptions
from tests.fakes import tiny_model

GRPC, HTTP = "grpc", "http"
ARMS = (GRPC, HTTP)
MOST_CPU, MOST_MS = 1.1, 2.0
_CONTEXT = 2048
_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
_FIELDS = "content-type: application/json\r\nhost: bench"


class HttpConnections:
    """Connections to one HTTP server, which are kept open and used again."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Post a body and yield the events of the answer. Raises RuntimeError for another status than 200."""
        reader, writer = self._free.pop() if self._free else await self._open()
        data = json.dumps(body).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\n{_FIELDS}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        while size := int(await reader.readline(), 16):
            chunk = (await reader.readexactly(size + 2))[:-2]
            for line in chunk.split(b"\n"):
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        await reader.readline()
        self._free.append((reader, writer))

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port)

    async def close(self) -> None:
        for _, writer in self._free:
            writer.close()
            await writer.wait_closed()


class HttpLoop:
    """Closed loops over HTTP, with the requests of `GatewayLoop`."""

    def __init__(self, connections: HttpConnections, cpu: Cpu) -> None:
        self._connections = connections
        self._cpu = cpu

    async def run(self, load: Load) -> LoopBlock:
        async def answer(prompt: Prompt, seed: int) -> Answer:
            return await self._answer(load, prompt, seed)

        return await run_load(load, answer, self._cpu.seconds)

    async def _answer(self, load: Load, prompt: Prompt, seed: int) -> Answer:
        body = {
            "messages": prompt.messages,
            "max_tokens": prompt.max_tokens or load.max_tokens,
            "temperature": load.temperature,
            "seed": seed,
            "workload": prompt.label,
            "speculation": {"mode": OFF},
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # as over gRPC
        }
        tokens: list[int] = []
        at_s: list[float] = []
        began_s = time.perf_counter()
        async for event in self._connections.events("/v1/chat/completions", body):
            if "error" in event:
                raise RuntimeError(f"{prompt.id}: {event['error']}")
            for choice in event["choices"]:
                if given := choice.get("token_ids"):
                    tokens += given
                    at_s += [time.perf_counter() - began_s] * len(given)
        return Answer(tuple(tokens), tuple(at_s), time.perf_counter() - began_s)


def save_model(folder: Path) -> Path:
    """Save a model whose step takes about a millisecond, with a tokenizer of words and a chat template."""
    folder.mkdir(parents=True)
    model = tiny_model.random_llama(hidden_size=32, spread=0.4, seed=0)
    model.config.max_position_embeddings = _CONTEXT
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return tiny_model.save(model, folder)


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[Mapping[str, LoopSide]]:
    """Start a stack with a tiny model; both arms call its one gateway."""
    model = save_model(run.folder / f"model-{run.life}")
    options = run.options
    given = StackOptions(
        model=str(model),
        draft_model="none",
        dtype="float32",
        threads=options.threads,
        http_port=0,
        extra_args={"gateway": ["--max-sessions", str(max(64, *options.streams))]},
    )
    async with AsyncExitStack() as held:
        stack = await held.enter_async_context(Stack(given))
        client = await held.enter_async_context(AsyncClient(stack.gateways[0]))
        connections = HttpConnections(stack.http_addresses[0])
        held.push_async_callback(connections.close)
        cpu = Cpu([stack.pid("gateway")])
        yield {GRPC: GatewayLoop(client, cpu.seconds, OFF), HTTP: HttpLoop(connections, cpu)}


def first_token_ms(block: LoopBlock) -> float:
    """Return the median time to first token of a block, in ms."""
    return 1000 * percentile([answer.at_s[0] for answer in block.answers if answer.at_s], 50)


def cpu_ratio(run: Run, streams: int) -> Interval:
    """Return the median of the pairs' ratios of the gateway's CPU seconds a token, HTTP over gRPC."""
    http, grpc = ([block.cpu_per_token for block in of_arm(run.blocks, arm, streams)] for arm in (HTTP, GRPC))
    return ratio_interval(http, grpc)


def added_ms(run: Run, streams: int) -> Interval:
    """Return the median of the pairs' differences of the time to first token, HTTP less gRPC, in ms."""
    pairs = zip(of_arm(run.blocks, HTTP, streams), of_arm(run.blocks, GRPC, streams), strict=True)
    return median_interval([first_token_ms(http) - first_token_ms(grpc) for http, grpc in pairs])


def differing(run: Run) -> int:
    """Count the answers whose tokens differ between the protocols."""
    pairs = zip(of_arm(run.blocks, HTTP), of_arm(run.blocks, GRPC), strict=True)
    return sum(
        mine.tokens != theirs.tokens
        for http, grpc in pairs
        for mine, theirs in zip(http.answers, grpc.answers, strict=True)
    )


def goals(run: Run) -> list[Goal]:
    """Bound the CPU a token against gRPC, and what HTTP adds to the time to first token."""
    run.facts["differing_answers"] = differing(run)
    run.facts["cpu_us_a_token"] = {
        f"{arm}, {streams} streams": round(
            1e6 * median_interval([one.cpu_per_token for one in of_arm(run.blocks, arm, streams)]).median
        )
        for streams in run.options.streams
        for arm in ARMS
    }
    found = []
    for streams in run.options.streams:
        what = f"the gateway's CPU a token, {streams} streams, HTTP against gRPC"
        found.append(at_most("cpu", what, cpu_ratio(run, streams), MOST_CPU, "x"))
        what = f"time to first token, {streams} streams, HTTP less gRPC"
        found.append(at_most("ttft", what, added_ms(run, streams), MOST_MS, " ms"))
    return found


BESIDE_GRPC = Scenario(
    "http",
    "HTTP beside gRPC: the gateway's CPU a token, time to first token",
    Options(ARMS, streams=(1, 16, 64), temperatures=(0.7,), pairs=7, prompts_per_block=16, turns=1),
    GRPC,
    start,
    goals,
    primed_by=GRPC,
    required=frozenset(ARMS),
)
