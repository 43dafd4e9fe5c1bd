"""`make bench-sessions`: what the session store costs.

Two gateways over the same target, plain decoding: `redis` keeps its sessions in a real Valkey, as any gateway
does; `instant` keeps them in its own process, where a commit is answered at once: what a store that costs
nothing would be. Both are the real gateway, each commit timed (bench/session_gateway.py); blocks alternate
(bench/closed_loop.py). All processes share --cores, Valkey too.

- Throughput: the pairs' ratios of tokens a second.
- What the log adds to a token's way to its client: the median time from a commit's call to its answer, less
  that of the instant store in the same pair. A token may leave when its commit is answered, not before.
- Memory: MEMORY USAGE of the keys of every session of the run that is still kept, less 4 bytes a token of
  prompt and answer. What else a session keeps (request, owner, origins, spare room of the strings) counts.

`--quick` runs one short pair, whose figures mean nothing and whose goals are not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import asyncio as redis_asyncio
from rich.console import Console

from bench.arms import Cpu
from bench.closed_loop import LoopPlan, run_loads
from bench.harness import Goal, at_least, at_most, commit, result_path
from bench.loop_run import LoopOptions, Result, add_options, finish_options, keep_to_cores, report
from bench.loop_summary import of_arm, speed_ratio
from bench.session_store import read_ms
from galley.bench.closed_loop import Load, LoopBlock, LoopSide
from galley.bench.gateway import PLAIN, GatewayLoop
from galley.bench.stats import Interval, median_interval, percentile
from galley.client.client import AsyncClient
from galley.engine.load.resolve import resolve_model
from galley.stack.part import PartSpec
from galley.stack.parts import python_module
from galley.stack.stack import Stack, StackOptions

INSTANT, REDIS = "instant", "redis"
ARMS = (INSTANT, REDIS)
STREAMS = (1, 16)
JUDGED_STREAMS = 16
LEAST_SPEED, MOST_ADDED_MS, MOST_BYTES = 0.98, 0.5, 1000.0
TOKEN_BYTES = 4
_SHARED_PARTS = ("valkey", "target")
_FILE_WIDTH = 150


@dataclass(frozen=True, slots=True)
class Timed:
    """The median milliseconds of a block's commits, and how many there were."""

    pair: int
    arm: str
    streams: int
    temperature: float
    commits: int
    median_ms: float
    p99_ms: float


class TimedLoop:
    """A side whose commits are timed."""

    def __init__(self, loop: GatewayLoop, timings: Path) -> None:
        self._loop = loop
        self._timings = timings
        self._read = 0
        self.timed: list[Timed] = []

    async def run(self, load: Load) -> LoopBlock:
        """See LoopSide."""
        block = await self._loop.run(load)
        came_ms, self._read = read_ms(self._timings, self._read)
        if not came_ms:
            raise RuntimeError(f"no commit of {load.arm} was timed")
        of = (load.pair, load.arm, load.streams, load.temperature)
        self.timed.append(Timed(*of, len(came_ms), percentile(came_ms, 50), percentile(came_ms, 99)))
        return block


@asynccontextmanager
async def gateways(
    options: LoopOptions, stack: Stack, model_dir: Path
) -> AsyncIterator[dict[str, TimedLoop]]:
    """A gateway for each arm, over the stack's target."""
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="galley-bench-")))
        specs = [_part(arm, stack, model_dir, folder / arm) for arm in options.arms]
        started = await held.enter_async_context(
            Stack(StackOptions(threads=1), parts=lambda _options, _dirs: specs)
        )
        sides = {}
        for arm in options.arms:
            client = await held.enter_async_context(AsyncClient(started.address(arm)))
            cpu = Cpu([started.pid(arm), *(stack.pid(part) for part in _SHARED_PARTS)])
            sides[arm] = TimedLoop(GatewayLoop(client, cpu.seconds, PLAIN), folder / arm)
        yield sides


def _part(arm: str, stack: Stack, model_dir: Path, timings: Path) -> PartSpec:
    command = python_module(
        "bench.session_gateway",
        *("--bench-store", arm, "--bench-timings", str(timings), "--model", str(model_dir)),
        *("--redis-url", _store_url(stack), "--target", stack.address("target"), "--draft", "none"),
    )
    return PartSpec(arm, lambda _: command)


def _store_url(stack: Stack) -> str:
    return f"unix://{stack.address('valkey')}"


@dataclass(frozen=True, slots=True)
class Kept:
    """The bytes that a session takes in Redis, and how many of them are its tokens."""

    bytes: int
    tokens: int

    @property
    def beside_tokens(self) -> int:
        """Bytes that are no tokens."""
        return self.bytes - TOKEN_BYTES * self.tokens


