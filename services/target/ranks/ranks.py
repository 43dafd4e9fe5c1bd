"""Rank 0 of a sharded replica, and the replica of several ranks without Ray.

Without Ray, rank 0 is this process, which starts the others; with several hosts
(`services.target.ranks.hosts`) this is host 0. A lost rank ends the replica, as on Ray
(`services.target.ray.replica`): it withdraws its registration and exits, and whoever started it starts it
again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc

from galley.common.logs import get_logger
from galley.common.registry.registration import Registered
from galley.common.server.process import in_passing_thread, limit_threads
from galley.common.server.server import Parts, Service
from services.target.engine.protocol import TargetEngine
from services.target.loading import kv_blocks, load_engine, refuse_model
from services.target.ranks.hosts import await_hosts, end_ranks, open_meeting, until_one_starts_again
from services.target.ranks.rank import STEP_TIMEOUT_S, device_environment, load_rank, start_followers
from services.target.servicer import TargetService
from services.target.serving import add_target, registered_target
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from galley.engine.parallel.process_group import ProcessGroup, Store
    from services.target.ranks.sharded import ShardedModel

_LOG = get_logger(__name__)
# Time to withdraw and to send the last responses; then the process exits, whatever is still open.
_EXIT_S = 2.0
# Time for the other ranks to send their spans, at an orderly end.
_FLUSH_S = 4.0


class RankZero:
    """Rank 0 from `load` to `release`; calls `on_loss`, on the thread of the steps, once a rank is lost."""

    def __init__(self, settings: TargetSettings, on_loss: Callable[[], None]) -> None:
        self._settings = settings
        self._on_loss = on_loss
        self._group: ProcessGroup | None = None
        self._model: ShardedModel | None = None

    def load(self, store: Store | None) -> TargetEngine:
        """Meet the other ranks at `store` and load with them; blocks. `store` is None with one rank.

        Raises RankLost if they do not come, UnsupportedModel where the model cannot be sharded so.
        """
        if store is None:
            return load_engine(self._settings)
        # Late, so that --help needs no torch.
        from galley.engine.parallel.process_group import join  # noqa: PLC0415
        from services.target.engine.paged import PagedEngine  # noqa: PLC0415
        from services.target.ranks.sharded import ShardedModel, agree  # noqa: PLC0415

        settings, size = self._settings, self._settings.tensor_parallel
        group = join(0, size, device=settings.device, meeting=store, timeout_s=STEP_TIMEOUT_S)
        self._group = group
        model, build = load_rank(settings, group, agree(group, 0, kv_blocks(settings, group)))
        self._model = ShardedModel(model, group, self._on_loss)
        return PagedEngine(self._model, build, ranks=size)

    def release(self) -> None:
        """Stop the other ranks and leave the group; call after the last step."""
        if self._model is not None:
            self._model.stop()
        if self._group is not None:
            self._group.close()


class LossExit:
    """Exits this process with code 1 when a rank is lost, after `withdraw`; made within the event loop."""

    def __init__(self, withdraw: Callable[[], Awaitable[None]]) -> None:
        self._withdraw = withdraw
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.disarmed = False

    @property
    def has_begun(self) -> bool:
        """Return True once a rank was lost."""
        return self._task is not None

    def begin(self) -> None:
        """Withdraw and exit; may be called from any thread, and more than once."""
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._task is None and not self.disarmed:
            self._task = asyncio.create_task(self._exit())

    async def _exit(self) -> None:
        _LOG.error("replica exiting", reason="rank lost")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    await self._withdraw()
        finally:
            # Threads may hang in an exchange with a lost rank; the other ranks end with this process.
            os._exit(1)


class RankedTarget:
    """A replica of several ranks without Ray, as the server serves it."""

    grpc_services = TargetService.grpc_services

    def __init__(self, settings: TargetSettings) -> None:
        self._settings = settings
        self._exit = LossExit(self._withdraw)
        self._zero = RankZero(settings, self._exit.begin)
        self._followers: list[asyncio.subprocess.Process] = []
        self._watches: list[asyncio.Task[None]] = []
        self._service: Service | None = None

    async def start(self, server: grpc.aio.Server, parts: Parts) -> None:
        """Start the other ranks, load with them, register. Raises UnsupportedModel, Unavailable, OSError."""
        settings = self._settings
        limit_threads(settings.threads)  # before torch is imported
        parts.readiness.stage("checking the model", detail=settings.model)
        await in_passing_thread(refuse_model, settings)
        parts.readiness.stage(
            "starting ranks", detail=f"{settings.tensor_parallel} on {settings.hosts} hosts"
        )
        store = open_meeting(settings)
        starts = await await_hosts(store, settings)
        self._followers = await start_followers(settings, store.address)
        self._watches = [asyncio.create_task(self._watch(process)) for process in self._followers]
        os.environ.update(device_environment(settings.device, 0))
        parts.readiness.stage("loading model", detail=settings.model)
        engine = await in_passing_thread(self._zero.load, store)
        # Not earlier: joining uses the store on another thread.
        self._watches.append(asyncio.create_task(self._watch_hosts(store, starts)))
        service = await add_target(server, parts, engine, settings)
        self._service = registered_target(service, settings, parts.address)

    async def drain(self) -> None:
        """Take no new sessions, let the live ones end, and hand over those that are left."""
        if self._service is not None:
            await self._service.drain()

    async def close(self) -> None:
        """Withdraw, stop the other ranks, and release everything."""
        self._exit.disarmed = True
        if self._service is not None:
            await self._service.close()
        await asyncio.to_thread(self._zero.release)
        await end_ranks(self._followers, _FLUSH_S)
        for watch in self._watches:
            watch.cancel()

    async def abort(self) -> None:
        """End what a failed start has started."""
        self._exit.disarmed = True
        await end_ranks(self._followers, 0)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Notice the exit of a rank, even while no step runs."""
        code = await process.wait()
        if not self._exit.disarmed:
            _LOG.error("rank exited", pid=process.pid, exit_code=code)
            self._exit.begin()

    async def _watch_hosts(self, store: Store, starts: Sequence[int]) -> None:
        """Notice that another host has lost its ranks and started again, even while no step runs."""
        await until_one_starts_again(store, self._settings, starts)
        _LOG.error("another host restarted")
        self._exit.begin()

    async def _withdraw(self) -> None:
        if isinstance(self._service, Registered):
            await self._service.withdraw()


async def start_ranked_target(settings: TargetSettings, server: grpc.aio.Server, parts: Parts) -> Service:
    """Return the loaded, registered replica. Raises UnsupportedModel, Unavailable, OSError, ValueError."""
    target = RankedTarget(settings)
    try:
        await target.start(server, parts)
    except BaseException:
        await target.abort()
        raise
    return target
