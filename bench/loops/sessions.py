"""Measure what the session store costs: a gateway over Redis beside one whose store answers at once.

Each arm has a gateway of its own over one target. A gateway records the duration of each commit, which the
log adds to a token's latency: a token is emitted only once it is committed. At the end the memory that each
session takes in the store is read. Speculation is off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import asyncio as redis_asyncio

from bench.harness import Goal, at_least, at_most
from bench.loops.options import Options
from bench.loops.run import Run, Scenario, of_arm, own_tag
from bench.loops.sides import Cpu
from bench.loops.store import read_ms
from galley.bench.closed_loop import OFF, GatewayLoop, Load, LoopBlock, LoopSide
from galley.bench.summary import Interval, median_interval, percentile, speed_ratio
from galley.client.client import AsyncClient
from galley.stack.part import PartSpec
from galley.stack.parts import python_module
from galley.stack.stack import Stack, StackOptions

REDIS, INSTANT = "redis", "instant"
ARMS = (INSTANT, REDIS)
JUDGED_STREAMS = 16
LEAST_SPEED, MOST_ADDED_MS, MOST_BYTES = 0.98, 0.5, 1000.0
TOKEN_BYTES = 4
_SHARED_PARTS = ("valkey", "target")


@dataclass(frozen=True, slots=True)
class CommitTimes:
    """The commits of one block: how many, and their times in ms."""

    pair: int
    arm: str
    streams: int
    temperature: float
    commits: int
    median_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes that a session takes in Redis, and the number of its tokens."""

    bytes: int
    tokens: int

    @property
    def beside_tokens(self) -> int:
        """Return the bytes that are not tokens."""
        return self.bytes - TOKEN_BYTES * self.tokens


class TimedLoop:
    """Blocks through a gateway that writes the time of each commit to a file."""

    def __init__(self, loop: GatewayLoop, times: Path) -> None:
        self._loop = loop
        self._times = times
        self._read = 0
        self.blocks: list[CommitTimes] = []

    async def run(self, load: Load) -> LoopBlock:
        """Answer a load. Raises RuntimeError if no commit was timed."""
        block = await self._loop.run(load)
        took_ms, self._read = read_ms(self._times, self._read)
        if not took_ms:
            raise RuntimeError(f"no commit of {load.arm} was timed")
        of = (load.pair, load.arm, load.streams, load.temperature)
        times = CommitTimes(*of, len(took_ms), percentile(took_ms, 50), percentile(took_ms, 99))
        self.blocks.append(times)
        return block


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[Mapping[str, LoopSide]]:
    """Start a stack, and a gateway for each arm over its target; read the store at the end."""
    options = run.options
    given = StackOptions(
        model=str(run.model_dir), strategies=("ngram",), dtype=options.dtype, threads=options.threads
    )
    async with AsyncExitStack() as held:
        stack = await held.enter_async_context(Stack(given))
        url = f"unix://{stack.address('valkey')}"
        specs = [_part(arm, stack, run, url) for arm in options.arms]
        gateways = await held.enter_async_context(
            Stack(StackOptions(threads=1), parts=lambda _options, _dirs: specs)
        )
        sides = {}
        for arm in options.arms:
            client = await held.enter_async_context(AsyncClient(gateways.address(arm)))
            cpu = Cpu([gateways.pid(arm), *(stack.pid(part) for part in _SHARED_PARTS)])
            sides[arm] = TimedLoop(GatewayLoop(client, cpu.seconds, OFF), _times(run, arm))
        yield sides
        run.facts["commits"] = [
            dataclasses.asdict(one) for side in sides.values() for one in side.blocks if one.pair >= 0
        ]
        stored = await stored_sessions(url)
    run.facts["beside_tokens_bytes"] = [one.beside_tokens for one in stored]


def _times(run: Run, arm: str) -> Path:
    return run.folder / f"{arm}-{run.life}"


def _part(arm: str, stack: Stack, run: Run, url: str) -> PartSpec:
    command = python_module(
        "bench.loops.session_gateway",
        *("--bench-store", arm, "--bench-timings", str(_times(run, arm)), "--model", str(run.model_dir)),
        *("--redis-url", url, "--target", stack.address("target"), "--draft", "none"),
    )
    return PartSpec(arm, lambda _: command)


async def stored_sessions(url: str) -> list[StoredBytes]:
    """Return the memory and the tokens of each session that is still in the store."""
    async with redis_asyncio.Redis.from_url(url) as client:
        keys = [key async for key in client.scan_iter("galley:sessions:*}", count=1000)]
        return [await _stored(client, key) for key in keys]


async def _stored(client: redis_asyncio.Redis, key: bytes) -> StoredBytes:
    sizes = [await client.memory_usage(name, samples=0) for name in (key, key + b":log", key + b":meta")]
    return StoredBytes(sum(size or 0 for size in sizes), await client.strlen(key + b":log") // TOKEN_BYTES)


def added_ms(commits: Sequence[Mapping[str, Any]], streams: int) -> Interval:
    """Return what Redis adds to a commit: the median of the pairs' differences of medians, in ms."""
    medians = {
        (one["arm"], one["pair"], one["temperature"]): one["median_ms"]
        for one in commits
        if one["streams"] == streams
    }
    pairs = [(pair, temperature) for arm, pair, temperature in medians if arm == REDIS]
    return median_interval([medians[REDIS, *pair] - medians[INSTANT, *pair] for pair in pairs])


def goals(run: Run) -> list[Goal]:
    """Bound what the store costs in speed, in time a commit, and in memory."""
    found = []
    if JUDGED_STREAMS in run.options.streams:
        for temperature in run.options.temperatures:
            of = (JUDGED_STREAMS, temperature)
            ratio = speed_ratio(of_arm(run.blocks, REDIS, *of), of_arm(run.blocks, INSTANT, *of))
            what = f"tokens/s at {JUDGED_STREAMS} streams, temperature {temperature:g}, against no log"
            if ratio is not None:
                found.append(at_least("throughput", what, ratio, LEAST_SPEED, "x"))
    for streams in run.options.streams:
        what = f"time that the log adds to a token at {streams} streams, median"
        found.append(at_most("commit", what, added_ms(run.facts["commits"], streams), MOST_ADDED_MS, " ms"))
    sizes = median_interval([float(size) for size in run.facts["beside_tokens_bytes"]])
    found.append(at_most("memory", "bytes of a session beside its tokens", sizes, MOST_BYTES, " B"))
    return found


SESSIONS = Scenario(
    "sessions",
    "what the session store costs: throughput, time a commit, memory",
    Options(ARMS, streams=(1, JUDGED_STREAMS)),
    INSTANT,
    start,
    goals,
    tag_of=own_tag,
    required=frozenset(ARMS),
)
