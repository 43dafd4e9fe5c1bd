"""How the pods of a workload are replaced: as each kind of it does, by what the workload says."""

from __future__ import annotations

from tests.proofs.boot.cluster import Cluster
from tests.proofs.boot.environment import share_of
from tests.proofs.boot.objects import GROUPS, Workload
from tests.proofs.boot.pod import Pod


async def roll(cluster: Cluster, name: str) -> None:
    workload = cluster.objects.workloads()[name]
    if workload.kind == "StatefulSet":
        await _roll_stateful_set(cluster, workload)
    elif workload.kind == GROUPS:
        await _roll_groups(cluster, workload)
    else:
        await _roll_deployment(cluster, workload)
    await cluster.until(lambda: cluster.is_ready(workload), f"{name} is ready")


async def _roll_stateful_set(cluster: Cluster, workload: Workload) -> None:
    for pod in sorted(cluster.pods_of(workload.name), key=_ordinal, reverse=True):
        await cluster.delete(pod)
        made = await cluster.make(workload, _ordinal(pod))
        await cluster.until(lambda made=made: made.ready, f"{made.identity.name} is ready")  # type: ignore[misc]


async def _roll_groups(cluster: Cluster, workload: Workload) -> None:
    leaders = [pod for pod in cluster.pods_of(workload.name) if pod.identity.group == pod.identity.name]
    for leader in sorted(leaders, key=_ordinal, reverse=True):
        leader.terminate()
        name = leader.identity.name
        await cluster.until(lambda leader=leader: leader not in cluster.pods(), f"{name} is gone")  # type: ignore[misc]
        await cluster.until(lambda: cluster.is_ready(workload), f"the group of {name} is ready")


async def _roll_deployment(cluster: Cluster, workload: Workload) -> None:
    """Respect maxSurge and maxUnavailable."""
    data = (workload.spec.get("strategy") or {}).get("rollingUpdate") or {}
    surge = share_of(data.get("maxSurge", "25%"), workload.replicas, up=True)
    least = workload.replicas - share_of(data.get("maxUnavailable", "25%"), workload.replicas, up=False)
    old, new = cluster.pods_of(workload.name), list["Pod"]()

    def one_may_go() -> bool:
        return sum(pod.ready for pod in (*old, *new)) > least or any(not pod.ready for pod in old)

    while old or len(new) < workload.replicas:
        while len(new) < workload.replicas and len(old) + len(new) < workload.replicas + surge:
            new.append(await cluster.make(workload, len(new)))
        if old:
            await cluster.until(one_may_go, f"one of {workload.name} may go")
            leaving = min(old, key=lambda pod: pod.ready)
            old.remove(leaving)
            leaving.terminate()
    await cluster.until(
        lambda: len(cluster.all_of(workload.name)) == workload.replicas,
        f"the old ones of {workload.name} are gone",
    )


def _ordinal(pod: Pod) -> int:
    return int(pod.identity.name.rsplit("-", 1)[1])
