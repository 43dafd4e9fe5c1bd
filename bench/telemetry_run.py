"""Running `make bench-telemetry`: the options, the blocks, the stacks and what each of them is told."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opentelemetry import trace

from bench.arms import Cpu
from bench.closed_loop import interleaved
from bench.sink_reader import SinkReader, running_sink
from bench.telemetry_summary import AGAIN, ALL, ARMS, FEW, MEASURED, OFF, PARTS, Cost
from galley.bench.blocks import Cell, Sizes, pair_loads
from galley.bench.closed_loop import WARM_UP, Load, LoopBlock, LoopSide, run_all
from galley.bench.gateway import AUTO, GatewayLoop
from galley.bench.workloads import Workload
from galley.client.client import AsyncClient
from galley.common.config.defaults import DEFAULT_MODEL
from galley.stack.stack import Stack, StackOptions
from galley.top.scrape import fetch

# Which stack answers an arm.
PLAIN, PLAIN_AGAIN, TRACED, WATCHED = "plain", "plain-again", "traced", "traced-and-scraped"
STACK_OF = {OFF: PLAIN, AGAIN: PLAIN_AGAIN, FEW: TRACED, ALL: TRACED, MEASURED: WATCHED}
STACKS = tuple(dict.fromkeys(STACK_OF.values()))
_SCRAPE_EVERY_S = 1.0
_WARM_UP_TOKENS = 12
_KEY_BYTES = 32
_RATIO = "0.01"
# Spans leave a process at most this late: within the time that is counted after a block.
_EXPORT_DELAY_MS = "1000"
_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """`pairs` of each of `lives` starts of all stacks; a stream asks `turns` prompts in a block."""

    lives: int = 3
    pairs: int = 6
    streams: int = 16
    turns: int = 2
    max_tokens: int = 32
    temperatures: tuple[float, ...] = (0.0, 0.7)
    speculation: str = AUTO
    settle_s: float = 1.5
    cores: int = 2
    threads: int = 1
    dtype: str = "bfloat16"
    kv_memory_mb: int = 512
    model: str = DEFAULT_MODEL
    seed: int = 20261122
    quick: bool = False


@dataclass(slots=True)
class Outcome:
    """All blocks, and what each cost besides."""

    blocks: list[LoopBlock] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


# -------------------------------------------------------------------------------------------- plan --


def loads_of(life: int, options: TelemetryOptions) -> list[Load]:
    """A warm-up of every arm, then the pairs of one life; temperatures take turns, and who comes first."""
    workload = Workload("mixed", tuple(interleaved()), "")
    sizes = Sizes(1, options.max_tokens, options.seed, nonce=f"t{life}", turns=options.turns)

    def cell(pair: int) -> Cell:
        return Cell(workload, options.streams, options.temperatures[pair % len(options.temperatures)], ARMS)

    short = replace(sizes, max_tokens=min(_WARM_UP_TOKENS, options.max_tokens), turns=1)
    loads = pair_loads(cell(life), WARM_UP, short)
    first = life * options.pairs
    for pair in range(first, first + options.pairs):
        loads += pair_loads(cell(pair), pair, sizes)
    return loads


def environment_of(stack: str, sink: str) -> dict[str, str]:
    """What a stack is told of telemetry; nothing of it comes from who runs the benchmark."""
    told = dict.fromkeys((*_ENDPOINTS, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME"), "")
    told["OTEL_TRACES_EXPORTER"] = "otlp"
    if stack in {PLAIN, PLAIN_AGAIN}:
        return told
    told |= {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://{sink}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
        "OTEL_BSP_SCHEDULE_DELAY": _EXPORT_DELAY_MS,
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
        "OTEL_TRACES_SAMPLER_ARG": "",
    }
    if stack == TRACED:
        told |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": _RATIO}
    return told


# --------------------------------------------------------------------------------------------- run --


async def measure(options: TelemetryOptions, model_dir: Path, tell: Callable[[str], None]) -> Outcome:
    """Start all stacks as often as there are lives, and run the blocks of each life."""
    outcome = Outcome()
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="galley-bench-")))
        keys = _write_keys(folder / "keys.toml")
        sink = await held.enter_async_context(running_sink())
        for life in range(options.lives):
            tell(f"life {life + 1} of {options.lives}: starting {len(STACKS)} stacks, one after another")
            async with _sides(options, model_dir, sink, folder / "keys.toml", keys) as sides:
                running: dict[str, LoopSide] = dict(sides)
                outcome.blocks += await run_all(loads_of(life, options), running, tell)
            outcome.costs += [cost for side in sides.values() for cost in side.costs if cost.pair != WARM_UP]
        outcome.facts = await sink.facts()
    return outcome


def _write_keys(path: Path) -> dict[str, str]:
    """A principal for each arm, so that none finds another's prompts in the prefix cache; keys by arm."""
    keys = {arm: secrets.token_hex(_KEY_BYTES) for arm in ARMS}
    entries = (
        f'[[keys]]\nprincipal = "{arm}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
        for arm, key in keys.items()
    )
    path.write_text("\n".join(entries), encoding="utf-8")
    return keys


