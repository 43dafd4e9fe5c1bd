"""Prometheus, as the manifests have it: which pods it is to fetch metrics from, and whether it can.

By annotations, a PodMonitor or a ServiceMonitor. It fetches from where the policies let it in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tests.deploy.render import Manifest
from tests.proofs.boot.cluster import Cluster
from tests.proofs.boot.names import target_port
from tests.proofs.boot.objects import PodTemplate
from tests.proofs.boot.places import admitted_at, standing
from tests.proofs.boot.pod import Identity, Pod
from tests.proofs.boot.policies import selects

_EXEC_S = 60.0
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


@dataclass(frozen=True, slots=True)
class Scraped:
    """What came of one pod: the status, or why there was none, and how many samples of ours."""

    pod: str
    port: int
    status: int | str
    samples: int


async def scrape(cluster: Cluster) -> list[dict[str, Any]]:
    """Fetch all that is to be fetched."""
    wanted = {f"http://{pod.ip}:{port}{path}": (pod, port) for pod, port, path in _wanted(cluster)}
    found = []
    for place in {admitted_at(cluster, pod.end, port) for pod, port in wanted.values()}:
        urls = [url for url, (pod, port) in wanted.items() if admitted_at(cluster, pod.end, port) == place]
        template = PodTemplate(place.namespace, dict(place.labels), {}, standing(cluster))
        prometheus = await cluster.start(template, Identity("prometheus", "prometheus"))
        await cluster.until(lambda prometheus=prometheus: prometheus.ready, "Prometheus is there")  # type: ignore[misc]
        command = ["python", "-I", "-S", "-c", _FETCH, json.dumps(urls)]
        status, said = await prometheus.execute(command, _EXEC_S)
        if status != 0:
            raise RuntimeError(f"prometheus: {said}")
        for url, answer, samples in map(json.loads, said.splitlines()):
            pod, port = wanted[url]
            found.append(asdict(Scraped(pod.identity.name, port, answer, samples)))
        await cluster.delete(prometheus)
    return found


def _wanted(cluster: Cluster) -> Iterator[tuple[Pod, int, str]]:
    """Pod, port and path."""
    for pod in cluster.pods():
        told = pod.template.annotations
        if told.get(f"{_ANNOTATION}/scrape") == "true":
            yield pod, int(told[f"{_ANNOTATION}/port"]), told.get(f"{_ANNOTATION}/path", "/metrics")
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
    """Of the release's namespace: no other is named by what the chart renders."""
    return [
        pod
        for pod in cluster.pods()
        if pod.template.namespace == cluster.objects.namespace
        and selects(monitor["spec"]["selector"], pod.template.labels)
    ]
