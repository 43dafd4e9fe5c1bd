"""One trial of the chart: `python -m tests.proofs.boot.trial --plan FILE --record FILE --folder DIR`.

It boots what a plan's values render, collects reference answers, keeps streams running, rolls every
workload, injects faults, tries every port, and writes a record. verdict.py judges the record; sandbox.py
gives the trial namespaces of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from galley.engine.load.support import cache_dir
from galley.stack.part import log_tail
from tests.deploy.render import Manifest, render
from tests.proofs.boot.client import Client, gateway_address
from tests.proofs.boot.cluster import Cluster
from tests.proofs.boot.containers import SECCOMP, Launch, Security
from tests.proofs.boot.images import Models, Registry
from tests.proofs.boot.network import IPV4, IPV6, Connection
from tests.proofs.boot.node import Node
from tests.proofs.boot.objects import Objects, hook_of
from tests.proofs.boot.plan import Plan
from tests.proofs.boot.pod import Pod
from tests.proofs.boot.policies import INGRESS, Endpoint, Opening, Policies
from tests.proofs.boot.rollouts import roll
from tests.proofs.boot.sandbox import run
from tests.proofs.boot.upgrade import upgrade
from tests.proofs.boot.visitors import knock, scrape
from tests.proofs.boot.worlds import HUB


async def record_of(cluster: Cluster) -> dict[str, Any]:
    traffic = await cluster.node.wires.traffic()
    ends = {cluster.node.dns.ip: cluster.node.dns} | {end.ip: end for end in cluster.seen}
    return {
        "began_s": cluster.began,
        # From here on all pods are stopped.
        "closed_at_s": cluster.now_s(),
        "workloads": {name: made.replicas for name, made in cluster.objects.workloads().items()},
        "owners": cluster.owners,
        "groups": cluster.groups,
        "events": [event.as_dict() for event in cluster.events],
        "filters": SECCOMP.exists(),
        "probes": dict(sorted(cluster.node.probes.items())),
        "unknown_names": sorted(cluster.names.unknown),
        "namespace": cluster.objects.namespace,
        "services": sorted(service["metadata"]["name"] for service in cluster.objects.of("Service")),
        "made": [_describe(connection, ends, cluster.policies) for connection in sorted(traffic.made)],
        "refused": [_describe(connection, ends, cluster.policies) for connection in sorted(traffic.refused)],
        "openings": _openings(cluster.policies),
    }


def _describe(connection: Connection, ends: Mapping[str, Endpoint], policies: Policies) -> dict[str, Any]:
    source, destination = (
        ends.get(ip, Endpoint(ip, ip)) for ip in (connection.source, connection.destination)
    )
    may, through = policies.leave(source, destination, connection.protocol, connection.port)
    uses = [
        part for opening in through for part in _parts(opening, source, destination, connection, policies)
    ]
    return {
        "source": source.name,
        "destination": destination.name,
        "protocol": connection.protocol,
        "port": connection.port,
        "through": [opening.name for opening in through] if may else None,
        "uses": uses,
    }


def _parts(
    opening: Opening, source: Endpoint, destination: Endpoint, connection: Connection, policies: Policies
) -> Iterator[str]:
    peer = source if opening.direction == INGRESS else destination
    peers, ports = opening.uses(destination, peer, connection.port, policies.namespaces)
    yield opening.name
    yield from (f"{opening.name} peer {place}" for place in peers)
    yield from (
        f"{opening.name} port {opening.ports[place]}"
        for place in ports
        if opening.ports[place].protocol == connection.protocol
    )


def _openings(policies: Policies) -> list[dict[str, Any]]:
    return [
        {
            "name": opening.name,
            "peers": list(opening.peers),
            "ports": [str(port) for port in opening.ports],
            "parts": [
                opening.name,
                *(f"{opening.name} peer {place}" for place in range(len(opening.peers))),
                *(f"{opening.name} port {port}" for port in opening.ports),
            ],
        }
        for opening in policies.openings
    ]


NAMESPACE = "galley"
FAULTS = "faults"
"""The phase in which pods are killed and stopped."""
_FAULT_S = 240.0


class Trial:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self.record: dict[str, Any] = {"phases": {}}

    async def run(self) -> None:
        plan = self._plan
        objects = Objects([*(plan.before or render(plan.values)), *plan.objects], NAMESPACE)
        work = self._folder / "work"
        work.mkdir()
        # It disappears with the namespaces, whatever happens.
        await run("mount", "-t", "tmpfs", "tmpfs", str(work))
        registry = Registry(Models.prepared(Path(plan.model), work))
        kernels = cache_dir() / "kernels"
        node = Node(work, registry, kernels if plan.warm else None, IPV6 if plan.ipv6 else IPV4)
        async with Cluster(node, objects, plan.assigned_user) as cluster:
            try:
                await self._carry_out(cluster)
            finally:
                self.record |= await record_of(cluster)
        self.record["events"] = [event.as_dict() for event in cluster.events]

    async def _carry_out(self, cluster: Cluster) -> None:
        began = cluster.now_s()
        await cluster.deploy()
        for pod in cluster.pods():
            cluster.node.keep_kernels(pod)
        self._phase("boot", cluster, began)
        client = Client(cluster, gateway_address(cluster.objects), self._plan)
        began = cluster.now_s()
        self.record["reference"] = await client.reference()
        self._phase("reference", cluster, began)
        self.record["clients"] = client.ends
        self.record["hooks"] = [await self._hook(cluster, hook) for hook in cluster.objects.hooks("test")]
        plan = self._plan
        if plan.before or plan.rolls or plan.killed or plan.frozen or plan.hung:
            await client.begin()
            if plan.before:
                await self._upgrade(cluster)
            if plan.hub_outage:
                await cluster.forget("Deployment", HUB, HUB)
            for _ in range(self._plan.rounds):
                await self._disturb(cluster)
            self.record["answers"] = await client.finish()
        self.record["census"] = [container for pod in cluster.pods() for container in pod.census()]
        self.record["scraped"] = await scrape(cluster)
        began = cluster.now_s()
        self.record["doors"] = await knock(cluster)
        self._phase("doors", cluster, began)

    async def _upgrade(self, cluster: Cluster) -> None:
        began = cluster.now_s()
        self.record["upgraded"] = await upgrade(cluster, self._plan.before, render(self._plan.values))
        self._phase("upgrade", cluster, began)
        self.record["hooks"] += [await self._hook(cluster, hook) for hook in cluster.objects.hooks("test")]

    async def _disturb(self, cluster: Cluster) -> None:
        for component in self._plan.rolls:
            for name in _workloads_of(cluster, component):
                began = cluster.now_s()
                await roll(cluster, name)
                self._phase(f"roll {name}", cluster, began)
        began = cluster.now_s()
        struck = [
            (strike, pod)
            for components, strike in (
                (self._plan.killed, self._kill),
                (self._plan.frozen, self._freeze),
                (self._plan.hung, self._hang),
            )
            for component in components
            for name in _workloads_of(cluster, component)
            for pod in cluster.pods_of(name)[-1:]
        ]
        if struck:
            await asyncio.gather(*(strike(cluster, pod) for strike, pod in struck))
            await cluster.until(cluster.all_are_ready, "those struck are back", _FAULT_S)
            self._phase(FAULTS, cluster, began)

    async def _kill(self, cluster: Cluster, pod: Pod) -> None:
        restarts = pod.restarts
        pod.send(signal.SIGKILL)
        await cluster.until(lambda: pod.restarts > restarts, "the kubelet starts it again")
        if pod.identity.group:
            await cluster.until(lambda: pod not in cluster.pods(), "its group goes", _FAULT_S)

    async def _freeze(self, cluster: Cluster, pod: Pod) -> None:
        pod.send(signal.SIGSTOP)
        try:
            await cluster.until(lambda: not pod.ready, "its readiness probe tells", _FAULT_S)
        finally:
            pod.send(signal.SIGCONT)

    async def _hang(self, cluster: Cluster, pod: Pod) -> None:
        restarts = pod.restarts
        pod.send(signal.SIGSTOP)
        await cluster.until(lambda: pod.restarts > restarts, "its liveness probe tells", _FAULT_S)

    async def _hook(self, cluster: Cluster, hook: Manifest) -> dict[str, Any]:
        status, output = await Client.run_hook(cluster, hook)
        return {
            "name": hook["metadata"]["name"],
            "on": hook_of(hook),
            "status": status,
            "output": output[-2000:],
        }

    def _phase(self, name: str, cluster: Cluster, began: float) -> None:
        data = {"began_s": round(began, 3), "seconds": round(cluster.now_s() - began, 3)}
        self.record["phases"].setdefault(name, []).append(data)


def _workloads_of(cluster: Cluster, component: str) -> list[str]:
    label = "app.kubernetes.io/component"
    return [
        name
        for name, workload in cluster.objects.workloads().items()
        if workload.template.labels.get(label) == component and workload.replicas
    ]


async def _check(folder: Path) -> None:
    """Run a container; raise what went wrong."""
    work = folder / "work"
    work.mkdir()
    node = Node(work, Registry(Models(work, work)), None)
    await node.open()
    ip = next(node.pod_ips)
    await node.wires.attach(ip)
    await node.serve([], Policies((), (), {}), [])
    security = Security(10001, 10001, (), True, True, (), True)
    image, log = node.registry.image("valkey"), node.logs / "check"
    launch = Launch(
        "check",
        image,
        ["valkey-server", "--version"],
        image.stage.env,
        "/",
        [],
        security,
        work / "check",
        log,
        ip,
        "check",
    )
    launch.folder.mkdir()
    running = await node.start(launch)
    if await running.ended() != 0:
        raise RuntimeError(log_tail(log))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.boot.trial", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only see whether a container can be run")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    if given.check:
        asyncio.run(_check(given.folder))
        return 0
    trial = Trial(Plan.read(given.plan), given.folder)
    status = 0
    try:
        asyncio.run(trial.run())
    except Exception as error:  # noqa: BLE001  # whatever it was, what is known by then is written down
        trial.record["failed"] = "".join(traceback.format_exception(error))
        status = 1
    given.record.write_text(json.dumps(trial.record, indent=1, default=str))
    return status


if __name__ == "__main__":
    sys.exit(main())
