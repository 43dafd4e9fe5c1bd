"""Rank 0 of a sharded replica, and the replica of several ranks without Ray.

Without Ray, rank 0 is this process, which starts the others. A lost rank ends the replica, as on Ray
(`services.target.ray.replica`): it withdraws its registration and exits, and whoever started it starts it
again.

With several hosts, this is host 0, which opens the store at `ranks_address`. Each other host signs in there,
which counts its starts. Once all have signed in, host 0 records which start of each it takes, and each host
starts its ranks, which meet at the same store. Scheduling pods and pulling images can take long, so hosts
wait here until all ranks are about to start. A host that restarts later finds that another start of it was
taken, and exits. Host 0 sees the restart and exits too: the ranks that it had are gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from galley.common.logs import get_logger, start_logging
from galley.common.registry.registration import Registered
from galley.common.server.process import in_passing_thread, limit_threads, run_unless
from galley.common.server.server import Parts, Service
from galley.common.sockets import host_and_port
from galley.core.errors import Unavailable
from services.target.engine.paged.loading import kv_blocks, refuse_model
from services.target.engine.protocol import LoadedEngine
from services.target.loading import load_engine
from services.target.ranks.rank import STEP_TIMEOUT_S, device_environment, load_rank, start_followers
from services.target.servicer import TargetService, add_target, registered_target
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from galley.engine.parallel.process_group import ProcessGroup, Store
    from services.target.ranks.sharded import ShardedModel

_LOG = get_logger(__name__)
_POLL_S = 0.1
_WATCH_S = 1.0
_CONNECT_S = 2.0
# Time to withdraw and to send the last responses; then the process exits, whatever is still open.
_EXIT_S = 2.0
# Time for the other ranks to send their spans, at an orderly end.
_FLUSH_S = 4.0


async def await_hosts(store: Store, settings: TargetSettings) -> list[int]:
    """Wait until all hosts have signed in; return for each other host the number of the start that was taken.

    Host 0 calls it. Raise Unavailable after `ranks_timeout_s`.
    """
    others = range(1, settings.hosts)
    await _until_set(store.store, [_starts(index) for index in others], settings, "not all hosts signed in")
    starts = _starts_of(store, settings)
    for index, start in zip(others, starts, strict=True):
        store.store.set(_taken(index), str(start))
    return starts


async def until_one_starts_again(store: Store, settings: TargetSettings, starts: Sequence[int]) -> None:
    """Return when another host has restarted since `await_hosts`; host 0 calls it."""
    while _starts_of(store, settings) == list(starts):  # noqa: ASYNC110  # another host counts them
        await asyncio.sleep(_WATCH_S)


def _starts_of(store: Store, settings: TargetSettings) -> list[int]:
    return [store.store.add(_starts(index), 0) for index in range(1, settings.hosts)]


def run_host(settings: TargetSettings) -> None:
    """Run the ranks of a host other than 0 until rank 0 stops them; exit 1 if one is lost."""
    start_logging("galley-target", settings.log_level, settings.log_format)
    limit_threads(settings.thread_count)
    try:
        asyncio.run(_run_host(settings))
    except (Unavailable, OSError, ValueError, RuntimeError) as error:  # torch's store raises the last
        _LOG.error("host exiting", host=settings.host_index, error=str(error))
        raise SystemExit(1) from None


async def _run_host(settings: TargetSettings) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if await run_unless(stopped, _sign_in(settings)) is None:
        return
    ranks = await start_followers(settings, settings.ranks_address)
    _LOG.info("ranks started", host=settings.host_index, ranks=len(ranks))
    watched = asyncio.create_task(_has_lost_rank(ranks))
    stop = asyncio.create_task(stopped.wait())
    await asyncio.wait({watched, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not watched.done():
        # Host 0 is stopped too and serves on while it drains; then it stops the ranks here.
        _LOG.info("waiting for host 0 to drain", host=settings.host_index)
    stop.cancel()
    if await watched:
        await end_ranks(ranks, 0)
        raise Unavailable("a rank of this host failed")


async def _sign_in(settings: TargetSettings) -> bool:
    """Return True once all hosts have signed in.

    Raise Unavailable after `ranks_timeout_s`, or if the others began with an earlier start of this host.
    """
    store = await _connected(settings)
    start = await asyncio.to_thread(store.add, _starts(settings.host_index), 1)
    taken = _taken(settings.host_index)
    await _until_set(store, [taken], settings, "host 0 did not start the ranks")
    if int(await asyncio.to_thread(store.get, taken)) != start:
        raise Unavailable("the other hosts began with an earlier start of this host; they must restart too")
    return True


async def _connected(settings: TargetSettings) -> Any:
    from galley.engine.parallel.process_group import connect_store  # noqa: PLC0415  # imports torch

    deadline = time.monotonic() + settings.ranks_timeout_s
    address, size = settings.ranks_address, settings.tensor_parallel
    host, port = host_and_port(address)
    while True:
        try:
            async with asyncio.timeout(_CONNECT_S):
                # torch's client retries on a thread and prints a stack at each failure.
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return await asyncio.to_thread(connect_store, address, size, _CONNECT_S)
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                problem = (str(error) or "no response").splitlines()[0]
                raise Unavailable(f"ranks_address: {address} must be reachable: {problem}") from error
            await asyncio.sleep(_POLL_S)


async def _until_set(store: Any, names: Sequence[str], settings: TargetSettings, problem: str) -> None:
    """Raise Unavailable with `problem` if the store lacks a name after `ranks_timeout_s`."""
    deadline = time.monotonic() + settings.ranks_timeout_s
    missing = list(names)
    while missing:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{problem} within {settings.ranks_timeout_s:g} s; missing: {', '.join(missing)}"
            )
        # The store may be another host's; a signal to stop must not wait for it.
        missing = [name for name in missing if not await asyncio.to_thread(store.check, [name])]
        if missing:
            await asyncio.sleep(_POLL_S)


async def _has_lost_rank(ranks: Sequence[asyncio.subprocess.Process]) -> bool:
    """Return True once a rank has failed, False if all have ended well."""
    for code in asyncio.as_completed([rank.wait() for rank in ranks]):
        if await code != 0:
            return True
    return False


async def end_ranks(ranks: Sequence[asyncio.subprocess.Process], grace_s: float) -> None:
    """Wait for all ranks to end; kill those that still run after `grace_s`."""
    ends = asyncio.gather(*(rank.wait() for rank in ranks))
    try:
        await asyncio.wait_for(asyncio.shield(ends), grace_s)
    except TimeoutError:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
        await ends


def _starts(index: int) -> str:
    return f"galley/host-{index}/starts"


def _taken(index: int) -> str:
    return f"galley/host-{index}/taken"


def open_meeting(settings: TargetSettings) -> Store:
    """Open the store where the ranks meet, those of other hosts included; host 0 calls it. Raise OSError."""
    from galley.engine.parallel.process_group import open_store  # noqa: PLC0415  # imports torch

    if settings.hosts == 1:
        return open_store("127.0.0.1", settings.tensor_parallel)
    _, port = host_and_port(settings.ranks_address)
    return open_store(settings.host, settings.tensor_parallel, port=port)


class RankZero:
    """Rank 0 from `load` to `release`; calls `on_loss`, on the thread of the steps, once a rank is lost."""

    def __init__(self, settings: TargetSettings, on_loss: Callable[[], None]) -> None:
        self._settings = settings
        self._on_loss = on_loss
        self._group: ProcessGroup | None = None
        self._model: ShardedModel | None = None

    def load(self, store: Store | None) -> LoadedEngine:
        """Meet the other ranks at `store` and load with them; blocks. `store` is None with one rank.

        Raise RankLost if they do not come, UnsupportedModel where the model cannot be sharded so.
        """
        if store is None:
            return load_engine(self._settings)
        # Late, so that --help needs no torch.
        from galley.engine.parallel.process_group import join  # noqa: PLC0415
        from services.target.engine.paged.engine import PagedEngine  # noqa: PLC0415
        from services.target.ranks.sharded import ShardedModel, agree  # noqa: PLC0415

        settings, size = self._settings, self._settings.tensor_parallel
        group = join(0, size, device=settings.device, meeting=store, timeout_s=STEP_TIMEOUT_S)
        self._group = group
        model, build = load_rank(settings, group, agree(group, 0, kv_blocks(settings, group)))
        self._model = ShardedModel(model, group, self._on_loss)
        return PagedEngine(self._model, *build, ranks=size)

    def release(self) -> None:
        """Stop the other ranks and leave the group; call after the last step."""
        if self._model is not None:
            self._model.stop()
        if self._group is not None:
            self._group.close()


class LossExit:
    """Exit this process with code 1, after `withdraw`, once it cannot serve; create it in the event loop."""

    def __init__(self, withdraw: Callable[[], Awaitable[None]], reason: str = "rank lost") -> None:
        self._withdraw = withdraw
        self._reason = reason
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.disarmed = False

    @property
    def has_begun(self) -> bool:
        return self._task is not None

    def begin(self) -> None:
        """Withdraw and exit; may be called from any thread, and more than once."""
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._task is None and not self.disarmed:
            self._task = asyncio.create_task(self._exit())

    async def _exit(self) -> None:
        _LOG.error("replica exiting", reason=self._reason)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    await self._withdraw()
        finally:
            # Threads may hang in an exchange with a lost rank; the other ranks end with this process.
            os._exit(1)


def exit_on_loss(target: TargetService, service: Service) -> None:
    """Exit this process once the target's engine is lost; `service` is the target with its registration."""

    target.call_on_loss(LossExit(lambda: withdraw(service, target), "engine lost").begin)


