"""The clients of one measurement: `python -m bench.gateway.clients LOAD`, with a `Load` as JSON.

They call the stubs directly, because they share the machine with the gateway. The last line of the output is
a `Measured` as JSON.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import numpy as np

from bench.gateway.load import LOAD, MEASURED, Load, Measured
from bench.loops.sides import Cpu
from galley.client.errors import rpc_error
from galley.common.server.loop import ServiceLoop
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

# No control token of the default model, and a token of every vocabulary.
_FIRST_ID = 40
_PROMPT_TOKENS = 100
_STREAMS_A_CHANNEL = 50
_PAUSE_S = 0.5
_PERCENTS = (50, 90, 99)
# Each channel is a connection of its own, as those of different clients are.
_OWN = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(slots=True)
class _Heard:
    """Counts and times of the window; `waiting` has the calls without a token yet, and when each was made."""

    is_open: bool = False
    tokens: int = 0
    messages: int = 0
    began: int = 0
    ended: int = 0
    hinted: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    waiting: dict[int, float] = field(default_factory=dict)


class Clients:
    """The streams of one load."""

    def __init__(self, load: Load, stubs: Sequence[rpc.GenerationAsyncStub]) -> None:
        self._load = load
        self._stubs = stubs
        self._heard = _Heard()
        self._started: set[int] = set()
        self._all_started = asyncio.Event()

    async def measure(self) -> Measured:
        """Start the streams, measure the window, and leave."""
        load, heard = self._load, self._heard
        gateways, store = Cpu(load.pids), Cpu(load.store)
        sending = asyncio.create_task(self._arrive() if load.arrivals_per_s else self._keep_open())
        try:
            await self._wait_for_start()
            await asyncio.sleep(load.warm_s)
            heard.is_open = True
            # Streams of before the window are none of it.
            heard.waiting.clear()
            began_s, before = time.perf_counter(), (gateways.seconds(), store.seconds())
            await asyncio.sleep(load.window_s)
            heard.is_open = False
            cpu_s, store_cpu_s = gateways.seconds() - before[0], store.seconds() - before[1]
            return self._measured(time.perf_counter() - began_s, cpu_s, store_cpu_s)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _wait_for_start(self) -> None:
        try:
            async with asyncio.timeout(self._load.start_s):
                await self._all_started.wait()
        except TimeoutError:
            if not (self._load.partly and self._started):
                raise

    async def _keep_open(self) -> None:
        async def again(number: int) -> None:
            while True:
                if not await self._answer(number):
                    await asyncio.sleep(_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for number in range(self._load.streams):
                group.create_task(again(number))

    async def _arrive(self) -> None:
        self._all_started.set()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as group:
            number = 0
            while True:
                group.create_task(self._answer(number))
                number += 1
                await asyncio.sleep(max(0.0, began_s + number / self._load.arrivals_per_s - loop.time()))

    async def _answer(self, number: int) -> bool:
        """Read one answer to its end; return False if it was refused or failed."""
        heard, called_s = self._heard, time.perf_counter()
        if heard.is_open:
            heard.began += 1
            heard.waiting[number] = called_s
        try:
            await self._read(number, called_s)
        except grpc.aio.AioRpcError as error:
            heard.waiting.pop(number, None)
            if heard.is_open:
                self._note_failure(error, time.perf_counter() - called_s)
            return False
        if heard.is_open:
            heard.ended += 1
        return True

    async def _read(self, number: int, called_s: float) -> None:
        heard, last_s = self._heard, 0.0
        async for response in self._stubs[number % len(self._stubs)].Generate(_request(self._load)):
            tokens = len(response.event.chunk.token_ids)
            if not tokens:
                continue
            now_s = time.perf_counter()
            if not last_s:
                self._note_first(number, now_s - called_s)
            if heard.is_open:
                heard.tokens += tokens
                heard.messages += 1
                if last_s:
                    heard.gaps_s.append(now_s - last_s)
            last_s = now_s

    def _note_first(self, number: int, took_s: float) -> None:
        if self._heard.waiting.pop(number, None) is not None:
            self._heard.first_s.append(took_s)
        if number < self._load.streams and not self._all_started.is_set():
            self._started.add(number)
            if len(self._started) == self._load.streams:
                self._all_started.set()

    def _note_failure(self, error: grpc.aio.AioRpcError, took_s: float) -> None:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._heard.refusals_s.append(took_s)
            self._heard.hinted += rpc_error(error).retry_after_s is not None
        else:
            self._heard.failed[f"{error.code().name}: {error.details()}"] += 1

    def _measured(self, seconds: float, cpu_s: float, store_cpu_s: float) -> Measured:
        heard, now_s = self._heard, time.perf_counter()
        waits_s = [now_s - called_s for called_s in heard.waiting.values()]
        return Measured(
            seconds=seconds,
            tokens=heard.tokens,
            messages=heard.messages,
            cpu_s=cpu_s,
            store_cpu_s=store_cpu_s,
            began=heard.began,
            ended=heard.ended,
            waiting=len(waits_s),
            first_token_ms=_percentiles_ms([*heard.first_s, *waits_s]),
            gap_ms=_percentiles_ms(heard.gaps_s),
            refused=len(heard.refusals_s),
            hinted=heard.hinted,
            refusal_ms=_percentiles_ms(heard.refusals_s),
            failed=tuple(f"{count} x {what}" for what, count in heard.failed.most_common(5)),
            started=len(self._started),
        )


def _request(load: Load) -> pb.GenerateRequest:
    mode = pb.Speculation.MODE_FIXED if load.drafted else pb.Speculation.MODE_OFF
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=range(_FIRST_ID, _FIRST_ID + _PROMPT_TOKENS)),
        sampling=pb.SamplingParams(temperature=0.0),
        max_tokens=load.answer_tokens,
        ignore_eos=True,
        speculation=pb.Speculation(mode=mode, k=load.drafted or None),
    )


def _percentiles_ms(seconds: Sequence[float]) -> tuple[float, ...]:
    if not seconds:
        return ()
    return tuple(round(1000 * float(value), 2) for value in np.percentile(np.asarray(seconds), _PERCENTS))


async def run(load: Load) -> Measured:
    """Connect to the gateways in turn, and measure."""
    channels = max(len(load.gateways), -(-load.streams // _STREAMS_A_CHANNEL), 8 * bool(load.arrivals_per_s))
    async with AsyncExitStack() as held:
        stubs = []
        for number in range(channels):
            address = load.gateways[number % len(load.gateways)]
            channel = await held.enter_async_context(grpc.aio.insecure_channel(address, options=_OWN))
            stubs.append(rpc.GenerationStub(channel))
        return await Clients(load, stubs).measure()


def main() -> None:
    """Measure the load of the first argument; print the result."""
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        measured = runner.run(run(LOAD.validate_json(sys.argv[1])))
    sys.stdout.write(MEASURED.dump_json(measured).decode() + "\n")


if __name__ == "__main__":
    main()
