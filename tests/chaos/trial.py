"""A full stack of processes under streams; each disturbance of it is measured and undone.

The stack has two gateways, two targets of one engine, two drafts and a Valkey. Every link between them, and
from the streams' clients, is behind a relay; every third stream goes by HTTP, over the same link. An event
strikes a process (SIGKILL; SIGTERM; SIGSTOP, later SIGCONT), a link (delay, loss, reset, cuts of one
direction or both), the store's file or its clock; or two of these at once. A process that died alone is
restarted once every stream continues without it; the store, and whatever died together with something else,
at once. The next event waits for a restart only in the same pool, so that there is a replica to stand in.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import grpc

from galley.client.client import AsyncClient
from galley.stack.parts import find_vllm_python
from galley.stack.stack import Stack, StackOptions
from services.gateway.replicas.membership import POLL_S
from tests.chaos.disturbances import (
    CLOCK,
    FLIP,
    GIVE_UPS,
    KILL,
    PLANS,
    POOLS,
    TERM,
    TRUNCATE,
    Disturbance,
    Event,
    killed,
    kind_of,
    pool_of,
)
from tests.chaos.http_streams import HttpStream
from tests.chaos.links import GATEWAYS, REPLICAS, STORE, Links
from tests.chaos.packets import PacketFilter, is_isolated
from tests.chaos.store_files import StoreClock
from tests.chaos.streams import (
    Stream,
    longest_wait,
    longest_within,
    options,
    prompts,
    usual_wait,
)
from tests.chaos.strikes import Strikes
from tests.fakes import tiny_model

WATCHED_S = 1.0
"""Time for which streams are watched after a disturbance is over."""
DRAFT_KILL = killed("draft").kind
_EXPIRED = frozenset({grpc.StatusCode.NOT_FOUND})
_LOST = _EXPIRED | {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.FAILED_PRECONDITION}
_ENDS = {TRUNCATE: _LOST, FLIP: _LOST, CLOCK: _EXPIRED}
"""Errors with which an answer may end: of a bit inverted in the owner's name, FAILED_PRECONDITION."""
_TOKENS_AGO_S = 10.0
_BY_HTTP = 2
"""Remainder of the numbers of streams by HTTP, divided by 3."""
_KNOWN_S = POLL_S + 0.1
"""Time after which a gateway that can reach a replica has met it."""

T = TypeVar("T")
_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Measured:
    """The effect of an event on streams, in seconds.

    `waits_s` has the longest wait of each stream, from the strike until WATCHED_S after the disturbance.
    `before_s` and `after_s` are the longest waits of any stream within WATCHED_S before and after the strike,
    within an answer; `round_s` is the median time between two tokens before it. These three are meant for
    kills of drafts, before which nothing else is done. `restart_s` is the time from a kill of the store until
    it answers again.
    """

    event: Event
    waits_s: tuple[float, ...]
    before_s: float
    after_s: float
    round_s: float
    restart_s: float = 0.0

    @property
    def kind(self) -> str:
        return kind_of(self.event)

    @property
    def worst_s(self) -> float:
        return max(self.waits_s)


