"""What a cluster holds: the objects that the chart rendered, and those that its user made before."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.deploy.render import Manifest

GROUPS = "LeaderWorkerSet"
WORKLOAD_KINDS = ("Deployment", "StatefulSet", GROUPS)
UNKNOWN_KINDS = ("RayService", "DaemonSet")


class NoSuchObject(Exception):
    """A missing object, or a missing key of one, is referenced."""


@dataclass(frozen=True, slots=True)
class PodTemplate:
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Manifest

    @staticmethod
    def of(manifest: Manifest, namespace: str) -> PodTemplate:
        metadata = manifest.get("metadata") or {}
        return PodTemplate(
            namespace, metadata.get("labels") or {}, metadata.get("annotations") or {}, manifest["spec"]
        )

    @property
    def containers(self) -> list[Manifest]:
        results: list[Manifest] = self.spec["containers"]
        return results

    @property
    def init_containers(self) -> list[Manifest]:
        results: list[Manifest] = self.spec.get("initContainers") or []
        return results

    @property
    def grace_s(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", 30))


@dataclass(frozen=True, slots=True)
class Workload:
    kind: str
    name: str
    replicas: int
    template: PodTemplate
    spec: Manifest

    @property
    def size(self) -> int:
        return int(self.spec["leaderWorkerTemplate"].get("size", 1)) if self.kind == GROUPS else 1

    @property
    def service_name(self) -> str:
        return str(self.spec.get("serviceName", ""))

    @property
    def claims(self) -> list[Manifest]:
        results: list[Manifest] = self.spec.get("volumeClaimTemplates") or []
        return results


class Objects:
    def __init__(self, manifests: Iterable[Manifest], namespace: str) -> None:
        self.namespace = namespace
        self._by_key: dict[tuple[str, str, str], Manifest] = {}
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        self._by_key[(manifest["kind"], self.namespace_of(manifest), metadata["name"])] = manifest
        if manifest["kind"] == GROUPS:
            self.add(_service_of_groups(manifest))

    def remove(self, manifest: Manifest) -> None:
        del self._by_key[(manifest["kind"], self.namespace_of(manifest), manifest["metadata"]["name"])]

    def namespace_of(self, manifest: Manifest) -> str:
        return str(manifest["metadata"].get("namespace") or self.namespace)

    def namespaces(self) -> set[str]:
        return {namespace for _, namespace, _ in self._by_key}

    def of(self, kind: str) -> Iterator[Manifest]:
        """Yield the installed objects of a kind, without hooks."""
        for (result, _, _), manifest in list(self._by_key.items()):
            if result == kind and not hook_of(manifest):
                yield manifest

    def hooks(self, event: str) -> list[Manifest]:
        return [manifest for manifest in self._by_key.values() if event in hook_of(manifest)]

    def find(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._by_key.get((kind, namespace, name))

    def workloads(self) -> dict[str, Workload]:
        """Return the workloads by name. Raises NoSuchObject for a kind whose pods cannot be created here."""
        for kind in UNKNOWN_KINDS:
            for manifest in self.of(kind):
                raise NoSuchObject(f"{kind} {manifest['metadata']['name']}: its pods cannot be made here")
        results = [manifest for kind in WORKLOAD_KINDS for manifest in self.of(kind)]
        return {manifest["metadata"]["name"]: self._workload(manifest) for manifest in results}

    def _workload(self, manifest: Manifest) -> Workload:
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        template = (
            spec["leaderWorkerTemplate"]["leaderTemplate"] if manifest["kind"] == GROUPS else spec["template"]
        )
        template = PodTemplate.of(template, self.namespace_of(manifest))
        replicas = spec.get("replicas")
        if replicas is None:
            replicas = self._least_replicas(manifest["kind"], name)
        return Workload(manifest["kind"], name, int(replicas), template, spec)

    def _least_replicas(self, kind: str, name: str) -> int:
        for scaler in self.of("HorizontalPodAutoscaler"):
            reference = scaler["spec"]["scaleTargetRef"]
            if (reference["kind"], reference["name"]) == (kind, name):
                return int(scaler["spec"].get("minReplicas", 1))
        for scaler in self.of("ScaledObject"):
            reference = scaler["spec"]["scaleTargetRef"]
            if (reference.get("kind", "Deployment"), reference["name"]) == (kind, name):
                return int(scaler["spec"].get("minReplicaCount", 0))
        return 1

    def data(self, kind: str, namespace: str, name: str) -> dict[str, bytes] | None:
        """Return the content of a Secret or ConfigMap; None if it does not exist."""
        manifest = self.find(kind, namespace, name)
        if manifest is None:
            return None
        if kind == "Secret":
            data = {key: base64.b64decode(value) for key, value in (manifest.get("data") or {}).items()}
            plain = manifest.get("stringData") or {}
        else:
            data = {key: base64.b64decode(value) for key, value in (manifest.get("binaryData") or {}).items()}
            plain = manifest.get("data") or {}
        return data | {key: value.encode() for key, value in plain.items()}


def hook_of(manifest: Manifest) -> list[str]:
    annotations: dict[str, Any] = manifest["metadata"].get("annotations") or {}
    events = str(annotations.get("helm.sh/hook", ""))
    return [event.strip() for event in events.split(",") if event.strip()]


def secret(name: str, namespace: str, data: Mapping[str, bytes]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": "Opaque",
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }


def _service_of_groups(manifest: Manifest) -> Manifest:
    """Return the Service that the controller of LeaderWorkerSets creates for a set."""
    name = manifest["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": manifest["metadata"].get("namespace"),
            "labels": {**manifest["metadata"].get("labels", {}), "leaderworkerset.sigs.k8s.io/name": name},
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"leaderworkerset.sigs.k8s.io/name": name},
        },
    }
