"""A target replica on Ray Serve: one placement group, rank 0 in Serve's actor, the others in actors of ours.

Ray places, starts, watches and replaces. What is served goes past it: rank 0 listens on a gRPC port of its
own and registers itself in Redis, and the ranks talk by torch.distributed. No Ray call is made in a step.

A rank that dies takes the replica with it: rank 0 withdraws its registration, answers what is under way
UNAVAILABLE and ends its process; the other actors end with it, and Serve starts all of them anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from galley.common.logs import get_logger, start_logging
from galley.common.secret_file import read_secret
from galley.common.server.process import limit_threads
from galley.common.tracing.otlp import FLUSH_S
from galley.core.errors import Unavailable
from services.target.ranks.rank import REDIS_URL, REDIS_URL_FILE, RankSpec, run_follower, spec_of
from services.target.ray.autoscaling import KV_FREE_SHARE, QUEUE_DEPTH
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from services.target.ray.leader import Leader

_LOG = get_logger(__name__)

# An address to listen on, but none to be reached at: the node's own is meant.
_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104
# For the withdrawal and the last answers; then the process ends, whatever is still open.
_LAST_WORDS_S = 2.0
# For what the ranks have to send to a collector, at an end in order.
_RANKS_END_S = FLUSH_S + 1.0


class Follower:
    """The actor of a rank other than 0: one call, which lasts as long as the replica."""

    def follow(self, spec: Mapping[str, Any], rank: int, address: str) -> None:
        """Run the rank; the call fails when the rank does."""
        start_logging("galley-target-rank")
        run_follower(RankSpec(**spec), rank, address)

    def pid(self) -> int:
        """Of this rank's process."""
        return os.getpid()


class TargetReplica:
    """What Ray Serve holds as one replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Mapping[str, Any], size: int
    ) -> None:
        self._settings = _settings_here(settings)
        limit_threads(self._settings.threads)
        start_logging("galley-target", self._settings.log_level, self._settings.log_format)
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Task[None] | None = None
        self._ending = False
        self._address = ""
        self._leader: Leader | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._actors: list[Any] = []
        await self._start(size)

    async def check_health(self) -> None:
        """Serve asks every second; raises when this replica is to be replaced."""
        if self._lost is not None or not self._address:
            raise Unavailable("this replica has lost a rank")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `services.target.ray.autoscaling`."""
        if self._leader is None:
            return {}
        info = self._leader.facts().info
        return {
            QUEUE_DEPTH: float(info.queue_depth),
            KV_FREE_SHARE: info.kv_blocks_free / max(1, info.kv_blocks_total),
        }

    async def facts(self) -> dict[str, Any]:
        """Where this replica and its metrics are served, and the processes of its ranks: for operators."""
        pids = [os.getpid(), *(await asyncio.gather(*(actor.pid.remote() for actor in self._actors)))]
        metrics = "" if self._leader is None else self._leader.metrics_address
        return {"address": self._address, "metrics": metrics, "pids": pids}

    async def __del__(self) -> None:
        """Serve's graceful end: drain, withdraw, let the other ranks go."""
        self._ending = True
        if self._leader is not None:
            await self._leader.stop()
        if self._watches:
            # The other ranks end with this process, and may have traces to send.
            await asyncio.wait(self._watches, timeout=_RANKS_END_S)
        for watch in self._watches:
            watch.cancel()

    async def _start(self, size: int) -> None:
        from galley.engine.parallel.process_group import open_store  # noqa: PLC0415  # after limit_threads
        from services.target.ray.leader import Leader  # noqa: PLC0415

        spec = spec_of(self._settings, size)
        store = open_store(self._settings.host, size) if size > 1 else None
        for rank in range(1, size):
            actor = _place(rank, self._settings)
            self._actors.append(actor)
            call = actor.follow.remote(asdict(spec), rank, store.address if store else "")
            self._watches.append(asyncio.create_task(self._watch(rank, call)))
        self._leader = Leader(self._settings, spec, _redis_url(), self._lose)
        self._address = await self._leader.serve(store)
        _LOG.info("serving", address=self._address, ranks=size)

    async def _watch(self, rank: int, call: Any) -> None:
        """Notice the end of a rank, also while nothing is asked of it."""
        try:
            await call
        except ray.exceptions.RayError as error:
            _LOG.error("a rank has died", rank=rank, problem=str(error))
        if not self._ending:
            self._lose()

    def _lose(self) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        if self._lost is None:
            self._lost = asyncio.create_task(self._end())

    async def _end(self) -> None:
        _LOG.error("this replica ends: its ranks are no longer one")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    if self._leader is not None:
                        await self._leader.withdraw()
        finally:
            # Threads may hang in an exchange with a rank that is gone; Serve starts the replica anew.
            os._exit(1)


def _redis_url() -> str:
    """As the node's environment says it, or a file that it names; empty: the replica does not register."""
    url, file = os.environ.get(REDIS_URL, ""), os.environ.get(REDIS_URL_FILE)
    return read_secret(Path(file)) if file and not url else url


def _settings_here(settings: Mapping[str, Any]) -> TargetSettings:
    """The replica's settings on this node; it registers itself where it listens, once it does.

    Without a port of their own, replicas of one node each take a free one, whatever its environment says.
    """
    here = {"port": 0, **settings, "redis_url": "", "redis_url_file": ""}
    if here.get("host") in _EVERYWHERE:
        util: Any = ray.util
        here["host"] = util.get_node_ip_address()
    return TargetSettings(**here)


def _place(rank: int, settings: TargetSettings) -> Any:
    """The actor of a rank, in its bundle of this replica's placement group; it ends with this process."""
    group: Any = ray.util.get_current_placement_group()
    actor = ray.remote(Follower).options(
        num_cpus=settings.threads,
        num_gpus=1 if settings.device.startswith("cuda") else 0,
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=rank
        ),
    )
    return actor.remote()
