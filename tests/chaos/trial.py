"""A full stack of processes under streams; each disturbance of it is measured and undone.

The stack has two gateways, two targets, two drafts and a Valkey. Every link between them, and from the
streams' clients, is behind a relay. A disturbance strikes a process (SIGKILL; SIGTERM; SIGSTOP, later
SIGCONT) or a link (delay, loss, partition, reset). A process that died is restarted once every stream
continues without it; the store is restarted at once, because there is only one. The next disturbance waits
for a restart only in the same pool, so that there is always a replica to stand in.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from galley.stack.stack import Stack, StackOptions
from services.gateway.replicas.membership import POLL_S
from tests.chaos.disturbances import KILL, STOP, TERM, Disturbance, killed, pool_of
from tests.chaos.links import GATEWAYS, REPLICAS, STORE, Links
from tests.chaos.streams import (
    PATIENCE_S,
    Stream,
    longest_wait,
    longest_within,
    options,
    prompts,
    usual_wait,
)
from tests.fakes import tiny_model

WATCHED_S = 1.0
"""Time for which streams are watched after a disturbance is over."""
DRAFT_KILL = killed("draft").kind
_TOKENS_AGO_S = 10.0
_KNOWN_S = POLL_S + 0.1
"""Time after which a gateway that can reach a replica has met it."""

T = TypeVar("T")
_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Measured:
    """The effect of a disturbance on streams, in seconds.

    `waits_s` has the longest wait of each stream, from the strike until WATCHED_S after the disturbance.
    `before_s` and `after_s` are the longest waits of any stream within WATCHED_S before and after the strike,
    within an answer; `round_s` is the median time between two tokens before it. These three are meant for
    kills of drafts, before which nothing else is done. `restart_s` is the time from a kill of the store until
    it answers again.
    """

    disturbance: Disturbance
    waits_s: tuple[float, ...]
    before_s: float
    after_s: float
    round_s: float
    restart_s: float = 0.0

    @property
    def worst_s(self) -> float:
        return max(self.waits_s)


class Trial:
    """A stack under streams."""

    def __init__(self, stack: Stack, links: Links, streams: list[Stream]) -> None:
        self.stack = stack
        self.links = links
        self.streams = streams
        self.mended_s: dict[str, list[float]] = defaultdict(list)
        self._running: list[asyncio.Task[None]] = []
        self._mending: dict[str, asyncio.Task[None]] = {}

    async def learn(self) -> None:
        """Read the reference of each stream; call it while nothing is disturbed."""
        await asyncio.gather(*(stream.learn() for stream in self.streams))

    def start(self) -> None:
        self._running = [asyncio.create_task(stream.run()) for stream in self.streams]

    async def finish(self, *, mended: bool = True) -> None:
        """Let each stream end its answer. Raise the error of a stream, or with `mended` of a restart."""
        if mended:
            await self._unless_one_fails(self._whole(frozenset(self._mending)))
        for stream in self.streams:
            stream.over = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._running)

    async def stop(self) -> None:
        """Cancel the streams and restarts that still run."""
        tasks = [*self._running, *self._mending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def disturb(self, disturbance: Disturbance) -> Measured:
        """Strike, and return the measured effect once every stream continues.

        Raise the error of a stream, TimeoutError if one gets no more tokens, PartFailed if a part does not
        restart.
        """
        return await self._unless_one_fails(self._disturb(disturbance))

    async def _disturb(self, disturbance: Disturbance) -> Measured:
        await self._whole(disturbance.pools)
        if disturbance.kind == DRAFT_KILL:
            await asyncio.sleep(WATCHED_S)
        struck_s = time.monotonic()
        restart_s = await self._strike(disturbance)
        over_s = time.monotonic() + WATCHED_S
        await self._heard_after(over_s)
        measured = self._measured(disturbance, struck_s, over_s, restart_s)
        self._mend(disturbance)
        for stream in self.streams:
            stream.forget(time.monotonic() - _TOKENS_AGO_S)
        return measured

    async def _heard_after(self, since_s: float) -> None:
        await asyncio.gather(*(stream.heard_after(since_s) for stream in self.streams))

    def _measured(
        self, disturbance: Disturbance, struck_s: float, over_s: float, restart_s: float
    ) -> Measured:
        heard = [stream.heard_s for stream in self.streams]
        since_s = struck_s - WATCHED_S
        usual = [usual_wait(times, since_s, struck_s) for times in heard]
        return Measured(
            disturbance,
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

    async def _strike(self, disturbance: Disturbance) -> float:
        """Do the disturbance until it is over; return how long the store was down, or 0."""
        if len(disturbance.where) > 1:
            await self._strike_link(disturbance)
            return 0.0
        [part] = disturbance.where
        if disturbance.what == STOP:
            await self._freeze(part, disturbance.lasts_s)
            return 0.0
        struck_s = time.monotonic()
        if disturbance.what == TERM:
            self.stack.send(part, signal.SIGTERM)
            await self.stack.ended(part)
        else:
            _at_once(self.stack.pid(part))
            await self.stack.kill(part)
        if part != STORE:
            return 0.0
        await self.stack.restart(part)
        return time.monotonic() - struck_s

    async def _freeze(self, part: str, for_s: float) -> None:
        self.stack.send(part, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            self.stack.send(part, signal.SIGCONT)

    async def _strike_link(self, disturbance: Disturbance) -> None:
        source, to = disturbance.where
        link = self.links[source, to]
        try:
            match disturbance.what:
                case "DELAY":
                    link.delay(disturbance.amount)
                case "LOSS":
                    link.lose(disturbance.amount)
                case "PARTITION":
                    link.cut()
                case _:
                    link.reset()
            await asyncio.sleep(disturbance.lasts_s)
        finally:
            link.mend()

    def _mend(self, disturbance: Disturbance) -> None:
        """Start to restart a process that has ended, in the background."""
        [part, *rest] = disturbance.where
        if not rest and part != STORE and disturbance.what in {KILL, TERM}:
            self._mending[pool_of(part)] = asyncio.create_task(self._bring_back(part))

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
        await asyncio.gather(*(self._mending[pool] for pool in pools if pool in self._mending))

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


def _at_once(pid: int) -> None:
    """Give a process normal priority, so that it closes its connections as soon as it is killed.

    A process of idle priority (a draft that shares a machine with its target) closes them only when a core is
    idle.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
    with suppress(OSError):  # the file exists only if Linux groups processes by session
        Path(f"/proc/{pid}/autogroup").write_text("0")


