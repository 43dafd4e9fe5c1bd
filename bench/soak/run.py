"""Run the phases of a soak, from the start of its stack to the end."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
from redis import asyncio as redis_asyncio

from bench.soak.clients import Caller, Heard, Misreader, calling
from bench.soak.leaks import SERVICES, errors_in, errors_of_grpc, left_idle, stop_services, tasks_left
from bench.soak.memory import Watcher
from bench.soak.options import SoakOptions
from bench.soak.outcome import Block, Outcome, Overload, Probe, Span, probe_of
from bench.soak.requests import Mix, References, Request, catalogue, speculations
from galley.client.client import NO_RETRIES, AsyncClient
from galley.client.options import Speculation
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from galley.stack.part import PartSpec
from galley.stack.parts import draft_model_of, stack_parts
from galley.stack.stack import Stack, StackDirs, StackOptions

PARTS = ("target", "draft", "gateway", "valkey")
_CONNECTIONS = 4
_LEARNERS = 8
_SPARE = 4
"""Places that the load leaves free: the gateway frees a place a moment after its client has left."""
_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)
_FILL_STREAMS = 8
_FILL_OVER = 1.1
_SPREAD_S = 15.0
_LAG_PERIOD_S = 0.02
_MODEL_WORDS = 1000
_PAUSE_SLOW_S = 2.0
_SETTLE_S = 3.0


@asynccontextmanager
async def soaked_stack(options: SoakOptions, logs: Path) -> AsyncIterator[Stack]:
    """Run a stack whose target and draft register, only so that their leases can be read."""

    def parts(given: StackOptions, dirs: StackDirs) -> Sequence[PartSpec]:
        store = ("--redis-url", f"unix://{dirs.run / 'valkey.sock'}")
        seen = {**given.extra_args, "target": store, "draft": store}
        return stack_parts(dataclasses.replace(given, extra_args=seen), dirs)

    gateway = (
        *("--client-timeout-s", f"{options.client_timeout_s:g}"),
        *("--session-ttl-s", f"{options.ttl_s:g}", "--finished-ttl-s", f"{options.ttl_s:g}"),
    )
    stack_options = StackOptions(
        model=options.model,
        dtype=options.dtype,
        threads=options.threads,
        extra_args={"gateway": gateway},
        log_dir=logs,
    )
    async with Stack(stack_options, parts=parts) as stack:
        yield stack


@dataclass(slots=True)
class Soak:
    """A running stack and what calls it."""

    options: SoakOptions
    stack: Stack
    clients: Sequence[AsyncClient]
    watcher: Watcher
    known: Sequence[Request]
    mix: Mix
    log: Callable[[str], None]
    references: References = field(default_factory=References)
    max_sessions: int = 0

    async def learn(self) -> None:
        """Record the catalogue's answers by plain decoding, a few at a time."""
        few = asyncio.Semaphore(_LEARNERS)

        async def learn(request: Request) -> None:
            async with few:
                stream = self.clients[0].stream(request.prompt, **request.options(Speculation(off=True)))
                async for _ in stream:
                    pass
                self.references.learn(request.name, stream.tokens)

        await asyncio.gather(*map(learn, self.known))
        self.max_sessions = (await self.clients[0].model_info()).max_sessions

    async def fill(self) -> int:
        """Write every block of the target's pool once, by prompts of random tokens; return the tokens sent.

        Memory is committed when a block is first written, so the target would grow until then.
        """
        info = await self.watcher.target.GetTargetInfo(self.watcher.info)
        size = min(_MODEL_WORDS, info.context_window // 2)
        count = round(_FILL_OVER * info.kv_blocks_total * info.kv_block_tokens / size)
        chance, few = Random(self.options.seed), asyncio.Semaphore(_FILL_STREAMS)

        async def write() -> None:
            async with few:
                prompt = [chance.randrange(info.vocab_size // 2, info.vocab_size) for _ in range(size)]
                async for _ in self.clients[0].stream(prompt, max_tokens=1):
                    pass

        await asyncio.gather(*(write() for _ in range(count)))
        return count * size

    def callers(self, count: int, heard: Heard, *, counted: bool = True) -> list[Caller]:
        """Return callers spread over all connections."""
        clients = self.clients
        return [
            Caller(clients[at % len(clients)], self.mix, self.references, heard, counted=counted)
            for at in range(count)
        ]

    async def highest(self, probes: list[Probe]) -> int:
        """Return the most streams that hold. Raises RuntimeError if no share of the limit does."""
        most = self.max_sessions - _SPARE
        loads = [self.options.streams] if self.options.streams else [int(most * share) for share in _SHARES]
        for streams in loads:
            probes.append(await self.probe(streams))
            self.log(str(probes[-1]))
            if probes[-1].holds:
                return streams
        raise RuntimeError(f"streams: one of {loads} must hold; none did")

    async def probe(self, streams: int) -> Probe:
        """Run `streams` streams for a while."""
        heard, began_s = Heard(), time.monotonic()
        async with calling(self.callers(streams, heard), _SPREAD_S, cut=True):
            await asyncio.sleep(_SPREAD_S)
            span = Span(time.monotonic(), time.monotonic() + self.options.probe_s)
            await asyncio.sleep(self.options.probe_s)
        return probe_of(streams, heard, self.watcher.between(began_s, time.monotonic()), span)

    async def soak(self, outcome: Outcome) -> None:
        """Warm up, then run pairs of blocks: one with misreaders, one with ordinary clients instead."""
        outcome.heard = heard = Heard()
        places = 2 * self.options.misreaders
        async with calling(self.callers(outcome.streams - places, heard), _SPREAD_S, cut=True):
            async with self._standing_in(heard):
                await asyncio.sleep(_SPREAD_S + self.options.warm_up_s)
            began_s = time.monotonic()
            for pair in range(self.options.pairs):
                for misread in (True, False) if pair % 2 else (False, True):
                    outcome.blocks.append(await self._block(pair, heard, misread=misread))
                self.log(f"pair {pair + 1} of {self.options.pairs}")
            outcome.soaked = Span(began_s, time.monotonic())

    async def _block(self, pair: int, heard: Heard, *, misread: bool) -> Block:
        began_s = time.monotonic()
        async with self._misreading(heard) if misread else self._standing_in(heard):
            await asyncio.sleep(self.options.block_s)
        return Block(pair, misread, Span(began_s, time.monotonic()))

    @asynccontextmanager
    async def _misreading(self, heard: Heard) -> AsyncIterator[None]:
        def one(pause_s: float | None) -> Misreader:
            return Misreader(self.stack.gateways[0], self.options.client_timeout_s, pause_s, heard)

        pauses = (_PAUSE_SLOW_S, None) * self.options.misreaders
        async with _until_left([asyncio.create_task(one(pause_s).run()) for pause_s in pauses]):
            yield

    @asynccontextmanager
    async def _standing_in(self, heard: Heard) -> AsyncIterator[None]:
        ordinary = self.callers(2 * self.options.misreaders, heard, counted=False)
        async with _until_left([asyncio.create_task(caller.run()) for caller in ordinary]):
            yield

    async def overload(self, streams: int) -> Overload:
        """Run the load, a multiple of it, and the load again."""
        options, ordinary, extra, lag_s = self.options, Heard(), Heard(), list[float]()
        async with calling(self.callers(streams, ordinary), _SPREAD_S):
            await asyncio.sleep(2 * _SPREAD_S)
            began_s = time.monotonic()
            await asyncio.sleep(options.before_s)
            begin_s = time.monotonic()
            many = self.callers((options.fold - 1) * streams, extra)
            async with calling(many, min(_SPREAD_S, options.overload_s / 2)):
                async with _until_left([asyncio.create_task(_watch_lag(lag_s))]):
                    await asyncio.sleep(options.overload_s)
                for caller in many:
                    caller.stop()
                end_s = time.monotonic()
                await asyncio.sleep(options.after_s)
                last_s = time.monotonic()
        spans = (Span(began_s, begin_s), Span(begin_s, end_s), Span(end_s, last_s))
        return Overload(*spans, ordinary, extra, lag_s)


@asynccontextmanager
async def _until_left(tasks: Sequence[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Cancel running tasks at the end of the context; raise what one of them raised."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _watch_lag(late_s: list[float]) -> None:
    """Record how late this event loop is, which all times measured here include."""
    while True:
        due_s = time.monotonic() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        late_s.append(max(0.0, time.monotonic() - due_s))


async def measure(options: SoakOptions, log: Callable[[str], None]) -> Outcome:
    """Run the soak. Raises PartFailed if a part of the stack dies, RuntimeError if no load holds."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="galley-soak-") as folder:
        logs = Path(folder)
        async with AsyncExitStack() as held:
            stack = await held.enter_async_context(soaked_stack(options, logs))
            soak = await _connect(options, stack, held, log)
            async with _until_left([asyncio.create_task(soak.watcher.run())]):
                await stack.run(_phases(soak, outcome))
            drained_s = await stop_services(stack)
        _read_logs(outcome, logs, drained_s)
    return outcome


async def _connect(
    options: SoakOptions, stack: Stack, held: AsyncExitStack, log: Callable[[str], None]
) -> Soak:
    redis = await held.enter_async_context(
        redis_asyncio.Redis(unix_socket_path=stack.address("valkey"), decode_responses=False)
    )
    channel = await held.enter_async_context(grpc.aio.insecure_channel(stack.address("target")))
    watcher = Watcher(
        pids={part: stack.pid(part) for part in PARTS},
        redis=redis,
        target=rpc.TargetStub(channel),
        info=pb.GetTargetInfoRequest(),
        every_s=options.every_s,
    )
    clients = [
        await held.enter_async_context(AsyncClient(stack.gateways[0], retries=NO_RETRIES))
        for _ in range(_CONNECTIONS)
    ]
    known = catalogue(options.known, options.seed)
    modes = speculations(draft_model_of(stack.options) is not None)
    return Soak(options, stack, clients, watcher, known, Mix(known, modes, options.seed + 1), log)


async def _phases(soak: Soak, outcome: Outcome) -> None:
    options, log, watcher = soak.options, soak.log, soak.watcher
    log("recording the answers of the catalogue")
    await soak.learn()
    log("filling the target's pool")
    sent = 0 if options.quick else await soak.fill()
    log("looking for the highest load that holds")
    outcome.streams = await soak.highest(outcome.probes)
    await asyncio.sleep(_SETTLE_S)
    idle = (await watcher.look()).processes
    log(f"soaking with {outcome.streams} streams")
    await soak.soak(outcome)
    log(f"overloading with {options.fold} times the clients")
    outcome.overload = await soak.overload(outcome.streams)
    log("checking what is left")
    store = f"unix://{soak.stack.address('valkey')}"
    outcome.left = await left_idle(watcher, soak.clients[0], store, idle, options.ttl_s)
    outcome.samples = list(watcher.samples)
    outcome.facts = {"filled_tokens": sent, "max_sessions": soak.max_sessions}


def _read_logs(outcome: Outcome, logs: Path, drained_s: float) -> None:
    if outcome.left is not None:
        outcome.left = dataclasses.replace(
            outcome.left,
            drained_s=drained_s,
            tasks={part: tasks_left(logs / f"{part}.log") for part in SERVICES},
            errors=tuple(error for part in SERVICES for error in errors_in(logs / f"{part}.log")),
            errors_of_grpc=sum(errors_of_grpc(logs / f"{part}.log") for part in SERVICES),
        )
