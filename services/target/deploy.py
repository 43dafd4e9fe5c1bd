"""Targets on Ray: `python -m services.target.deploy --replicas 2 --tensor-parallel 3 --redis-url ...`.

Starts a Ray of its own on this machine, or uses the cluster at --ray-address, deploys the replicas, is ready
when all of them are registered in Redis, and takes them down when told to stop. SIGHUP reads --replicas-file
again: replicas are added, or drained and stopped; the others do not notice.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from services.common.config import parse_settings, settings_config
from services.common.logs import get_logger, start_logging
from services.common.process import die_with_parent
from services.common.readiness import Readiness
from services.common.registry import TARGET_POOL, ReplicaRegistry
from services.core.errors import GalleyError, StoreUnavailable, Unavailable
from services.target.rank import REDIS_URL
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.core.routing import ReplicaLease

_LOG = get_logger(__name__)
_DESCRIPTION = (
    "Galley targets on Ray: replicas of several ranks each, placed, healed and scaled by Ray Serve."
)
_POLL_S = 0.25
# Local actors are counted, not held back: the cores of one machine are shared anyway.
_LOCAL_SLOTS = 64
_OBJECT_STORE_BYTES = 80 * 2**20  # nothing of ours lies there
# What concerns this process, not the replicas; the store's URL may hold a password and goes by environment.
_NOT_FOR_REPLICAS = frozenset(
    {
        "replicas",
        "replicas_file",
        "port",
        "advertise",
        "tensor_parallel",
        "ray_address",
        "ready_fd",
        "die_with_parent",
        "redis_url",
    }
)


class DeploySettings(TargetSettings):
    """What the deployment can be told, beside what each replica can."""

    model_config = settings_config("GALLEY_TARGET_")

    replicas: int = Field(default=1, ge=1, le=1024, description="Replicas of the model.")
    replicas_file: Path | None = Field(
        default=None, description="File that holds the number of replicas; read again on SIGHUP."
    )
    ray_address: str = Field(default="", description="A Ray cluster to use; empty: one of our own, here.")

    @model_validator(mode="after")
    def _can_be_found(self) -> Self:
        # In place of what a lone target checks: replicas advertise the port that they get.
        if not self.redis_url.get_secret_value():
            raise ValueError("redis_url is needed: replicas on Ray are found by their registration")
        return self


def main() -> None:
    """Serve until told to stop; exits 1 if it cannot start."""
    settings = parse_settings(DeploySettings, sys.argv[1:], "python -m services.target.deploy", _DESCRIPTION)
    if settings.die_with_parent:
        die_with_parent()
    start_logging("galley-target-deploy", settings.log_level, settings.log_format)
    try:
        asyncio.run(Deployment(settings).run())
    except (GalleyError, OSError, ValueError) as error:
        _LOG.error("cannot start", problem=str(error))
        raise SystemExit(1) from None


class Deployment:
    """One deployment, from Ray's start to its end."""

    def __init__(self, settings: DeploySettings) -> None:
        self._settings = settings
        self._readiness = Readiness(settings.ready_fd)

    async def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        self._readiness.stage("checking the model", detail=self._settings.model)
        await asyncio.to_thread(_refuse_model, self._settings)
        self._readiness.stage("starting Ray")
        scratch = Path(tempfile.mkdtemp(prefix="galley-ray-"))
        try:
            await asyncio.to_thread(_start_ray, self._settings, scratch)
            await self._serve()
        finally:
            await asyncio.to_thread(_stop_ray, own=not self._settings.ray_address)
            shutil.rmtree(scratch, ignore_errors=True)
            self._readiness.close()

    async def _serve(self) -> None:
        stopped, hung_up = _signals()
        self._readiness.stage("starting replicas", detail=f"{self._replicas()} x {self._ranks} ranks")
        await asyncio.to_thread(_deploy, self._settings, self._replicas())
        leases = await _unless(stopped, self._registered())
        if leases is None:
            return
        gc.collect()
        addresses = [lease.address for lease in leases]
        _LOG.info("serving", addresses=addresses)
        self._readiness.ready(addresses[0], addresses=addresses)
        while await _first(stopped, hung_up) is not stopped:
            hung_up.clear()
            _LOG.info("scaling", replicas=self._replicas())
            await asyncio.to_thread(_deploy, self._settings, self._replicas())

    @property
    def _ranks(self) -> int:
        return self._settings.tensor_parallel

    def _replicas(self) -> int:
        file = self._settings.replicas_file
        return self._settings.replicas if file is None else int(file.read_text(encoding="utf-8"))

    async def _registered(self) -> list[ReplicaLease]:
        """All replicas, once they are registered. Raises Unavailable if they cannot start."""
        registry = ReplicaRegistry(self._settings.redis_url.get_secret_value())
        try:
            while True:
                with suppress(StoreUnavailable):
                    leases = await registry.read(TARGET_POOL)
                    if len(leases) >= self._replicas():
                        return leases
                await asyncio.to_thread(_refuse_failed_app)
                await asyncio.sleep(_POLL_S)
        finally:
            await registry.close()


