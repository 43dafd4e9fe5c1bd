"""Groups of pods that are one replica, as the controller of LeaderWorkerSets makes and remakes them.

A leader and its workers, who know their place by labels; when a container of one has started again, all of
them are made anew, if the manifest says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from tests.proofs.boot.names import LAG_S
from tests.proofs.boot.objects import PodTemplate, Workload
from tests.proofs.boot.pod import Identity, Pod

_LABEL = "leaderworkerset.sigs.k8s.io"
_SHARED = "Shared"
_RECREATE = "RecreateGroupOnPodRestart"


@dataclass(frozen=True, slots=True)
class Member:
    """A pod of a group, before it is made."""

    template: PodTemplate
    identity: Identity


def members(workload: Workload, index: int) -> Iterator[Member]:
    """The pods of a group, the leader first."""
    leader = f"{workload.name}-{index}"
    told = workload.spec["leaderWorkerTemplate"]
    worker = PodTemplate.of(told["workerTemplate"], workload.template.namespace)
    policy = (workload.spec.get("networkConfig") or {}).get("subdomainPolicy", _SHARED)
    subdomain = workload.name if policy == _SHARED else leader
    for number in range(workload.size):
        template = worker if number else PodTemplate.of(_leader_of(told), workload.template.namespace)
        place = {"name": workload.name, "group-index": str(index), "worker-index": str(number)}
        labels = {f"{_LABEL}/{key}": value for key, value in place.items()}
        yield Member(
            replace(template, labels={**template.labels, **labels}),
            Identity(f"{leader}-{number}" if number else leader, workload.name, subdomain, leader),
        )


def _leader_of(told: dict[str, dict[str, object]]) -> dict[str, object]:
    """Without a template of its own it is one of the workers."""
    return told.get("leaderTemplate") or told["workerTemplate"]


async def keep_group(
    workload: Workload,
    index: int,
    make: Callable[[Member], Awaitable[Pod]],
    until: Callable[[Callable[[], bool]], Awaitable[None]],
    is_there: Callable[[Pod], bool],
) -> None:
    """Make a group, and again whenever its leader is told to end, or what one of its pods ran has ended."""
    recreates = workload.spec["leaderWorkerTemplate"].get("restartPolicy", _RECREATE) == _RECREATE
    while True:
        pods = [await make(member) for member in members(workload, index)]
        await until(lambda: pods[0].ending or (recreates and any(pod.restarts for pod in pods)))  # noqa: B023
        # The kubelet tells of it, and the controller hears of it.
        await asyncio.sleep(2 * LAG_S)
        for pod in pods:
            pod.terminate()
        await until(lambda: not any(map(is_there, pods)))  # noqa: B023
