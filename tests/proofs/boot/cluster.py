"""The controllers of a cluster of one node: workloads are made and rolled, Services find their pods."""

from __future__ import annotations

import asyncio
import itertools
import random
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from galley.stack.part import log_tail
from tests.deploy.render import Manifest
from tests.fakes.waiting import Watch
from tests.proofs.boot.groups import keep_group
from tests.proofs.boot.names import LAG_S, Answers, NameServer, Served, Service
from tests.proofs.boot.node import Node
from tests.proofs.boot.objects import GROUPS, Objects, PodTemplate, Workload
from tests.proofs.boot.pod import Identity, Pod
from tests.proofs.boot.policies import Endpoint, Policies, read_policies
from tests.proofs.boot.wires import DNS_IP

NAMESPACES = ("kube-system", "kube-public", "default")
_NAME_LABEL = "kubernetes.io/metadata.name"
_SETTLE_S = 240.0


class ClusterFailed(Exception):
    """A pod came to an end that nobody asked for, or something was not ready in time."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened, `at_s` after the start."""

    at_s: float
    pod: str
    what: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """As a record holds it."""
        return {"at_s": round(self.at_s, 3), "pod": self.pod, "what": self.what, **self.details}


class Cluster:
    """Open it with `async with`; at its end every pod is told to end, and waited for."""

    def __init__(self, node: Node, objects: Objects) -> None:
        self.node, self.objects = node, objects
        names = (*NAMESPACES, objects.namespace)
        self._spaces: dict[str, dict[str, str]] = {name: {_NAME_LABEL: name} for name in names}
        self._services: dict[tuple[str, str], Service] = {}
        self._pods: dict[str, Pod] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._served: list[Served] = []
        self._dirty, self._changed = asyncio.Event(), Watch()
        self._names = NameServer(lambda: Answers(list(self._services.values()), self._served))
        self._random = random.Random(0)
        self._generation = itertools.count(1)
        self._keepers: list[asyncio.Task[None]] = []
        self.began = time.monotonic()
        self.events: list[Event] = []
        self.seen: list[Endpoint] = []
        self._owners: dict[str, str] = {}
        self._groups: dict[str, str] = {}

    async def __aenter__(self) -> Cluster:
        await self.node.open()
        await self._names.start(DNS_IP)
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
        self._names.close()

    @property
    def unknown_names(self) -> set[str]:
        """What pods looked up and there was not."""
        return self._names.unknown

    @property
    def policies(self) -> Policies:
        """The rendered NetworkPolicies."""
        return read_policies(self.objects.of("NetworkPolicy"), self._spaces)

    def space_for(self, labels: Mapping[str, str]) -> str:
        """A namespace with these labels, made if there is none; without any, one of nobody's."""
        if labels:
            for name, given in self._spaces.items():
                if labels.items() <= given.items():
                    return name
        name = labels.get(_NAME_LABEL) or ("elsewhere" if not labels else f"elsewhere-{len(self._spaces)}")
        self._spaces[name] = {_NAME_LABEL: name, **labels}
        return name

    def pods_of(self, owner: str) -> list[Pod]:
        """The pods of a workload that are not told to end, in the order in which they were made."""
        return [pod for pod in self._pods.values() if pod.identity.owner == owner and not pod.ending]

    def pods(self) -> list[Pod]:
        """All that are there."""
        return list(self._pods.values())

    @property
    def owners(self) -> dict[str, str]:
        """The workload, or the trial's own part, that each pod was of."""
        return dict(self._owners)

    @property
    def groups(self) -> dict[str, str]:
        """By what name each pod lives and dies: its own, where it is alone."""
        return dict(self._groups)

    def now_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self.began

    async def until(self, holds: Callable[[], bool], what: str, patience_s: float = _SETTLE_S) -> None:
        """Wait; raises ClusterFailed where a pod fails or it takes too long."""
        try:
            await self._changed.until(lambda: self._failed() is not None or holds(), patience_s)
        except TimeoutError:
            raise ClusterFailed(f"not within {patience_s:g} s: {what}\n{self.report()}") from None
        failed = self._failed()
        if failed is not None:
            raise ClusterFailed(f"while waiting until {what}\n{self.report()}") from failed

    def report(self) -> str:
        """What happened last, and the ends of the logs of those that are not ready."""
        lines = [str(event.told()) for event in self.events[-30:]]
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
        """Make what the objects say, and wait until all of it is ready."""
        for manifest in self.objects.of("Service"):
            self._add_service(manifest)
        workloads = self.objects.workloads().values()
        for workload in workloads:
            for ordinal in range(workload.replicas):
                if workload.kind == GROUPS:
                    self._keepers.append(asyncio.create_task(self._keep_group(workload, ordinal)))
                else:
                    await self.make(workload, ordinal)
        await self.until(self.all_are_ready, "all workloads are ready")

    def is_ready(self, workload: Workload) -> bool:
        """It has all of its pods, and they are ready."""
        pods = self.pods_of(workload.name)
        return len(pods) == workload.replicas * workload.size and all(pod.ready for pod in pods)

    def all_are_ready(self) -> bool:
        """Every workload is."""
        return all(map(self.is_ready, self.objects.workloads().values()))

    def all_of(self, owner: str) -> list[Pod]:
        """Its pods, those included that are ending."""
        return [pod for pod in self._pods.values() if pod.identity.owner == owner]

    async def delete(self, pod: Pod) -> None:
        """Tell a pod to end, and wait until it is gone."""
        pod.terminate()
        await self.until(lambda: pod.identity.name not in self._pods, f"{pod.identity.name} is gone")

    async def make(self, workload: Workload, ordinal: int) -> Pod:
        """Start a pod of a workload; in a StatefulSet, the one of this number."""
        if workload.kind == "StatefulSet":
            identity = Identity(f"{workload.name}-{ordinal}", workload.name, workload.service_name)
            return await self.start(_with_claims(workload, identity.name, self.objects), identity)
        suffix = "".join(self._random.choices(string.ascii_lowercase, k=5))
        return await self.start(workload.template, Identity(f"{workload.name}-{suffix}", workload.name))

    async def _keep_group(self, workload: Workload, index: int) -> None:
        await keep_group(
            workload,
            index,
            lambda member: self.start(member.template, member.identity),
            self._changed_until,
            lambda pod: self._pods.get(pod.identity.name) is pod,
        )

    async def _changed_until(self, holds: Callable[[], bool]) -> None:
        await self._changed.until(holds, None)

    async def start(self, template: PodTemplate, identity: Identity) -> Pod:
        """Start a pod. It is known to the filter before it runs."""

        def tell(what: str, **details: Any) -> None:
            self.events.append(Event(self.now_s(), identity.name, what, details))
            self._dirty.set()
            self._changed.changed()

        pod = Pod(self.node, self.objects, template, identity, tell)
        self._pods[identity.name] = pod
        self.seen.append(pod.end)
        self._owners[identity.name] = identity.owner
        self._groups[identity.name] = identity.group or identity.name
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

    def _add_service(self, manifest: Manifest) -> None:
        namespace = self.objects.namespace_of(manifest)
        service = Service.of(manifest, namespace, self.node.service_ip())
        self._services[namespace, service.name] = service

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
        await self.node.serve(known, self.policies, services, addresses)


def _with_claims(workload: Workload, pod: str, objects: Objects) -> PodTemplate:
    """The template with the volumes that are this pod's for good."""
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
