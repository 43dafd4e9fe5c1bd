"""Let several hosts, whose ranks are one replica, meet; and run a host other than 0.

Host 0 opens the store at `ranks_address`. Each other host signs in there, which counts its starts. Once all
have signed in, host 0 records which start of each it takes, and each host starts its ranks, which meet at
the same store. Pods are scheduled and images pulled in their own time; that is waited for here, so that a
rank finds all others about to come. A host that restarts later finds that another start of it was taken, and
exits. Host 0 sees the restart and exits too: the ranks that it had are gone.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from galley.common.logs import get_logger, start_logging
from galley.common.server.process import limit_threads, run_unless
from galley.core.errors import Unavailable
from services.target.ranks.rank import start_followers
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from galley.engine.parallel.process_group import Store

_LOG = get_logger(__name__)
_POLL_S = 0.1
_WATCH_S = 1.0
_CONNECT_S = 2.0


async def await_hosts(store: Store, settings: TargetSettings) -> list[int]:
    """Return which start of each other host was taken, once all have signed in; host 0 calls it.

    Raises Unavailable after `ranks_timeout_s`.
    """
    others = range(1, settings.hosts)
    await _until_set(store.store, [_starts(index) for index in others], settings, "not all hosts came")
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
    limit_threads(settings.threads)
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

    Raises Unavailable after `ranks_timeout_s`, or if the others began with an earlier start of this host.
    """
    store = await _connected(settings)
    start = await asyncio.to_thread(store.add, _starts(settings.host_index), 1)
    taken = _taken(settings.host_index)
    await _until_set(store, [taken], settings, "the other hosts did not come")
    if int(await asyncio.to_thread(store.get, taken)) != start:
        raise Unavailable("the other hosts began with an earlier start of this host")
    return True


async def _connected(settings: TargetSettings) -> Any:
    from galley.engine.parallel.process_group import connect_store  # noqa: PLC0415  # imports torch

    deadline = time.monotonic() + settings.ranks_timeout_s
    address, size = settings.ranks_address, settings.tensor_parallel
    host, _, port = address.rpartition(":")
    while True:
        try:
            async with asyncio.timeout(_CONNECT_S):
                # torch's client retries on a thread and prints a stack at each failure.
                _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return await asyncio.to_thread(connect_store, address, size, _CONNECT_S)
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                problem = (str(error) or "no answer").splitlines()[0]
                raise Unavailable(f"ranks_address: {address} must be reachable: {problem}") from error
            await asyncio.sleep(_POLL_S)


async def _until_set(store: Any, names: Sequence[str], settings: TargetSettings, problem: str) -> None:
    """Return once the store has `names`; raise Unavailable with `problem` after `ranks_timeout_s`."""
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
    """Return once all ranks have ended; kill those still running after `grace_s`."""
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
    """Open the store where the ranks meet, those of other hosts included; host 0 calls it. Raises OSError."""
    from galley.engine.parallel.process_group import open_store  # noqa: PLC0415  # imports torch

    if settings.hosts == 1:
        return open_store("127.0.0.1", settings.tensor_parallel)
    port = int(settings.ranks_address.rpartition(":")[2])
    return open_store(settings.host, settings.tensor_parallel, port=port)
