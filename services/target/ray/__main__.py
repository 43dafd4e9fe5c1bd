"""Run targets on Ray: `python -m services.target.ray --replicas 2 --tensor-parallel 3 --redis-url ...`.

The process starts Ray on this machine, or uses the cluster at --ray-address, and deploys the replicas. It is
ready when all of them are registered in Redis, and takes them down when stopped. SIGHUP reads --replicas-file
again: replicas are added, or drained and stopped; the others go on undisturbed. With --max-replicas the load
sets the number of replicas, from --replicas up.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from galley.common.config.settings import parse_settings, settings_config
from galley.common.logs import get_logger, start_logging
from galley.common.registry.leases import TARGET_POOL, ReplicaRegistry
from galley.common.regular_file import read_regular
from galley.common.server.process import Readiness, die_with_parent, run_unless
from galley.core.errors import GalleyError, StoreUnavailable
from galley.core.routing.choice import TargetLease
from services.target.engine.paged.loading import refuse_model
from services.target.ray import cluster as ray_cluster
from services.target.ray.autoscaling import POLICY
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from services.target.ray.app import AppArgs

_LOG = get_logger(__name__)
_DESCRIPTION = (
    "Galley targets on Ray: replicas of several ranks each, placed, healed and scaled by Ray Serve."
)
MAX_REPLICAS = 1024
_MAX_REPLICAS_FILE_BYTES = 1024
_POLL_S = 0.25
_WATCH_S = 1.0
# Ray restarts a dead controller, which takes seconds.
_SILENCE_S = 30.0


class DeploySettings(TargetSettings):
    model_config = settings_config("GALLEY_TARGET_")

    replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS, description="Number of replicas.")
    replicas_file: Path | None = Field(
        default=None, description="File with the number of replicas, read again on SIGHUP."
    )
    max_replicas: int = Field(
        default=0,
        ge=0,
        le=MAX_REPLICAS,
        description="Most replicas that the load may scale to. 0: no scaling.",
    )
    upscale_delay_s: float = Field(
        default=10.0, ge=0, description="Time for which the load must need another replica, in seconds."
    )
    downscale_delay_s: float = Field(
        default=300.0, ge=0, description="Time for which the load must need one replica fewer, in seconds."
    )
    ray_address: str = Field(
        default="", description="Address of a Ray cluster. Empty: start one on this machine."
    )

    @model_validator(mode="after")
    def _has_registry(self) -> Self:
        if not self.redis_url.get_secret_value():
            raise ValueError("--redis-url: required; replicas on Ray are found by their registration")
        return self

    @model_validator(mode="after")
    def _fits_ray(self) -> Self:
        if self.engine != "paged":
            raise ValueError(
                f"--engine: must be paged on Ray Serve, got {self.engine}; `galley target` places ranks of "
                'vLLM on Ray with --vllm-args \'{"distributed_executor_backend": "ray"}\''
            )
        if self.threads == 0:
            raise ValueError("--threads: must be a number on Ray Serve, which places ranks by it, got auto")
        return self

    @model_validator(mode="after")
    def _scales_up(self) -> Self:
        if 0 < self.max_replicas < self.replicas:
            raise ValueError(
                f"--max-replicas: must be >= {self.replicas} (--replicas), got {self.max_replicas}"
            )
        return self


# Settings of this process, not of replicas; the store's URL may hold a password and goes by environment.
_NOT_FOR_REPLICAS = (DeploySettings.model_fields.keys() - TargetSettings.model_fields.keys()) | {
    "port", "advertise", "tensor_parallel", "hosts", "host_index", "ranks_address", "ready_fd",
    "die_with_parent", "redis_url", "redis_url_file",
}  # fmt: skip


def main() -> None:
    """Serve until stopped; exit 1 if it cannot start."""
    settings = parse_settings(DeploySettings, sys.argv[1:], "python -m services.target.ray", _DESCRIPTION)
    if settings.die_with_parent:
        die_with_parent()
    start_logging("galley-target-deploy", settings.log_level, settings.log_format)
    try:
        asyncio.run(_run(settings))
    except (GalleyError, OSError, ValueError) as error:
        _LOG.error("cannot start", error=str(error))
        raise SystemExit(1) from None


async def _run(settings: DeploySettings) -> None:
    try:
        await Deployment(settings).run()
    except ray_cluster.RayLost as error:
        _LOG.error("Ray lost", error=str(error))
        ray_cluster.kill_rest()
        os._exit(1)  # threads of this process may wait for Ray forever


class Deployment:
    def __init__(self, settings: DeploySettings) -> None:
        self._settings = settings
        self._readiness = Readiness(settings.ready_fd)

    async def run(self) -> None:
        """Deploy and serve until stopped. Raise RayLost if Ray ends, Unavailable if nothing can start."""
        stopped, hung_up = asyncio.Event(), asyncio.Event()
        _listen(stopped, hung_up)
        self._readiness.stage("checking the model", detail=self._settings.model)
        await asyncio.to_thread(refuse_model, self._settings)
        self._readiness.stage("starting Ray")
        try:
            with tempfile.TemporaryDirectory(prefix="galley-ray-", ignore_cleanup_errors=True) as scratch:
                await self._run_in(Path(scratch), stopped, hung_up)
        finally:
            self._readiness.close()

    async def _run_in(self, scratch: Path, stopped: asyncio.Event, hung_up: asyncio.Event) -> None:
        settings = self._settings
        redis_url = settings.redis_url.get_secret_value()
        lost = False
        try:
            await asyncio.to_thread(
                ray_cluster.start, settings.ray_address, redis_url, threads=settings.threads, scratch=scratch
            )
            _listen(stopped, hung_up)  # again: Ray has put handlers of its own in front
            watching = asyncio.create_task(self._watch())
            await _first_of(watching, asyncio.create_task(self._serve(stopped, hung_up)))
        except ray_cluster.RayLost:
            lost = True
            raise
        finally:
            if not lost:
                await asyncio.to_thread(ray_cluster.stop, own=not settings.ray_address)

    async def _serve(self, stopped: asyncio.Event, hung_up: asyncio.Event) -> None:
        ranks = self._settings.tensor_parallel
        self._readiness.stage("starting replicas", detail=f"{self._replicas()} x {ranks} ranks")
        await asyncio.to_thread(ray_cluster.deploy, _args(self._settings), self.options())
        leases = await run_unless(stopped, self._registered())
        if leases is None:
            return
        gc.collect()
        addresses = [lease.address for lease in leases]
        _LOG.info("replicas registered", addresses=addresses)
        self._readiness.ready(addresses[0], addresses=addresses)
        while await run_unless(stopped, hung_up.wait()):
            hung_up.clear()
            try:
                options, replicas = self.options(), self._replicas()
            except (OSError, ValueError) as error:
                _LOG.error("scaling failed", error=str(error))
                continue
            _LOG.info("scaling started", replicas=replicas)
            await asyncio.to_thread(ray_cluster.deploy, _args(self._settings), options)

    async def _watch(self) -> None:
        """Raise RayLost once the local head has ended or Serve's controller no longer responds."""
        responded = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            ray_cluster.refuse_dead_head()
            with suppress(Exception):  # Ray raises many kinds of errors; only their duration matters
                async with asyncio.timeout(_SILENCE_S):
                    await asyncio.to_thread(ray_cluster.ping_serve)
                responded = time.monotonic()
            if time.monotonic() - responded > _SILENCE_S:
                raise ray_cluster.RayLost(f"Serve's controller has not responded for {_SILENCE_S:g} s")

    def _replicas(self) -> int:
        """Return the number of replicas. Raise OSError or ValueError if --replicas-file holds none."""
        file = self._settings.replicas_file
        if file is None:
            return self._settings.replicas
        try:
            text = read_regular(file, _MAX_REPLICAS_FILE_BYTES).decode(errors="replace").strip()
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        if not (text.isdecimal() and 1 <= int(text) <= MAX_REPLICAS):
            raise ValueError(f"{file}: must hold a number in [1, {MAX_REPLICAS}], got {text[:20]!r}")
        return int(text)

    def options(self) -> dict[str, Any]:
        """Return the deployment's options: the number of replicas, or its bounds where the load sets it."""
        settings, replicas = self._settings, self._replicas()
        if settings.max_replicas <= replicas:
            return {"num_replicas": replicas}
        return {
            "autoscaling_config": {
                "min_replicas": replicas,
                "max_replicas": settings.max_replicas,
                "upscale_delay_s": settings.upscale_delay_s,
                "downscale_delay_s": settings.downscale_delay_s,
                "policy": {"policy_function": POLICY},
            }
        }

    async def _registered(self) -> list[TargetLease]:
        """Wait until all replicas run and are registered. Raise Unavailable if they cannot start."""
        registry = ReplicaRegistry(self._settings.redis_url.get_secret_value(), self._settings.pool)
        try:
            while True:
                # A lease may belong to a replica that has failed since, or to another deployment.
                running = await asyncio.to_thread(ray_cluster.running_replicas)
                with suppress(StoreUnavailable):
                    leases = await registry.read(TARGET_POOL)
                    if min(running, len(leases)) >= self._replicas():
                        return leases
                await asyncio.sleep(_POLL_S)
        finally:
            await registry.close()


def _args(settings: DeploySettings) -> AppArgs:
    from services.target.ray.app import AppArgs  # noqa: PLC0415  # imports Ray

    values = settings.model_dump(mode="json", exclude=_NOT_FOR_REPLICAS)
    return AppArgs(tensor_parallel=settings.tensor_parallel, settings=values)


def _listen(stopped: asyncio.Event, hung_up: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)


async def _first_of(watching: asyncio.Task[None], work: asyncio.Task[None]) -> None:
    try:
        await asyncio.wait({watching, work}, return_when=asyncio.FIRST_COMPLETED)
        (watching if watching.done() else work).result()
    finally:
        for task in (watching, work):
            task.cancel()
        await asyncio.wait({watching, work})


if __name__ == "__main__":
    main()
