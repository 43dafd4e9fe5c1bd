"""Start or join the Ray below a deployment, deploy replicas, report their state, take them down.

Nothing here imports Ray before `start`, which first sets the environment that Ray reads.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galley.core.errors import Unavailable
from services.target.ranks.rank import REDIS_URL

if TYPE_CHECKING:
    from services.target.ray.app import AppArgs

# Local actors are counted, not limited: they share the cores of one machine anyway.
_LOCAL_SLOTS = 64
_OBJECT_STORE_BYTES = 80 * 2**20  # nothing of ours is stored there
# Processes of a local head without which replicas cannot run.
_VITAL = frozenset({"gcs_server", "raylet"})


class RayLost(Unavailable):
    """The Ray that holds the replicas has ended, or no longer responds."""


def start(address: str, redis_url: str, *, threads: int, scratch: Path) -> None:
    """Join the cluster at `address`; if empty, start a Ray on this machine, which writes into `scratch`."""
    _environment(redis_url)
    import ray  # noqa: PLC0415  # after the environment
    from ray import serve  # noqa: PLC0415

    common: dict[str, Any] = {"namespace": "galley", "logging_level": "warning"}
    if address:
        ray.init(address, log_to_driver=False, **common)
    else:
        ray.init(
            "local",
            num_cpus=_LOCAL_SLOTS * threads,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            # The replicas' logs would be lost with `scratch`.
            log_to_driver=True,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(scratch),
            **common,
        )
    serve.start(proxy_location="Disabled")


def _environment(redis_url: str) -> None:
    """Set what Ray's processes and the replicas inherit; Ray reads it when it is imported."""
    os.environ.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",  # nothing phones home
            "RAY_DEDUP_LOGS": "0",
            "RAY_COLOR_PREFIX": "0",
            # Otherwise the target's code would run in the replica's main loop, beside Serve's own calls.
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
            # How often a replica reports its load, for autoscaling.
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
            REDIS_URL: redis_url,
        }
    )


def deploy(args: AppArgs, options: Mapping[str, Any]) -> None:
    """Deploy with these options through Serve's client; returns at once. The REST API needs the dashboard."""
    from ray.serve import context  # noqa: PLC0415
    from ray.serve.schema import ServeDeploySchema  # noqa: PLC0415

    from services.target.ray.app import schema_of  # noqa: PLC0415

    client: Any = context._get_global_client()  # noqa: SLF001  # there is no public way in process
    client.deploy_apps(ServeDeploySchema.model_validate(schema_of(args, options)))


def running_replicas() -> int:
    """Return how many replicas run. Raise Unavailable if Serve could not deploy them."""
    from ray import serve  # noqa: PLC0415

    from services.target.ray.app import APP, DEPLOYMENT  # noqa: PLC0415

    status = serve.status().applications.get(APP)
    deployment = status.deployments.get(DEPLOYMENT) if status else None
    if status is not None and status.status == "DEPLOY_FAILED":
        raise Unavailable(last_line(deployment.message if deployment else status.message))
    states: dict[Any, int] = dict(deployment.replica_states) if deployment else {}
    return states.get("RUNNING", 0)


def last_line(trace: str) -> str:
    return next(
        (line.strip() for line in reversed(trace.splitlines()) if line.strip()), "Serve gave no reason"
    )


def refuse_dead_head() -> None:
    """Raise RayLost if a process of a local head has ended; does nothing for another cluster."""
    from ray._private import worker  # noqa: PLC0415  # Ray itself says it only after a minute

    node: Any = worker._global_node  # noqa: SLF001
    dead = {kind for kind, _ in node.dead_processes()} & _VITAL if node is not None else set()
    if dead:
        raise RayLost(f"Ray has lost its {', '.join(sorted(dead))}")


def ping_serve() -> None:
    """Raise what Ray raises if Serve's controller does not respond; may also hang."""
    from ray import serve  # noqa: PLC0415

    serve.status()


def kill_rest() -> None:
    """Kill the descendants of this process on Linux: without a head some would wait for a minute."""
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            for child in map(int, file.read_text(encoding="ascii").split()):
                pids += [child, *_descendants(child)]
    return pids


def stop(*, own: bool) -> None:
    import ray  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415

    from services.target.ray.app import APP  # noqa: PLC0415

    if not ray.is_initialized():
        return
    untyped: Any = serve
    if own:
        untyped.shutdown()  # drains
    else:
        untyped.delete(APP)
    ray.shutdown()
