"""Measure what the session store costs: a gateway over Redis beside one whose store answers at once.

Arms are `instant` and `redis`, and with `:2` the same over a target of two threads. Each arm has a gateway of
its own; those of a number of threads share a target. A gateway records the duration of each commit, which the
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
ARMS = (INSTANT, REDIS, f"{INSTANT}:2", f"{REDIS}:2")
JUDGED_STREAMS = 16
LEAST_SPEED, MOST_BYTES = 0.98, 1000.0
# By the number of streams from which on a bound holds.
MOST_ADDED_MS = {1: 0.5, 16: 1.0}
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
    """Start a stack for each number of threads, and a gateway for each arm; read the stores at the end."""
    stored: list[StoredBytes] = []
    sides: dict[str, TimedLoop] = {}
    async with AsyncExitStack() as held:
        urls = []
        for threads in dict.fromkeys(map(threads_of, run.options.arms)):
            arms = [arm for arm in run.options.arms if threads_of(arm) == threads]
            stack = await held.enter_async_context(Stack(_stack_options(run, threads)))
            urls.append(f"unix://{stack.address('valkey')}")
            sides |= await _gateways(held, stack, run, arms, urls[-1])
        yield sides
        run.facts["commits"] = [
            dataclasses.asdict(one) for side in sides.values() for one in side.blocks if one.pair >= 0
        ]
        for url in urls:
            stored += await stored_sessions(url)
    run.facts["beside_tokens_bytes"] = [one.beside_tokens for one in stored]


def threads_of(arm: str) -> int:
    """Return the number of threads of an arm's target."""
    return int(arm.partition(":")[2] or 1)


def _stack_options(run: Run, threads: int) -> StackOptions:
    model, dtype = str(run.model_dir), run.options.dtype
    return StackOptions(model=model, strategy="ngram", dtype=dtype, threads=threads)


async def _gateways(
    held: AsyncExitStack, stack: Stack, run: Run, arms: Sequence[str], url: str
) -> dict[str, TimedLoop]:
    specs = [_part(arm, stack, run, url) for arm in arms]
    gateways = await held.enter_async_context(
        Stack(StackOptions(threads=1), parts=lambda _options, _dirs: specs)
    )
    sides = {}
    for arm in arms:
        client = await held.enter_async_context(AsyncClient(gateways.address(arm)))
        cpu = Cpu([gateways.pid(arm), *(stack.pid(part) for part in _SHARED_PARTS)])
        sides[arm] = TimedLoop(GatewayLoop(client, cpu.seconds, OFF), _times(run, arm))
    return sides


def _times(run: Run, arm: str) -> Path:
    return run.folder / f"{arm}-{run.life}"


def _part(arm: str, stack: Stack, run: Run, url: str) -> PartSpec:
    command = python_module(
        "bench.loops.session_gateway",
        *(
            "--bench-store",
            arm.partition(":")[0],
            "--bench-timings",
            str(_times(run, arm)),
            "--model",
            str(run.model_dir),
        ),
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


def added_ms(commits: Sequence[Mapping[str, Any]], streams: int, arm: str = REDIS) -> Interval:
    """Return what Redis adds to a commit: the median of the pairs' differences of medians, in ms."""
    medians = {
        (one["arm"], one["pair"], one["temperature"]): one["median_ms"]
        for one in commits
        if one["streams"] == streams
    }
    pairs = [(pair, temperature) for name, pair, temperature in medians if name == arm]
    base = arm.replace(REDIS, INSTANT)
    return median_interval([medians[arm, *pair] - medians[base, *pair] for pair in pairs])


def goals(run: Run) -> list[Goal]:
    """Bound what the store costs in speed, in time a commit, and in memory."""
    found = []
    for arm in run.options.arms:
        if not arm.startswith(REDIS):
            continue
        threads = f"{threads_of(arm)} thread{'s' if threads_of(arm) > 1 else ''}"
        for temperature in run.options.temperatures:
            of = (JUDGED_STREAMS, temperature)
            base = of_arm(run.blocks, arm.replace(REDIS, INSTANT), *of)
            ratio = speed_ratio(of_arm(run.blocks, arm, *of), base)
            what = f"tokens/s at {JUDGED_STREAMS} streams at {temperature:g}, {threads}, against no log"
            if ratio is not None:
                found.append(at_least("throughput", what, ratio, LEAST_SPEED, "x"))
        for streams in run.options.streams:
            what = f"time that the log adds to a token at {streams} streams, {threads}, median"
            bound = MOST_ADDED_MS[max(least for least in MOST_ADDED_MS if least <= streams)]
            added = added_ms(run.facts["commits"], streams, arm)
            found.append(at_most("commit", what, added, bound, " ms"))
    sizes = median_interval([float(size) for size in run.facts["beside_tokens_bytes"]])
    found.append(at_most("memory", "bytes of a session beside its tokens", sizes, MOST_BYTES, " B"))
    return found


def check(options: Options) -> str:
    """Return what is wrong with the arms, or an empty string."""
    for arm in options.arms:
        store, colon, threads = arm.partition(":")
        if store not in {INSTANT, REDIS} or (colon and not (threads.isdigit() and int(threads))):
            return (
                f"--arms: must be of {INSTANT}, {REDIS}, {INSTANT}:<threads> and {REDIS}:<threads>, got {arm}"
            )
        if store == REDIS and arm.replace(REDIS, INSTANT) not in options.arms:
            return f"--arms: must include {arm.replace(REDIS, INSTANT)}, with which {arm} is compared"
    return ""


SESSIONS = Scenario(
    "sessions",
    "what the session store costs: throughput, time a commit, memory",
    Options(ARMS, streams=(1, JUDGED_STREAMS)),
    INSTANT,
    start,
    goals,
    tag_of=own_tag,
    required=frozenset({INSTANT, REDIS}),
    check=check,
)
