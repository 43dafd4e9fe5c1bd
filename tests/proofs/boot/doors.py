"""Knocking: every port of every pod is tried, by strangers and by each kind of peer that an opening is for.

What comes of it is set beside what the policies say, which shows that the filter really is what they say, and
that no opening is so narrow that those whom it is for stay outside.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.proofs.boot.cluster import Cluster
from tests.proofs.boot.objects import PodTemplate
from tests.proofs.boot.places import standing
from tests.proofs.boot.pod import Identity, Pod
from tests.proofs.boot.policies import INGRESS, labels_for

# Where nobody may come in; where somebody may, it takes as long as a busy machine does.
_WAIT_S, _PATIENCE_S = 1.0, 20.0
_EXEC_S = 60.0
_KNOCK = f"""
import json, select, socket, sys, time
trying, invited = {{}}, set()
for ip, port, may in json.loads(sys.argv[1]):
    s = socket.socket()
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


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who knocks: a kind of pod, by the labels of its namespace and its own."""

    name: str
    namespace: str
    labels: Mapping[str, str]


async def knock(cluster: Cluster) -> list[dict[str, Any]]:
    """Who came in where, and who may: one entry for each visitor, pod and port."""
    kinds = {(kind.namespace, tuple(sorted(kind.labels.items()))): kind for kind in _kinds(cluster)}
    visitors = [await _enter(cluster, kind) for kind in kinds.values()]
    hosts = [pod for pod in cluster.pods() if pod.identity.owner in cluster.objects.workloads()]
    doors = [(pod, port) for pod in hosts for port in _ports(pod)]
    await cluster.until(lambda: all(visitor.ready for visitor in visitors), "the visitors are there")
    opened = await asyncio.gather(*(_try(cluster, visitor, doors) for visitor in visitors))
    found = []
    for visitor, open_to in zip(visitors, opened, strict=True):
        for pod, port in doors:
            may = _may(cluster, visitor, pod, port)
            found.append(
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
    return found


def _kinds(cluster: Cluster) -> Iterator[Visitor]:
    yield Visitor("stranger-outside", cluster.space_for({}), {})
    yield Visitor("stranger-inside", cluster.objects.namespace, {})
    for opening in cluster.policies.openings:
        if opening.direction != INGRESS:
            continue
        for number, peer in enumerate(opening.peers):
            if "ipBlock" not in peer:
                space = peer.get("namespaceSelector")
                namespace = opening.namespace if space is None else cluster.space_for(labels_for(space))
                name = f"visitor-{opening.name.replace('.', '-')}-{number}"
                yield Visitor(name, namespace, labels_for(peer.get("podSelector")))


async def _enter(cluster: Cluster, visitor: Visitor) -> Pod:
    template = PodTemplate(visitor.namespace, visitor.labels, {}, standing(cluster))
    return await cluster.start(template, Identity(visitor.name, visitor.name))


def _ports(pod: Pod) -> list[int]:
    return [
        int(port["containerPort"])
        for container in pod.template.containers
        for port in container.get("ports") or ()
    ]


def _may(cluster: Cluster, visitor: Pod, pod: Pod, port: int) -> bool:
    return cluster.policies.leave(visitor.end, pod.end, "TCP", port)[0]


async def _try(cluster: Cluster, visitor: Pod, doors: list[tuple[Pod, int]]) -> set[tuple[str, int]]:
    told = json.dumps([[pod.ip, port, _may(cluster, visitor, pod, port)] for pod, port in doors])
    status, said = await visitor.execute(["python", "-I", "-S", "-c", _KNOCK, told], _EXEC_S)
    if status != 0:
        raise RuntimeError(f"{visitor.identity.name}: {said}")
    return {(ip, port) for ip, port in json.loads(said)}
