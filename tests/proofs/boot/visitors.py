"""Pods that check reachability: visitors try every port of every pod, and Prometheus scrapes.

Results are compared with the policies: the filter matches them, and no opening is too narrow for its peers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.deploy.render import Manifest
from tests.proofs.boot.cluster import Cluster
from tests.proofs.boot.names import target_port
from tests.proofs.boot.network import at
from tests.proofs.boot.objects import PodTemplate
from tests.proofs.boot.pod import Identity, Pod
from tests.proofs.boot.policies import INGRESS, Endpoint, Opening, labels_for, selects

_COMPONENT = "app.kubernetes.io/component"
_STAY = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit())\nsignal.pause()"


@dataclass(frozen=True, slots=True)
class Place:
    namespace: str
    labels: tuple[tuple[str, str], ...] = ()

    def idle_pod(self, cluster: Cluster) -> PodTemplate:
        command = ["python", "-I", "-S", "-c", _STAY]
        container = {"name": "visitor", "image": gateways_image(cluster), "command": command}
        spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
        return PodTemplate(self.namespace, dict(self.labels), {}, spec)


def _place_of(cluster: Cluster, opening: Opening, peer: Manifest) -> Place:
    space = peer.get("namespaceSelector")
    namespace = opening.namespace if space is None else cluster.space_for(labels_for(space))
    return Place(namespace, tuple(sorted(labels_for(peer.get("podSelector")).items())))


def admitted_at(cluster: Cluster, pod: Endpoint, port: int) -> Place:
    """Return a peer that the policies of `pod` admit at `port`; any namespace if none guards it."""
    for opening in cluster.policies.of(pod, INGRESS):
        if not opening.opens(pod, "TCP", port):
            continue
        for peer in opening.peers:
            if "podSelector" in peer or "namespaceSelector" in peer:
                return _place_of(cluster, opening, peer)
    return Place(cluster.space_for({}))


def gateways_image(cluster: Cluster) -> str:
    """Return an image with Python and the client for the trial's own pods."""
    return next(
        str(container["image"])
        for workload in cluster.objects.workloads().values()
        for container in workload.template.containers
        if workload.template.labels.get(_COMPONENT) == "gateway"
    )


async def _execute(pod: Pod, script: str, argument: object) -> list[Any]:
    """Run a Python script in a pod; return the JSON values that it prints."""
    command = ["python", "-I", "-S", "-c", script, json.dumps(argument)]
    status, output = await pod.execute(command, 60.0)
    if status != 0:
        raise RuntimeError(f"{pod.identity.name}: {output}")
    return list(map(json.loads, output.splitlines()))


# How long to wait at closed ports, and on a busy machine at open ones.
_WAIT_S, _PATIENCE_S = 1.0, 20.0
_KNOCK = f"""
import json, select, socket, sys, time
trying, invited = {{}}, set()
for ip, port, may in json.loads(sys.argv[1]):
    s = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    s.setblocking(False)
    s.connect_ex((ip, port))
    trying[s] = [ip, port]
    if may:
        invited.add(s)
began, opened = time.monotonic(), []
while trying and time.monotonic() - began < ({_PATIENCE_S} if invited & set(trying) else {_WAIT_S}):
    for s in select.select([], list(trying), [], 0.1)[1]:
        if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            opened.append(trying[s])
        del trying[s]
print(json.dumps(opened))
"""


async def knock(cluster: Cluster) -> list[dict[str, Any]]:
    """Try every port as every visitor; return one entry for each visitor, pod and port."""
    visitors = [
        await cluster.start(place.idle_pod(cluster), Identity(name, name))
        for place, name in _visitors(cluster).items()
    ]
    hosts = [pod for pod in cluster.pods() if pod.identity.owner in cluster.objects.workloads()]
    doors = [
        (pod, int(port["containerPort"]))
        for pod in hosts
        for container in pod.template.containers
        for port in container.get("ports") or ()
    ]
    await cluster.until(lambda: all(visitor.ready for visitor in visitors), "the visitors are there")
    opened = await asyncio.gather(*(_try(cluster, visitor, doors) for visitor in visitors))
    results = []
    for visitor, open_to in zip(visitors, opened, strict=True):
        for pod, port in doors:
            may = _may(cluster, visitor, pod, port)
            results.append(
                {
                    "visitor": visitor.identity.name,
                    "namespace": visitor.template.namespace,
                    "labels": dict(visitor.template.labels),
                    "pod": pod.identity.name,
                    "port": port,
                    "came_in": (pod.ip, port) in open_to,
                    "may": may,
                }
            )
    return results


