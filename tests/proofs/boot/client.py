"""The clients of a trial: pods of their own, where the gateway's policies let callers in."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.deploy.render import Manifest, component
from tests.proofs.boot.cluster import Cluster
from tests.proofs.boot.names import target_port
from tests.proofs.boot.objects import Objects, PodTemplate
from tests.proofs.boot.plan import Plan
from tests.proofs.boot.pod import Identity, Pod
from tests.proofs.boot.policies import Endpoint
from tests.proofs.boot.visitors import Place, admitted_at, gateways_image

LOAD = Path(__file__).with_name("load.py")
_GRACE_S = 240
_SOON_S = 120.0
_POLL_S = 0.05
_CONFIG = "load"


def gateway_service(objects: Objects) -> Manifest:
    """Return the gateway's Service for clients: the one with an address of its own, if any has."""
    results = [service for service in objects.of("Service") if component(service) == "gateway"]
    with_address = [service for service in results if service["spec"].get("clusterIP") != "None"]
    return (with_address or results)[0]


def gateway_address(objects: Objects, port: str = "grpc") -> str:
    """Return the address of a port of the gateway; nothing if it is closed."""
    service = gateway_service(objects)
    host = f"{service['metadata']['name']}.{objects.namespace_of(service)}"
    return next((f"{host}:{each['port']}" for each in service["spec"]["ports"] if each["name"] == port), "")


def place_of_clients(cluster: Cluster) -> Place:
    """Return the namespace and labels of a pod that the gateway's policies admit."""
    workload = next(w for w in cluster.objects.workloads().values() if _component(w.template) == "gateway")
    template = workload.template
    ports = {p["name"]: p["containerPort"] for c in template.containers for p in c.get("ports") or ()}
    gateway = Endpoint("gateway", "", template.namespace, template.labels, ports)
    return admitted_at(cluster, gateway, target_port(_grpc_port(cluster.objects), gateway))


def _grpc_port(objects: Objects) -> Manifest:
    ports: list[Manifest] = gateway_service(objects)["spec"]["ports"]
    return next(port for port in ports if port["name"] == "grpc")


def _component(template: PodTemplate) -> str:
    return template.labels.get("app.kubernetes.io/component", "")


class Client:
    def __init__(self, cluster: Cluster, address: str, plan: Plan) -> None:
        self._cluster, self._address, self._plan = cluster, address, plan
        place = place_of_clients(cluster)
        self._namespace, self._labels = place.namespace, dict(place.labels)
        self._load: Pod | None = None
        self.ends: dict[str, int | None] = {}
        cluster.objects.add(
            {
                "kind": "ConfigMap",
                "metadata": {"name": _CONFIG, "namespace": self._namespace},
                "data": {LOAD.name: LOAD.read_text()},
            }
        )
        for name in plan.client_secrets.values():
            result = cluster.objects.find("Secret", cluster.objects.namespace, name)
            if result is not None:
                cluster.objects.add({**result, "metadata": {"name": name, "namespace": self._namespace}})

    async def reference(self) -> dict[str, Any]:
        http = gateway_address(self._cluster.objects, "http")
        pod = await self._start("reference", "--streams", "2", "--answers", "4", "--http", http)
        await self._cluster.until(lambda: pod not in self._cluster.pods(), "the reference answers are there")
        self.ends["reference"] = pod.exit_status
        return {str(answer["question"]): answer for answer in _answers(pod)}

    async def begin(self) -> None:
        """Start streams; return when each has had an answer."""
        self._load = await self._start(
            *("load", "--streams", str(self._plan.streams), "--brief", str(self._plan.brief)),
            *("--pause-s", str(self._plan.pause_s)),
        )
        load = self._load
        async with asyncio.timeout(_SOON_S):
            while len(_answers(load)) < self._plan.streams:  # noqa: ASYNC110  # another process writes them
                await asyncio.sleep(_POLL_S)

    async def finish(self) -> list[dict[str, Any]]:
        if self._load is None:
            return []
        await self._cluster.delete(self._load)
        self.ends["load"] = self._load.exit_status
        return _answers(self._load)

    async def _start(self, name: str, *words: str) -> Pod:
        plan = self._plan
        limits = ["--max-tokens", str(plan.max_tokens), "--patience-s", str(plan.patience_s)]
        container = {
            "name": "client",
            "image": gateways_image(self._cluster),
            "command": ["python", f"/trial/{LOAD.name}", self._address, *words, *limits],
            "env": [{"name": key, "value": value} for key, value in self._plan.client_environment.items()],
            "volumeMounts": [{"name": "trial", "mountPath": "/trial"}, *self._secret_mounts()],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _GRACE_S,
            "containers": [container],
            "volumes": [{"name": "trial", "configMap": {"name": _CONFIG}}, *self._secret_volumes()],
        }
        template = PodTemplate(self._namespace, self._labels, {}, spec)
        return await self._cluster.start(template, Identity(name, name))

    def _secret_mounts(self) -> list[Manifest]:
        return [{"name": name, "mountPath": path} for path, name in self._plan.client_secrets.items()]

    def _secret_volumes(self) -> list[Manifest]:
        return [{"name": name, "secret": {"secretName": name}} for name in self._plan.client_secrets.values()]

    @staticmethod
    async def run_hook(cluster: Cluster, hook: Manifest) -> tuple[int | None, str]:
        spec = hook["spec"]["template"] if hook["kind"] == "Job" else hook
        template = PodTemplate.of(spec, cluster.objects.namespace_of(hook))
        pod = await cluster.start(template, Identity(hook["metadata"]["name"], hook["metadata"]["name"]))
        await cluster.until(lambda: pod not in cluster.pods(), "the hook has ended")
        return pod.exit_status, pod.log().read_text(errors="replace")


def _answers(pod: Pod) -> list[dict[str, Any]]:
    if not pod.log().exists():
        return []
    lines = pod.log().read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
