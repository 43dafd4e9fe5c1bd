"""Where pods of others are put: where a policy lets them in, in a place of their own."""

from __future__ import annotations

from dataclasses import dataclass

from tests.deploy.render import Manifest
from tests.proofs.boot.cluster import Cluster
from tests.proofs.boot.policies import INGRESS, Endpoint, labels_for

_COMPONENT = "app.kubernetes.io/component"
_STAY = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit())\nsignal.pause()"


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace, and the labels of a pod."""

    namespace: str
    labels: tuple[tuple[str, str], ...] = ()


def admitted_at(cluster: Cluster, pod: Endpoint, port: int) -> Place:
    """Whom the policies of `pod` let in at `port`; where nothing is closed, a namespace of nobody's."""
    for opening in cluster.policies.of(pod, INGRESS):
        if not opening.opens(pod, "TCP", port):
            continue
        for peer in opening.peers:
            if "podSelector" in peer or "namespaceSelector" in peer:
                space = peer.get("namespaceSelector")
                namespace = opening.namespace if space is None else cluster.space_for(labels_for(space))
                return Place(namespace, tuple(labels_for(peer.get("podSelector")).items()))
    return Place(cluster.space_for({}))


def gateways_image(cluster: Cluster) -> str:
    """What the trial's own pods run: it has Python and the client."""
    return next(
        str(container["image"])
        for workload in cluster.objects.workloads().values()
        for container in workload.template.containers
        if workload.template.labels.get(_COMPONENT) == "gateway"
    )


def standing(cluster: Cluster) -> Manifest:
    """The spec of a pod that does nothing, for commands to be run in."""
    command = ["python", "-I", "-S", "-c", _STAY]
    container = {"name": "visitor", "image": gateways_image(cluster), "command": command}
    return {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