@asynccontextmanager
async def trial(model: Path, streams: int, max_tokens: int, seed: int, log_dir: Path) -> AsyncIterator[Trial]:
    """Yield a running stack that serves `model`, with its streams, which have not started."""
    asked = StackOptions(
        model=str(model),
        draft_model="none",
        dtype="float32",
        gateways=2,
        replicas=2,
        drafts=2,
        log_dir=log_dir,
        # A restarted store then loads the sessions of a minute, not those of the whole run.
        extra_args={"gateway": ("--finished-ttl-s", "60")},
    )
    async with AsyncExitStack() as opened:
        links = await opened.enter_async_context(Links(seed))
        stack = Stack(asked, parts=links.parts)
        links.of(stack)
        await opened.enter_async_context(stack)
        made = [
            Stream(prompt, options(max_tokens, number), links.fronts[:: 1 if number % 2 else -1])
            for number, prompt in enumerate(prompts(streams, seed))
        ]
        running = Trial(stack, links, made)
        opened.push_async_callback(running.stop)
        yield running


def save_model(directory: Path) -> Path:
    """Save a model of random weights whose streams last long enough; no token is poison."""
    model = tiny_model.random_llama(hidden_size=256, spread=0.1, seed=0)
    with torch.no_grad():
        model.model.embed_tokens.weight[tiny_model.POISON] = 0.0
    model.config.max_position_embeddings = _CONTEXT
    return tiny_model.save(model, directory)