def _visitors(cluster: Cluster) -> dict[Place, str]:
    result = {Place(cluster.space_for({})): "stranger-outside"}
    result.setdefault(Place(cluster.objects.namespace), "stranger-inside")
    for opening in cluster.policies.openings:
        for number, peer in enumerate(opening.peers):
            if opening.direction == INGRESS and "ipBlock" not in peer:
                name = f"visitor-{opening.name.replace('.', '-')}-{number}"
                result.setdefault(_place_of(cluster, opening, peer), name)
    return result


def _may(cluster: Cluster, visitor: Pod, pod: Pod, port: int) -> bool:
    return cluster.policies.leave(visitor.end, pod.end, "TCP", port)[0]


async def _try(cluster: Cluster, visitor: Pod, doors: list[tuple[Pod, int]]) -> set[tuple[str, int]]:
    attempts = [[pod.ip, port, _may(cluster, visitor, pod, port)] for pod, port in doors]
    [opened] = await _execute(visitor, _KNOCK, attempts)
    return {(ip, port) for ip, port in opened}


_ANNOTATION = "prometheus.io"
_FETCH = """
import json, sys, urllib.request
for url in json.loads(sys.argv[1]):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            print(json.dumps([url, answer.status, answer.read().decode().count("\\ngalley_")]))
    except OSError as error:
        print(json.dumps([url, str(error), 0]))
"""


async def scrape(cluster: Cluster) -> list[dict[str, Any]]:
    scraped = _scraped_pods(cluster)
    expected = {f"http://{at(pod.ip, port)}{path}": (pod, port) for pod, port, path in scraped}
    results = []
    for place in {admitted_at(cluster, pod.end, port) for pod, port in expected.values()}:
        urls = [url for url, (pod, port) in expected.items() if admitted_at(cluster, pod.end, port) == place]
        prometheus = await cluster.start(place.idle_pod(cluster), Identity("prometheus", "prometheus"))
        await cluster.until(lambda prometheus=prometheus: prometheus.ready, "Prometheus is there")  # type: ignore[misc]
        for url, status, samples in await _execute(prometheus, _FETCH, urls):
            pod, port = expected[url]
            results.append({"pod": pod.identity.name, "port": port, "status": status, "samples": samples})
        await cluster.delete(prometheus)
    return results


def _scraped_pods(cluster: Cluster) -> Iterator[tuple[Pod, int, str]]:
    for pod in cluster.pods():
        data = pod.template.annotations
        if data.get(f"{_ANNOTATION}/scrape") == "true":
            yield pod, int(data[f"{_ANNOTATION}/port"]), data.get(f"{_ANNOTATION}/path", "/metrics")
    for monitor in cluster.objects.of("PodMonitor"):
        for pod in _chosen(cluster, monitor):
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                if endpoint["port"] in (pod.end.ports or {}):
                    yield pod, (pod.end.ports or {})[endpoint["port"]], endpoint.get("path", "/metrics")
    for monitor in cluster.objects.of("ServiceMonitor"):
        yield from _behind_services(cluster, monitor)


def _behind_services(cluster: Cluster, monitor: Manifest) -> Iterator[tuple[Pod, int, str]]:
    for service in cluster.objects.of("Service"):
        if not selects(monitor["spec"]["selector"], service["metadata"].get("labels") or {}):
            continue
        chosen = {"spec": {"selector": {"matchLabels": service["spec"]["selector"]}}}
        for endpoint in monitor["spec"]["endpoints"]:
            for port in service["spec"]["ports"]:
                if port["name"] == endpoint["port"]:
                    for pod in _chosen(cluster, chosen):
                        yield pod, target_port(port, pod.end), endpoint.get("path", "/metrics")


def _chosen(cluster: Cluster, monitor: Manifest) -> list[Pod]:
    return [
        pod
        for pod in cluster.pods()
        if pod.template.namespace == cluster.objects.namespace
        and selects(monitor["spec"]["selector"], pod.template.labels)
    ]