async def withdraw(service: Service, target: TargetService) -> None:
    """Withdraw the lease of `service`, then let the open requests of `target` get their status."""
    if isinstance(service, Registered):
        await service.withdraw()
    await target.quiet()


class RankedTarget:
    grpc_services = TargetService.grpc_services

    def __init__(self, settings: TargetSettings) -> None:
        self._settings = settings
        self._exit = LossExit(self._withdraw)
        self._zero = RankZero(settings, self._exit.begin)
        self._followers: list[asyncio.subprocess.Process] = []
        self._watches: list[asyncio.Task[None]] = []
        self._target: TargetService | None = None
        self._service: Service | None = None

    async def start(self, server: grpc.aio.Server, parts: Parts) -> None:
        """Start the ranks, load, and serve on `server`. Raise UnsupportedModel, Unavailable or OSError."""
        settings = self._settings
        limit_threads(settings.thread_count)  # before torch is imported
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
        self._target = await add_target(server, parts, engine, settings)
        self._target.call_on_loss(self._exit.begin)
        self._service = registered_target(self._target, settings, parts.address)

    async def drain(self) -> None:
        if self._service is not None:
            await self._service.drain()

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        if self._service is not None:
            await self._service.close()  # which waits for the running step, also for one that hangs
        self._exit.disarmed = True
        await asyncio.to_thread(self._zero.release)
        await end_ranks(self._followers, _FLUSH_S)

    async def abort(self) -> None:
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
        if self._service is not None and self._target is not None:
            await withdraw(self._service, self._target)


async def start_ranked_target(settings: TargetSettings, server: grpc.aio.Server, parts: Parts) -> Service:
    """Return the started target. Raise UnsupportedModel, Unavailable, OSError or ValueError."""
    target = RankedTarget(settings)
    try:
        await target.start(server, parts)
    except BaseException:
        await target.abort()
        raise
    return target