async def sessions_kept(url: str) -> list[Kept]:
    """Of every session that the store still has."""
    async with redis_asyncio.Redis.from_url(url) as client:
        keys = [key async for key in client.scan_iter("galley:{*}", count=1000)]
        return [await _kept(client, key) for key in keys]


async def _kept(client: redis_asyncio.Redis, key: bytes) -> Kept:
    sizes = [await client.memory_usage(name, samples=0) for name in (key, key + b":log", key + b":meta")]
    return Kept(sum(size or 0 for size in sizes), await client.strlen(key + b":log") // TOKEN_BYTES)


async def measure(
    options: LoopOptions, model_dir: Path, console: Console
) -> tuple[list[LoopBlock], list[Timed], list[Kept]]:
    """All blocks, the times of their commits, and what their sessions take."""
    plan = LoopPlan(
        options.arms, options.streams, options.temperatures, options.pairs, options.max_tokens, options.seed
    )
    console.print("starting the stack")
    stack_options = StackOptions(
        model=str(model_dir), strategies=("ngram",), dtype=options.dtype, threads=options.target_threads
    )
    async with Stack(stack_options) as stack, gateways(options, stack, model_dir) as timed:
        sides: dict[str, LoopSide] = dict(timed)
        blocks = await run_loads(plan, sides, lambda said: console.print(said, style="dim"))
        kept = await sessions_kept(_store_url(stack))
    times = [one for side in timed.values() for one in side.timed if one.pair >= 0]
    return blocks, times, kept


def added_ms(times: Sequence[Timed], streams: int) -> Interval:
    """What Redis adds to a commit, median of the pairs' differences of medians, over all temperatures."""
    medians = {(one.arm, one.pair, one.temperature): one.median_ms for one in times if one.streams == streams}
    pairs = [(pair, temperature) for arm, pair, temperature in medians if arm == REDIS]
    return median_interval([medians[REDIS, *pair] - medians[INSTANT, *pair] for pair in pairs])


def goals_of(
    blocks: Sequence[LoopBlock], times: Sequence[Timed], kept: Sequence[Kept], options: LoopOptions
) -> list[Goal]:
    """As the benchmark's bounds are."""
    goals = []
    for temperature in options.temperatures:
        of = (JUDGED_STREAMS, temperature)
        ratio = speed_ratio(of_arm(blocks, REDIS, *of), of_arm(blocks, INSTANT, *of))
        what = f"tokens/s at {JUDGED_STREAMS} streams, temperature {temperature:g}, of those without a log"
        goals.append(at_least("commits off the path", what, ratio, LEAST_SPEED))
    for streams in options.streams:
        what = f"added to a token's way at {streams} streams, median"
        goals.append(at_most("a token's way", what, added_ms(times, streams), MOST_ADDED_MS, " ms"))
    each = median_interval([float(one.beside_tokens) for one in kept])
    goals.append(at_most("memory", f"a session beside its tokens, of {len(kept)}", each, MOST_BYTES, " B"))
    return goals


def facts_of(times: Sequence[Timed], kept: Sequence[Kept]) -> dict[str, Any]:
    """What stands in the record besides the loop's rows."""
    beside = [float(one.beside_tokens) for one in kept]
    return {
        "commits": [dataclasses.asdict(one) for one in times],
        "sessions": len(kept),
        "beside_tokens_bytes": {str(at): percentile(beside, at) for at in (0, 50, 99, 100)},
        "tokens_a_session": percentile([float(one.tokens) for one in kept], 50),
    }


def parse_options(argv: Sequence[str]) -> tuple[LoopOptions, Path | None]:
    """Read the command line; exits 2 with a message if a value is wrong. The path is None for no record."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sessions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, LoopOptions(ARMS, streams=STREAMS))
    options, root = finish_options(parser, vars(parser.parse_args(argv)), INSTANT)
    if set(options.arms) != set(ARMS):
        parser.error(f"--arms: both of {', '.join(ARMS)}")
    return options, root


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 however the goals stand, for a missed goal is a finding and no error."""
    options, root = parse_options(sys.argv[1:] if argv is None else argv)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    record = None if root is None else result_path("sessions", commit(), root)
    cores = keep_to_cores(options.cores)
    blocks, times, kept = asyncio.run(measure(options, resolve_model(options.model), console))
    facts = {"cores": cores, **facts_of(times, kept)}
    goals = [] if options.quick else goals_of(blocks, times, kept, options)
    report(Result("sessions", INSTANT, blocks, goals, facts), options, console, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
