"""A replica of several ranks without Ray: rank 0 in this process, the others in processes that it starts.

With several hosts (`services.target.ranks.hosts`) this is host 0. A lost rank takes the replica with it, as
on Ray (`services.target.ray.replica`): it withdraws its registration and ends; whoever started it starts it
anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc

from galley.common.logs import get_logger
from galley.common.registry.registration import Registered
from galley.common.server.process import in_passing_thread, limit_threads
from galley.common.server.server import Parts, Service
from services.target.loading import refuse_model
from services.target.ranks.follower import device_environment, start_followers
from services.target.ranks.hosts import await_hosts, end_ranks, open_meeting, until_one_starts_again
from services.target.ranks.rank import spec_of
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from galley.engine.parallel.process_group import Store
    from services.target.ranks.rank_zero import RankZero

_LOG = get_logger(__name__)
# For the withdrawal; then the process ends, whatever is still open.
_LAST_WORDS_S = 2.0
# For what the other ranks have to send to a collector, at an end in order.
_FLUSH_S = 4.0


class RankedTarget:
    """What the server serves; ends the process when a rank is lost."""

    def __init__(self, settings: TargetSettings) -> None:
        self._settings = settings
        self._spec = spec_of(settings, settings.tensor_parallel)
        self._loop = asyncio.get_running_loop()
        self._zero: RankZero | None = None
        self._followers: list[asyncio.subprocess.Process] = []
        self._watches: list[asyncio.Task[None]] = []
        self._service: Service | None = None
        self._lost: asyncio.Task[None] | None = None
        self._ending = False

    @property
    def grpc_services(self) -> Sequence[str]:
        """Those of the one replica that all ranks are."""
        return self._replica.grpc_services

    async def start(self, server: grpc.aio.Server, parts: Parts) -> None:
        """Start the other ranks, load with them, register. Raises UnsupportedModel, Unavailable, OSError."""
        settings, spec = self._settings, self._spec
        limit_threads(spec.threads)  # before torch is imported
        parts.readiness.stage("checking the model", detail=settings.model)
        await in_passing_thread(refuse_model, settings)
        parts.readiness.stage("starting ranks", detail=f"{spec.size} on {settings.hosts} hosts")
        store = open_meeting(settings)
        taken = await await_hosts(store, settings)
        self._followers = await start_followers(settings, spec, store.address)
        self._watches = [asyncio.create_task(self._watch(process)) for process in self._followers]
        os.environ.update(device_environment(spec, 0))
        # Late, so that --help needs no torch.
        from services.target.ranks.rank_zero import RankZero  # noqa: PLC0415
        from services.target.registration import registered_target  # noqa: PLC0415
        from services.target.serving import add_target  # noqa: PLC0415

        parts.readiness.stage("loading model", detail=settings.model)
        self._zero = RankZero(settings, spec, self._lose)
        engine = await in_passing_thread(self._zero.load, store)
        # Not before: who meets holds the store.
        self._watches.append(asyncio.create_task(self._watch_hosts(store, taken)))
        service = await add_target(server, parts, engine, settings)
        self._service = registered_target(service, settings, parts.address)

    async def drain(self) -> None:
        """Take no new sessions, let the live ones end, and hand over those that are left."""
        await self._replica.drain()

    async def close(self) -> None:
        """Withdraw, let the other ranks go, and give everything back."""
        self._ending = True
        if self._service is not None:
            await self._service.close()
        if self._zero is not None:
            await asyncio.to_thread(self._zero.release)
        await end_ranks(self._followers, _FLUSH_S)
        for watch in self._watches:
            watch.cancel()

    async def give_up(self) -> None:
        """End what a start that failed has started."""
        self._ending = True
        await end_ranks(self._followers, 0)

    @property
    def _replica(self) -> Service:
        if self._service is None:
            raise RuntimeError("the ranks have not started")
        return self._service

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Notice the end of a rank, also while nothing is asked of it."""
        code = await process.wait()
        if not self._ending:
            _LOG.error("a rank has ended", pid=process.pid, exit_code=code)
            self._begin_to_end()

    async def _watch_hosts(self, store: Store, taken: Sequence[int]) -> None:
        """Notice that another host has lost its ranks and begins anew, also while nothing is asked."""
        await until_one_starts_again(store, self._settings, taken)
        _LOG.error("another host has started again")
        self._begin_to_end()

    def _lose(self) -> None:
        """From the thread that runs passes."""
        self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        if self._lost is None and not self._ending:
            self._lost = asyncio.create_task(self._end())

    async def _end(self) -> None:
        _LOG.error("this replica ends: its ranks are no longer one")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    if isinstance(self._service, Registered):
                        await self._service.withdraw()
        finally:
            # Threads may hang in an exchange with a rank that is gone; the other ranks end with this process.
            os._exit(1)


async def start_ranked_target(settings: TargetSettings, server: grpc.aio.Server, parts: Parts) -> Service:
    """The replica, loaded and registered. Raises UnsupportedModel, Unavailable, OSError, ValueError."""
    target = RankedTarget(settings)
    try:
        await target.start(server, parts)
    except BaseException:
        await target.give_up()
        raise
    return target
