"""Do one disturbance to a stack until it is over."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from redis.asyncio import Redis

from galley.stack.part import PartFailed
from galley.stack.stack import Stack
from tests.chaos import store_files
from tests.chaos.disturbances import (
    CLOCK,
    DAMAGES,
    DELAY,
    DROP_REQUESTS,
    DROP_RESPONSES,
    LOSS,
    ONLY_REQUESTS,
    ONLY_RESPONSES,
    RESET,
    STOP,
    TERM,
    TRUNCATE,
    Disturbance,
)
from tests.chaos.links import STORE, Ends, Links
from tests.chaos.packets import PacketFilter

_CLOSE_S = 1.0
_POLL_S = 0.05


class Strikes:
    """Disturbances of one stack.

    `dropped` counts cuts by the packet filter, `repaired` files of the store that had to be repaired.
    """

    def __init__(self, stack: Stack, links: Links, packets: PacketFilter | None) -> None:
        self._stack = stack
        self._links = links
        self._packets = packets
        self.dropped = self.repaired = 0

    async def strike(self, disturbance: Disturbance) -> float:
        """Do the disturbance; return how long the store was down, or 0."""
        what = disturbance.what
        if len(disturbance.where) > 1:
            source, to = disturbance.where
            await self._strike_link((source, to), disturbance)
            return 0.0
        [part] = disturbance.where
        if what == STOP:
            await self._freeze(part, disturbance.lasts_s)
            return 0.0
        if what == CLOCK:
            await self._step_clock(disturbance.amount, disturbance.lasts_s)
            return 0.0
        struck_s = time.monotonic()
        await self._end(part, gently=what == TERM)
        if part != STORE:
            return 0.0
        if what in DAMAGES:
            damage = store_files.truncate if what == TRUNCATE else store_files.flip
            damage(self._stack.dirs.data, disturbance.amount)
        await self._start_store()
        return time.monotonic() - struck_s

    async def _end(self, part: str, *, gently: bool) -> None:
        if gently:
            self._stack.send(part, signal.SIGTERM)
            await self._stack.ended(part)
        else:
            _at_once(self._stack.pid(part))
            await self._stack.kill(part)

    async def _start_store(self) -> None:
        try:
            await self._stack.restart(STORE)
        except PartFailed:
            self.repaired += 1
            await self._start_repaired(self._stack.dirs.data)

    async def _start_repaired(self, data: Path) -> None:
        store_files.repair(data)
        try:
            await self._stack.restart(STORE)
        except PartFailed:
            # The checker reads past a command of a wrong name, which the server refuses.
            store_files.truncate(data, 1.0)
            store_files.repair(data)
            await self._stack.restart(STORE)

    async def _freeze(self, part: str, for_s: float) -> None:
        self._stack.send(part, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            self._stack.send(part, signal.SIGCONT)

    async def _step_clock(self, ahead_s: float, for_s: float) -> None:
        self._links.clock.step(ahead_s)
        try:
            await asyncio.sleep(for_s)
        finally:
            self._links.clock.step(0.0)
        async with Redis.from_url(self._stack.store_url) as store:
            while abs(await _clock_s(store) - time.time()) > _CLOSE_S:  # noqa: ASYNC110  # no event tells
                await asyncio.sleep(_POLL_S)

    async def _strike_link(self, ends: Ends, disturbance: Disturbance) -> None:
        if disturbance.what in {DROP_REQUESTS, DROP_RESPONSES} and self._packets is not None:
            await self._drop(self._packets, ends, disturbance)
            return
        link = self._links[ends]
        what = disturbance.what
        try:
            if what == DELAY:
                link.delay(disturbance.amount)
            elif what == LOSS:
                link.lose(disturbance.amount)
            elif what == RESET:
                link.reset()
            else:
                link.cut(requests=what not in ONLY_RESPONSES, responses=what not in ONLY_REQUESTS)
            await asyncio.sleep(disturbance.lasts_s)
        finally:
            link.mend()

    async def _drop(self, packets: PacketFilter, ends: Ends, disturbance: Disturbance) -> None:
        ports, requests = self._links.ports(ends), disturbance.what == DROP_REQUESTS
        self.dropped += 1
        for port in ports:
            packets.drop(port, requests=requests)
        try:
            await asyncio.sleep(disturbance.lasts_s)
        finally:
            for port in ports:
                packets.mend(port, requests=requests)


async def _clock_s(store: Redis) -> float:
    seconds, microseconds = await store.time()
    return float(seconds + microseconds / 1e6)


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