class Trial:
    """A stack under streams."""

    def __init__(self, stack: Stack, links: Links, streams: list[Stream], strikes: Strikes) -> None:
        self.stack = stack
        self.links = links
        self.streams = streams
        self.strikes = strikes
        self.mended_s: dict[str, list[float]] = defaultdict(list)
        self._running: list[asyncio.Task[None]] = []
        self._mending: dict[str, asyncio.Task[None]] = {}

    async def learn(self) -> None:
        """Read the reference of each stream, one at a time; call it while nothing is disturbed."""
        for stream in self.streams:
            await stream.learn()

    async def is_deterministic(self) -> bool:
        """Return what the targets have measured: the bits of a token do not depend on its step."""
        async with AsyncClient(self.links.fronts) as client:
            return (await client.model_info()).deterministic

    def start(self) -> None:
        self._running = [asyncio.create_task(stream.run()) for stream in self.streams]

    async def finish(self, *, mended: bool = True) -> None:
        """Let each stream end its answer. Raise the error of a stream, or with `mended` of a restart."""
        if mended:
            await self._unless_one_fails(self._whole(frozenset(POOLS)))
        for stream in self.streams:
            stream.over = True
        async with asyncio.timeout(max(stream.patience_s for stream in self.streams)):
            await asyncio.gather(*self._running)

    async def stop(self) -> None:
        """Cancel the streams and restarts that still run."""
        tasks = [*self._running, *self._mending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def first_possible(self, planned: Sequence[Event]) -> int:
        """Return the index of the first event that waits for no restart, else of the first."""
        busy = {pool_of(part) for part, task in self._mending.items() if not task.done()}
        free = (at for at, event in enumerate(planned) if not busy & _pools_of(event))
        return next(free, 0)

    async def disturb(self, *event: Disturbance) -> Measured:
        """Strike, and return the measured effect once every stream continues.

        Raise the error of a stream, TimeoutError if one gets no more tokens, PartFailed if a part does not
        restart.
        """
        return await self._unless_one_fails(self._disturb(event))

    async def _disturb(self, event: Event) -> Measured:
        await self._whole(_pools_of(event))
        if kind_of(event) == DRAFT_KILL:
            await asyncio.sleep(WATCHED_S)
        struck_s, alone = time.monotonic(), len(event) == 1
        down_s = await asyncio.gather(*(self._strike(one, alone=alone) for one in event))
        over_s = time.monotonic() + WATCHED_S
        await self._heard_after(over_s)
        measured = self._measured(event, struck_s, over_s, max(down_s))
        if alone:
            self._mend(event[0])
        for stream in self.streams:
            stream.forget(time.monotonic() - _TOKENS_AGO_S)
        return measured

    async def _heard_after(self, since_s: float) -> None:
        await asyncio.gather(*(stream.heard_after(since_s) for stream in self.streams))

    def _measured(self, event: Event, struck_s: float, over_s: float, restart_s: float) -> Measured:
        heard = [stream.heard_s for stream in self.streams]
        since_s = struck_s - WATCHED_S
        usual = [usual_wait(times, since_s, struck_s) for times in heard]
        return Measured(
            event,
            tuple(longest_wait(times, struck_s, over_s) for times in heard),
            self._longest_within(since_s, struck_s),
            self._longest_within(struck_s, struck_s + WATCHED_S),
            median([wait for wait in usual if wait is not None] or [0.0]),
            restart_s,
        )

    def _longest_within(self, since_s: float, until_s: float) -> float:
        return max(
            longest_within(stream.heard_s, since_s, until_s, stream.asked_s) for stream in self.streams
        )

    async def _strike(self, disturbance: Disturbance, *, alone: bool) -> float:
        """Do the disturbance until it is over; return how long the store was down, or 0."""
        steps_clock = disturbance.what == CLOCK
        if ends := _ENDS.get(disturbance.what):
            self._may_end(ends, later=steps_clock)
        down_s = await self.strikes.strike(disturbance)
        if steps_clock:  # a session that was made by a clock behind the true one has just expired
            self._may_end(_EXPIRED)
        if not alone:
            self._mend(disturbance)
        return down_s

    def _may_end(self, codes: frozenset[grpc.StatusCode], *, later: bool = False) -> None:
        for stream in self.streams:
            stream.may_end(codes, later=later)

    def _mend(self, disturbance: Disturbance) -> None:
        """Start to restart a process that has ended, in the background."""
        [part, *rest] = disturbance.where
        if not rest and part != STORE and disturbance.what in {KILL, TERM}:
            self._mending[part] = asyncio.create_task(self._bring_back(part))

    async def _bring_back(self, part: str) -> None:
        since_s = time.monotonic()
        await self.stack.restart(part)
        if part in REPLICAS:
            await asyncio.gather(*(self.links[gateway, part].used() for gateway in self._gateways()))
            await asyncio.sleep(_KNOWN_S)
        self.mended_s[pool_of(part)].append(time.monotonic() - since_s)

    def _gateways(self) -> list[str]:
        return [gateway for gateway in GATEWAYS if gateway in self.stack.running]

    async def _whole(self, pools: frozenset[str]) -> None:
        """Wait until no part of these pools is being restarted. Raise PartFailed."""
        await asyncio.gather(*(task for part, task in self._mending.items() if pool_of(part) in pools))

    async def _unless_one_fails(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; raise the error of a stream that fails meanwhile."""
        working = asyncio.create_task(work)
        try:
            await asyncio.wait({working, *self._running}, return_when=asyncio.FIRST_COMPLETED)
            for task in self._running:
                if task.done():
                    task.result()
            return await working
        finally:
            working.cancel()
            await asyncio.wait({working})


def _pools_of(event: Event) -> frozenset[str]:
    return frozenset[str]().union(*(one.pools for one in event))


@asynccontextmanager
async def trial(
    model: Path, streams: int, max_tokens: int, seed: int, log_dir: Path, engine: str = "paged"
) -> AsyncIterator[Trial]:
    """Yield a running stack that serves `model`, with its streams, which have not started."""
    asked = stack_options(model, log_dir, engine)
    async with AsyncExitStack() as opened:
        links = await opened.enter_async_context(Links(seed, StoreClock(log_dir / "clock")))
        stack = Stack(asked, parts=links.parts)
        links.of(stack)
        await opened.enter_async_context(stack)
        given = enumerate(prompts(streams, seed))
        made = [stream_of(links, number, prompt, max_tokens) for number, prompt in given]
        for stream in made:
            stream.patience_s = PLANS[engine].patience_s
        packets = PacketFilter() if is_isolated() else None
        running = Trial(stack, links, made, Strikes(stack, links, packets))
        opened.push_async_callback(running.stop)
        yield running


def stack_options(model: Path, log_dir: Path, engine: str) -> StackOptions:
    """Return the options of the stack. Raise ValueError if no interpreter has vLLM that `engine` needs."""
    with_vllm = engine == "vllm"
    return StackOptions(
        model=str(model),
        draft_model="none",
        dtype="float32",
        http_port=0,
        gateways=2,
        replicas=2,
        drafts=2,
        engine=engine,
        vllm_args='{"block_size": 32}' if with_vllm else "",
        target_python=find_vllm_python(None) if with_vllm else sys.executable,
        log_dir=log_dir,
        extra_args={
            # A restarted store then loads the sessions of a minute, not those of the whole run.
            "gateway": ("--finished-ttl-s", "60", *(f"{flag}={s}" for flag, s in GIVE_UPS.items())),
            # By default a killed store may lose what it acknowledged while it was syncing its file. If the
            # owner is killed at the same time, nobody writes a new session again.
            "valkey": ("--appendfsync", "always"),
            # vLLM allocates all of it at the start.
            "target": ("--kv-memory-mb", "64", "--max-sessions", "32") if with_vllm else (),
        },
    )


def stream_of(links: Links, number: int, prompt: list[int], max_tokens: int) -> Stream:
    """Return a stream of its own kind: its options, its first gateway, and by HTTP every third."""
    order = slice(None, None, 1 if number % 2 else -1)
    given = (prompt, options(max_tokens, number), links.fronts[order])
    return HttpStream(*given, http=links.http_fronts[order]) if number % 3 == _BY_HTTP else Stream(*given)


def save_model(directory: Path) -> Path:
    """Save a model of random weights whose streams last long enough."""
    model = tiny_model.random_llama(hidden_size=256, spread=0.1, seed=0)
    model.config.max_position_embeddings = _CONTEXT
    return tiny_model.save(model, directory)