def _refuse_model(settings: DeploySettings) -> None:
    """Raise UnsupportedModel, before anything is started, if the model cannot be cut over so many ranks."""
    from services.engine.loading import load_config  # noqa: PLC0415  # so that --help needs no torch
    from services.engine.prepare import resolve_model  # noqa: PLC0415
    from services.engine.sharding import refuse_ranks  # noqa: PLC0415

    refuse_ranks(load_config(resolve_model(settings.model)), settings.tensor_parallel)


def _environment(settings: DeploySettings) -> None:
    """What Ray's processes, and with them the replicas, inherit; read when ray is imported."""
    os.environ.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",  # nothing phones home
            "RAY_DEDUP_LOGS": "0",
            # The user's code runs in the replica's main loop otherwise, beside Serve's own calls.
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
            REDIS_URL: settings.redis_url.get_secret_value(),
        }
    )


def _start_ray(settings: DeploySettings, scratch: Path) -> None:
    _environment(settings)
    import ray  # noqa: PLC0415  # after the environment
    from ray import serve  # noqa: PLC0415

    common: dict[str, Any] = {"namespace": "galley", "log_to_driver": False, "logging_level": "warning"}
    if settings.ray_address:
        ray.init(settings.ray_address, **common)
    else:
        ray.init(
            "local",
            num_cpus=_LOCAL_SLOTS * settings.threads,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(scratch),
            **common,
        )
    serve.start(proxy_location="Disabled")


def _deploy(settings: DeploySettings, replicas: int) -> None:
    """Have Serve make it so; as the REST API does, which would need the dashboard. Returns at once."""
    from ray.serve import context  # noqa: PLC0415
    from ray.serve.schema import ServeDeploySchema  # noqa: PLC0415

    from services.target.ray_app import AppArgs, schema_of  # noqa: PLC0415

    told = settings.model_dump(mode="json", exclude=set(_NOT_FOR_REPLICAS))
    args = AppArgs(tensor_parallel=settings.tensor_parallel, settings=told)
    schema = ServeDeploySchema.model_validate(schema_of(args, replicas))
    client: Any = context._get_global_client()  # noqa: SLF001  # there is no public way in process
    client.deploy_apps(schema)


def _refuse_failed_app() -> None:
    from ray import serve  # noqa: PLC0415

    from services.target.ray_app import APP, DEPLOYMENT  # noqa: PLC0415

    status = serve.status().applications.get(APP)
    if status is not None and status.status == "DEPLOY_FAILED":
        deployment = status.deployments.get(DEPLOYMENT)
        raise Unavailable(_last_line(deployment.message if deployment else status.message))


def _last_line(trace: str) -> str:
    """Of a trace, what was raised."""
    return next(
        (line.strip() for line in reversed(trace.splitlines()) if line.strip()), "Serve did not say why"
    )


def _stop_ray(*, own: bool) -> None:
    import ray  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415

    from services.target.ray_app import APP  # noqa: PLC0415

    if not ray.is_initialized():
        return
    untyped: Any = serve
    if own:
        untyped.shutdown()  # drains
    else:
        untyped.delete(APP)
    ray.shutdown()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set when told to stop, and to look again; to be made after ray.init, which takes SIGTERM itself."""
    stopped, hung_up = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)
    return stopped, hung_up


async def _unless(stopped: asyncio.Event, work: Any) -> Any:
    """The result of `work`, or None if told to stop before."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    done = {task}
    try:
        done, _ = await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pending in (task, stop):
            pending.cancel()
    return task.result() if task in done else None


async def _first(*events: asyncio.Event) -> asyncio.Event:
    """The event that is set first; of several the one named first."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return _set_of(events)


def _set_of(events: tuple[asyncio.Event, ...]) -> asyncio.Event:
    found: Iterator[asyncio.Event] = (event for event in events if event.is_set())
    return next(found)


if __name__ == "__main__":
    main()
