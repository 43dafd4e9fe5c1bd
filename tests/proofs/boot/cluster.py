"""The controllers of a cluster of one node: workloads are made and rolled, Services find their pods."""

from __future__ import annotations

import asyncio
import itertools
import random
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from galley.stack.part import log_tail
from tests.deploy.render import Manifest
from tests.fakes.waiting import Watch
from tests.proofs.boot.names import LAG_S, NameServer, Served, Service, addresses_of
from tests.proofs.boot.node import Node
from tests.proofs.boot.objects import GROUPS, Objects, PodTemplate, Workload
from tests.proofs.boot.pod import Identity, Pod
from tests.proofs.boot.policies import Endpoint, Policies, read_policies

NAMESPACES = ("kube-system", "kube-public", "default")
_NAME_LABEL = "kubernetes.io/metadata.name"
_SETTLE_S = 240.0
_RECREATE = "RecreateGroupOnPodRestart"


class ClusterFailed(Exception):
    """A pod ended unexpectedly, or something was not ready in time."""


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float
    pod: str
    what: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"at_s": round(self.at_s, 3), "pod": self.pod, "what": self.what, **self.details}


class Cluster:
    """Use it with `async with`; at the end every pod is stopped and awaited."""

    def __init__(self, node: Node, objects: Objects, assigned_user: int | None = None) -> None:
        self.node, self.objects, self._assigned_user = node, objects, assigned_user
        names = sorted({*NAMESPACES, objects.namespace, *objects.namespaces()})
        self._spaces: dict[str, dict[str, str]] = {name: {_NAME_LABEL: name} for name in names}
        self._services: dict[tuple[str, str], Service] = {}
        self._pods: dict[str, Pod] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._served: list[Served] = []
        self._dirty, self._changed = asyncio.Event(), Watch()
        self.names = NameServer(lambda: addresses_of(list(self._services.values()), self._served))
        self._random = random.Random(0)
        self._generation = itertools.count(1)
        self._keepers: list[asyncio.Task[None]] = []
        self.began = time.monotonic()
        self.events: list[Event] = []
        self.seen: list[Endpoint] = []
        self.owners: dict[str, str] = {}
        self.groups: dict[str, str] = {}

    async def __aenter__(self) -> Cluster:
        await self.node.open()
        self.names.start(self.node.dns.ip)
        self._keepers.append(asyncio.create_task(self._keep_serving()))
        return self

    async def __aexit__(self, *_: object) -> None:
        serving, *groups = self._keepers
        for group in groups:
            group.cancel()
        for pod in self._pods.values():
            pod.terminate()
        if self._lives:
            await asyncio.wait(self._lives.values())
        serving.cancel()
        self.names.close()

    @property
    def policies(self) -> Policies:
        return read_policies(self.objects.of("NetworkPolicy"), self._spaces)

    def space_for(self, labels: Mapping[str, str]) -> str:
        """Return a namespace with these labels, created if needed; without labels, an unrelated one."""
        if labels:
            for name, given in self._spaces.items():
                if labels.items() <= given.items():
                    return name
        name = labels.get(_NAME_LABEL) or ("elsewhere" if not labels else f"elsewhere-{len(self._spaces)}")
        self._spaces[name] = {_NAME_LABEL: name, **labels}
        return name

    def pods_of(self, owner: str) -> list[Pod]:
        """Return the pods of a workload that are not ending, in the order of their creation."""
        return [pod for pod in self._pods.values() if pod.identity.owner == owner and not pod.ending]

    def pods(self) -> list[Pod]:
        return list(self._pods.values())

    def now_s(self) -> float:
        return time.monotonic() - self.began

    async def until(self, holds: Callable[[], bool], what: str, patience_s: float = _SETTLE_S) -> None:
        """Wait for a condition. Raises ClusterFailed if a pod fails or the wait takes too long."""
        try:
            await self._changed.until(lambda: self._failed() is not None or holds(), patience_s)
        except TimeoutError:
            raise ClusterFailed(f"not within {patience_s:g} s: {what}\n{self.report()}") from None
        failed = self._failed()
        if failed is not None:
            raise ClusterFailed(f"while waiting until {what}\n{self.report()}") from failed

    def report(self) -> str:
        lines = [str(event.as_dict()) for event in self.events[-30:]]
        logs = [
            pod.log(spec["name"])
            for pod in self._pods.values()
            if not pod.ready
            for spec in pod.template.containers
        ]
        return "\n".join([*lines, *(f"--- {log.name}\n{log_tail(log)}" for log in logs)])

    def _failed(self) -> BaseException | None:
        for life in (*self._lives.values(), *self._keepers):
            if life.done() and not life.cancelled() and life.exception() is not None:
                return life.exception()
        return None

    async def deploy(self) -> None:
        for manifest in self.objects.of("Service"):
            self._add_service(manifest)
        for job in self.objects.of("Job"):
            name = job["metadata"]["name"]
            template = PodTemplate.of(job["spec"]["template"], self.objects.namespace_of(job))
            await self.start(template, Identity(name, name))
        for workload in self.objects.workloads().values():
            for ordinal in range(workload.replicas):
                if workload.kind == GROUPS:
                    self._keepers.append(asyncio.create_task(self._keep_group(workload, ordinal)))
                else:
                    await self.make(workload, ordinal)
        await self.until(self.all_are_ready, "all workloads are ready")

    def is_ready(self, workload: Workload) -> bool:
        pods = self.pods_of(workload.name)
        return len(pods) == workload.replicas * workload.size and all(pod.ready for pod in pods)

    def all_are_ready(self) -> bool:
        return all(map(self.is_ready, self.objects.workloads().values()))

    def all_of(self, owner: str) -> list[Pod]:
        return [pod for pod in self._pods.values() if pod.identity.owner == owner]

    async def forget(self, kind: str, namespace: str, name: str) -> None:
        """Remove a workload and its pods."""
        manifest = self.objects.find(kind, namespace, name)
        if manifest is None:
            raise ClusterFailed(f"{kind} {name}: there is none")
        self.objects.remove(manifest)
        for pod in self.pods_of(name):
            await self.delete(pod)

    async def delete(self, pod: Pod) -> None:
        pod.terminate()
        await self.until(lambda: pod.identity.name not in self._pods, f"{pod.identity.name} is gone")

    async def make(self, workload: Workload, ordinal: int) -> Pod:
        """Start a pod of a workload; in a StatefulSet, the one with this ordinal."""
        if workload.kind == "StatefulSet":
            identity = Identity(f"{workload.name}-{ordinal}", workload.name, workload.service_name)
            return await self.start(_with_claims(workload, identity.name, self.objects), identity)
        suffix = "".join(self._random.choices(string.ascii_lowercase, k=5))
        return await self.start(workload.template, Identity(f"{workload.name}-{suffix}", workload.name))

    async def _keep_group(self, workload: Workload, index: int) -> None:
        """Create a group, and again whenever its leader ends or a container of one of its pods has ended."""
        recreates = workload.spec["leaderWorkerTemplate"].get("restartPolicy", _RECREATE) == _RECREATE
        while True:
            pods = [await self.start(*member) for member in _members(workload, index)]
            await self._changed.until(
                lambda: pods[0].ending or (recreates and any(pod.restarts for pod in pods)),  # noqa: B023
                None,
            )
            # The kubelet reports it, and the controller reads the report.
            await asyncio.sleep(2 * LAG_S)
            for pod in pods:
                pod.terminate()
            await self._changed.until(
                lambda: not any(self._pods.get(pod.identity.name) is pod for pod in pods),  # noqa: B023
                None,
            )

    async def start(self, template: PodTemplate, identity: Identity) -> Pod:
        """Start a pod. The packet filter knows it before it runs."""

        def report(what: str, **details: Any) -> None:
            self.events.append(Event(self.now_s(), identity.name, what, details))
            self._dirty.set()
            self._changed.changed()

        if self._assigned_user is not None and template.namespace == self.objects.namespace:
            template = _with_user(template, self._assigned_user)
        pod = Pod(self.node, self.objects, template, identity, report)
        self._pods[identity.name] = pod
        self.seen.append(pod.end)
        self.owners[identity.name] = identity.owner
        self.groups[identity.name] = identity.group or identity.name
        await self._serve()
        life = asyncio.create_task(self._live(pod))
        self._lives[identity.name] = life
        return pod

    async def _live(self, pod: Pod) -> None:
        try:
            await pod.run()
            del self._pods[pod.identity.name]
        finally:
            self._dirty.set()
            self._changed.changed()

    def apply(self, manifests: Sequence[Manifest], gone: Sequence[Manifest]) -> None:
        """Replace objects, and remove those that are `gone`. No pod is replaced by that."""
        for manifest in gone:
            self.objects.remove(manifest)
            self._services.pop((self.objects.namespace_of(manifest), manifest["metadata"]["name"]), None)
        for manifest in manifests:
            self.objects.add(manifest)
        for manifest in self.objects.of("Service"):
            self._add_service(manifest)
        self._dirty.set()

    def _add_service(self, manifest: Manifest) -> None:
        namespace, name = self.objects.namespace_of(manifest), manifest["metadata"]["name"]
        known = self._services.get((namespace, name))
        ip = known.ip if known is not None and known.ip else next(self.node.service_ips)
        self._services[namespace, name] = Service.of(manifest, namespace, ip)

    async def _keep_serving(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            # What is done within this time is taken over together.
            await asyncio.sleep(LAG_S)
            self._served = [pod.served for pod in self._pods.values()]
            await self._serve()

    async def _serve(self) -> None:
        services = list(self._services.values())
        known = [pod.end for pod in self._pods.values()]
        there = {end.ip for end in known}
        served = [pod for pod in self._served if pod.end.ip in there]
        addresses = [address for service in services for address in service.addresses(served)]
        await self.node.serve(known, self.policies, addresses)


def _with_user(template: PodTemplate, user: int) -> PodTemplate:
    """Return the pod with a user of its namespace. Raises ClusterFailed if it names one itself."""
    specs = [template.spec, *template.containers, *template.init_containers]
    contexts = [spec.get("securityContext") or {} for spec in specs]
    named = {name for context in contexts for name in ("runAsUser", "fsGroup") if name in context}
    if named:
        raise ClusterFailed(f"admission: {', '.join(sorted(named))}: not in the range of the namespace")
    return replace(
        template,
        spec={**template.spec, "securityContext": {**contexts[0], "runAsUser": user, "fsGroup": user}},
    )


def _with_claims(workload: Workload, pod: str, objects: Objects) -> PodTemplate:
    """Return the template with the pod's persistent volumes."""
    volumes: list[Manifest] = list(workload.template.spec.get("volumes") or [])
    for claim in workload.claims:
        name = f"{claim['metadata']['name']}-{pod}"
        objects.add(
            {
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": workload.template.namespace},
                "spec": claim["spec"],
            }
        )
        volumes.append({"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": name}})
    return replace(
        workload.template,
        labels={**workload.template.labels, "statefulset.kubernetes.io/pod-name": pod},
        spec={**workload.template.spec, "volumes": volumes},
    )


def _members(workload: Workload, index: int) -> Iterator[tuple[PodTemplate, Identity]]:
    """Yield the pods of a group, the leader first; labels show their places."""
    leader = f"{workload.name}-{index}"
    templates = workload.spec["leaderWorkerTemplate"]
    policy = (workload.spec.get("networkConfig") or {}).get("subdomainPolicy", "Shared")
    subdomain = workload.name if policy == "Shared" else leader
    for number in range(workload.size):
        # Without a template of its own the leader is one of the workers.
        own = None if number else templates.get("leaderTemplate")
        template = PodTemplate.of(own or templates["workerTemplate"], workload.template.namespace)
        place = {"name": workload.name, "group-index": str(index), "worker-index": str(number)}
        labels = {f"leaderworkerset.sigs.k8s.io/{key}": value for key, value in place.items()}
        yield (
            replace(template, labels={**template.labels, **labels}),
            Identity(f"{leader}-{number}" if number else leader, workload.name, subdomain, leader),
        )