@asynccontextmanager
async def _sides(
    options: TelemetryOptions, model_dir: Path, sink: SinkReader, key_file: Path, keys: Mapping[str, str]
) -> AsyncIterator[dict[str, TelemetrySide]]:
    async with AsyncExitStack() as held:
        stacks = {}
        # One after another: what a pass costs is measured at the start, and neighbours would be in it.
        for name in STACKS:
            given = _stack_options(name, options, model_dir, sink.address, key_file)
            stacks[name] = await held.enter_async_context(Stack(given))
        sides = {}
        for arm, name in STACK_OF.items():
            stack = stacks[name]
            client = await held.enter_async_context(AsyncClient(stack.gateways[0], api_key=keys[arm]))
            sides[arm] = TelemetrySide(
                GatewayLoop(client, speculation=options.speculation),
                {part: Cpu([stack.pid(part)]) for part in PARTS},
                sink,
                options.settle_s,
                [service.metrics for service in stack.services],
            )
        yield sides


def _stack_options(
    name: str, options: TelemetryOptions, model_dir: Path, sink: str, key_file: Path
) -> StackOptions:
    return StackOptions(
        model=str(model_dir),
        dtype=options.dtype,
        threads=options.threads,
        metrics=name == WATCHED,
        env=environment_of(name, sink),
        extra_args={
            "target": ["--kv-memory-mb", str(options.kv_memory_mb)],
            "gateway": ["--api-keys-file", str(key_file)],
        },
    )


class TelemetrySide:
    """Answers the blocks of one arm; scrapes `metrics` (addresses) each second of them."""

    def __init__(
        self,
        loop: GatewayLoop,
        cpu: Mapping[str, Cpu],
        sink: SinkReader,
        settle_s: float,
        metrics: Sequence[str],
    ) -> None:
        self._loop = loop
        self._cpu = cpu
        self._sink = sink
        self._settle_s = settle_s
        self._metrics = metrics
        self.costs: list[Cost] = []

    async def run(self, load: Load) -> LoopBlock:
        """See LoopSide; the CPU time is until all that the block left behind has been exported."""
        await self._sink.between_blocks()
        before, sink_before = self._spent(), self._sink.cpu_s
        async with _scraped(self._metrics):
            with caller_samples() if load.arm == ALL else contextlib.nullcontext():
                block = await self._loop.run(load)
            await asyncio.sleep(self._settle_s)
        after = self._spent()
        spent = {part: after[part] - before[part] for part in after}
        exports, size = await self._sink.of_block(load.arm)
        sink_s = self._sink.cpu_s - sink_before
        self.costs.append(Cost(load.pair, load.arm, block.given, spent, sink_s, exports, size))
        return replace(block, cpu_s=sum(spent.values()))

    def _spent(self) -> dict[str, float]:
        return {part: cpu.seconds() for part, cpu in self._cpu.items()}


@contextlib.contextmanager
def caller_samples() -> Iterator[None]:
    """Within, calls are made by a caller who samples its own trace, which samplers follow."""
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
    """Within, metrics are fetched each second, as a Prometheus does; nobody reads them."""

    async def scrape() -> None:
        while True:
            await asyncio.gather(*(fetch(address) for address in addresses))
            await asyncio.sleep(_SCRAPE_EVERY_S)

    async with asyncio.TaskGroup() as group:
        scraping = group.create_task(scrape()) if addresses else None
        yield
        if scraping is not None:
            scraping.cancel()
