"""What KubeRay makes of the groups of a RayService.

As its operator does (ray-operator/controllers/ray/common/pod.go): the container's command is a `ray start` of
the group's rayStartParams and of what KubeRay knows better, and its environment gets the cluster's token.
Nothing else of the operator is here.
"""

from __future__ import annotations

from tests.deploy.render import Manifest
from tests.proofs.boot.quantities import amount

GCS_PORT = 6379
AGENT_PORT = 52365
METRICS_PORT = 8080


def container_of(group: Manifest) -> Manifest:
    """Ray's container: the first."""
    first: Manifest = group["template"]["spec"]["containers"][0]
    return first


def command_of(group: Manifest, head_ip: str) -> list[str]:
    """Of a worker group that finds its head at `head_ip`; of the head's group where that is empty."""
    container = container_of(group)
    memory = int(amount(container["resources"]["limits"]["memory"]))
    known = {"memory": memory, "metrics-export-port": METRICS_PORT, "dashboard-agent-listen-port": AGENT_PORT}
    place = {"address": f"{head_ip}:{GCS_PORT}"} if head_ip else {"dashboard-host": "0.0.0.0"}
    told = {**known, **place, **group["rayStartParams"]}
    words = " ".join(f"--{name}={value}" for name, value in told.items())
    start = f"ulimit -n 65536; ray start {'' if head_ip else '--head '}--block {words}"
    return ["/bin/bash", "-c", "--", start]


def environment(token: str) -> dict[str, str]:
    """What it adds for authOptions of mode token, and for every RayService."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_timeout_ms_task_wait_for_death_info": "0",
        "RAY_gcs_server_request_timeout_seconds": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5",
    }
