"""Measure what traces and metrics cost at 16 streams.

There are four stacks, each with its own processes, for five arms:

- `off`: no endpoint, no metrics port. `off-again`: a second start of the same, which shows by how much two
  starts of one thing differ. The others are compared with the mean of both.
- `sampled-1` and `sampled-100`: one stack whose sampler takes one request in 100, but follows a caller that
  samples its own trace, as all callers of `sampled-100` do.
- `sampled-100-metrics`: all requests sampled, and /metrics of each service fetched each second.

A process decides at its start whether it exports spans, so all stacks start anew in each life. Every arm is a
caller of its own (an API key), and prefix caches never cross callers. Processes export their spans every
second, so CPU time is counted until a moment after a block. The collector is a process outside what is
counted (bench/loops/otlp_sink.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import grpc.aio
from opentelemetry import trace

from bench.harness import Goal, at_least, at_most
from bench.loops.options import Options
from bench.loops.otlp_sink import COUNTS
from bench.loops.run import Run, Scenario, of_arm
from bench.loops.sides import CountedLoop, Spent, stack_pids, write_keys
from galley.bench.closed_loop import AUTO, WARM_UP, GatewayLoop, Load, LoopBlock, LoopSide
from galley.bench.summary import Interval, median_interval
from galley.client.client import AsyncClient
from galley.stack.part import PartSpec
from galley.stack.parts import python_module
from galley.stack.stack import Stack, StackOptions
from galley.top.scrape import fetch

OFF, AGAIN = "off", "off-again"
FEW, ALL, MEASURED = "sampled-1", "sampled-100", "sampled-100-metrics"
ARMS = (OFF, FEW, ALL, AGAIN, MEASURED)
# Which stack answers an arm.
PLAIN, PLAIN_AGAIN, TRACED, SCRAPED = "plain", "plain-again", "traced", "traced-and-scraped"
STACK_OF = {OFF: PLAIN, AGAIN: PLAIN_AGAIN, FEW: TRACED, ALL: TRACED, MEASURED: SCRAPED}
MOST_ADDED_ALL, MOST_ADDED_FEW = 0.08, 0.01
US = 1e6
_SCRAPE_EVERY_S = 1.0
_SETTLE_S = 1.5
_EXPORT_DELAY_MS = "1000"
_RATIO = "0.01"
_SINK = "sink"
_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)


def environment_of(stack: str, sink: str) -> dict[str, str]:
    """Return a stack's telemetry environment, which overrides the environment of the benchmark."""
    env = dict.fromkeys((*_ENDPOINTS, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME"), "")
    env["OTEL_TRACES_EXPORTER"] = "otlp"
    if stack in {PLAIN, PLAIN_AGAIN}:
        return env
    env |= {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://{sink}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
        "OTEL_BSP_SCHEDULE_DELAY": _EXPORT_DELAY_MS,
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
        "OTEL_TRACES_SAMPLER_ARG": "",
    }
    if stack == TRACED:
        env |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": _RATIO}
    return env


class TelemetryLoop:
    """The side of one arm, whose caller samples or not, and whose metrics are fetched or not."""

    def __init__(self, loop: CountedLoop, metrics: Sequence[str]) -> None:
        self.loop = loop
        self._metrics = metrics

    async def run(self, load: Load) -> LoopBlock:
        """Answer a load."""
        async with _scraped(self._metrics):
            with sampling_caller() if load.arm == ALL else contextlib.nullcontext():
                return await self.loop.run(load)


@contextlib.contextmanager
def sampling_caller() -> Iterator[None]:
    """Make calls in the context those of a caller that samples its own trace."""
    context = trace.SpanContext(
        trace_id=secrets.randbits(128) | 1,
        span_id=secrets.randbits(64) | 1,
        is_remote=False,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    with trace.use_span(trace.NonRecordingSpan(context)):
        yield


@asynccontextmanager
async def _scraped(addresses: Sequence[str]) -> AsyncIterator[None]:
    async def scrape() -> None:
        while True:
            await asyncio.gather(*(fetch(address) for address in addresses))
            await asyncio.sleep(_SCRAPE_EVERY_S)

    async with asyncio.TaskGroup() as group:
        scraping = group.create_task(scrape()) if addresses else None
        yield
        if scraping is not None:
            scraping.cancel()


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[Mapping[str, LoopSide]]:
    """Start the collector and the stacks, one after another: a target measures its steps as it starts."""
    key_file = run.folder / f"keys-{run.life}.toml"
    keys = write_keys(key_file, ARMS)
    spec = PartSpec(_SINK, lambda _: python_module("bench.loops.otlp_sink"))
    async with AsyncExitStack() as held:
        sink = await held.enter_async_context(
            Stack(StackOptions(threads=1), parts=lambda _options, _dirs: [spec])
        )
        stacks = {}
        for name in dict.fromkeys(STACK_OF.values()):
            given = _stack_options(name, run, sink.address(_SINK), key_file)
            stacks[name] = await held.enter_async_context(Stack(given))
        sides = {}
        for arm, name in STACK_OF.items():
            stack = stacks[name]
            client = await held.enter_async_context(AsyncClient(stack.gateways[0], api_key=keys[arm]))
            loop = CountedLoop(GatewayLoop(client, speculation=AUTO), stack_pids(stack), _SETTLE_S)
            sides[arm] = TelemetryLoop(loop, [service.metrics for service in stack.services])
        yield sides
        spent = [one for side in sides.values() for one in side.loop.spent if one.pair != WARM_UP]
        run.facts.setdefault("spent", []).extend(spent)
        run.facts["exported"] = await _exported(sink.address(_SINK))


async def _exported(address: str) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        fetch_counts: Any = channel.unary_unary(COUNTS)
        counts: dict[str, Any] = json.loads(await fetch_counts(b""))
    return counts


def _stack_options(name: str, run: Run, sink: str, key_file: Path) -> StackOptions:
    return StackOptions(
        model=str(run.model_dir),
        dtype=run.options.dtype,
        threads=run.options.threads,
        metrics=name == SCRAPED,
        env=environment_of(name, sink),
        extra_args={
            "target": ["--kv-memory-mb", "512"],
            "gateway": ["--api-keys-file", str(key_file)],
        },
    )


def against_off(arm: str, values: Mapping[tuple[int, str], float]) -> Interval:
    """Return the median over the pairs of an arm's value over the mean of both stacks without telemetry."""
    pairs = sorted(pair for pair, of in values if of == arm)
    return median_interval(
        [values[pair, arm] / fmean((values[pair, OFF], values[pair, AGAIN])) for pair in pairs]
    )


def differing(blocks: Sequence[LoopBlock]) -> int:
    """Count answers whose tokens are not those of the same block without telemetry."""
    truth = {block.load.pair: block for block in of_arm(blocks, OFF)}
    return sum(
        mine.tokens != theirs.tokens
        for block in blocks
        for mine, theirs in zip(block.answers, truth[block.load.pair].answers, strict=True)
    )


def added_us(spent: Sequence[Spent], arm: str) -> dict[str, float]:
    """Return by process the median CPU microseconds that a token takes more than without telemetry."""
    by = {(one.pair, one.arm): one for one in spent}

    def us(pair: int, of: str, part: str) -> float:
        one = by[pair, of]
        return US * one.cpu_s[part] / max(1, one.tokens)

    pairs = sorted(pair for pair, of in by if of == arm)
    parts = next(iter(by.values())).cpu_s
    return {
        part: round(
            median_interval(
                [us(pair, arm, part) - fmean((us(pair, OFF, part), us(pair, AGAIN, part))) for pair in pairs]
            ).median,
            1,
        )
        for part in parts
    }


def goals(run: Run) -> list[Goal]:
    """Bound the CPU a token and the speed, with all requests and one in 100 sampled."""
    spent: list[Spent] = run.facts.pop("spent")
    cpu = {(one.pair, one.arm): sum(one.cpu_s.values()) / max(1, one.tokens) for one in spent}
    speed = {(block.load.pair, block.load.arm): block.tokens_per_s for block in run.blocks}
    run.facts["differing_answers"] = differing(run.blocks)
    run.facts["two_starts"] = median_interval(
        [cpu[pair, AGAIN] / cpu[pair, OFF] for pair, arm in cpu if arm == OFF]
    )
    run.facts["added_cpu_us_a_token"] = {arm: added_us(spent, arm) for arm in (FEW, ALL, MEASURED)}
    found = []
    for arm, how, most in (
        (ALL, "all requests sampled", MOST_ADDED_ALL),
        (MEASURED, "all sampled, metrics fetched each second", MOST_ADDED_ALL),
        (FEW, "one request in 100 sampled", MOST_ADDED_FEW),
    ):
        took, given = against_off(arm, cpu), against_off(arm, speed)
        found.append(at_most("cpu", f"CPU a token, {how}", took, 1 + most, "x", digits=4))
        found.append(at_least("speed", f"tokens/s, {how}", given, 1 - most, "x", digits=4))
    return found


TELEMETRY = Scenario(
    "telemetry",
    "what traces (none, 1 %, all requests) and metrics cost at 16 streams",
    Options(ARMS, streams=(16,), temperatures=(0.7,), lives=3, pairs=6),
    OFF,
    start,
    goals,
    required=frozenset(ARMS),
    check=lambda options: (
        ""
        if len(options.streams) == len(options.temperatures) == 1
        else "--streams, --temperatures: must be one number each"
    ),
)
