"""One trial of the chart: `python -m tests.boot.trial --plan FILE --record FILE --folder DIR`.

Boots what a plan's values render, asks for reference answers, keeps streams coming, rolls every workload and hurts
some pods meanwhile, knocks at every door, and writes down what happened. It judges nothing: that is for those who
read the record. Run it by `runs.py`, which gives it namespaces of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.defaults import DEFAULT_MODEL
from services.engine.prepare import resolve_model
from services.engine.store import cache_dir
from tests.boot.client import Client, gateway_address
from tests.boot.cluster import Cluster
from tests.boot.doors import knock
from tests.boot.images import Models, Registry
from tests.boot.launch import Launch, Security
from tests.boot.loopback import LoopbackNode
from tests.boot.node import Node, SandboxNode
from tests.boot.objects import Objects, hook_of
from tests.boot.policies import Policies
from tests.deploy.render import render

if TYPE_CHECKING:
    from tests.boot.cluster import Event
    from tests.boot.pod import Pod
    from tests.deploy.render import Manifest

NAMESPACE = "galley"
_FAULT_S = 240.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one trial does. `objects` are what the user of the chart made before, such as Secrets."""

    values: Manifest = field(default_factory=dict)
    objects: list[Manifest] = field(default_factory=list)
    release: str = "galley"
    isolated: bool = True
    warm: bool = True
    # What is rolled, by component, one after the other; and how often all of it.
    rolls: tuple[str, ...] = ()
    rounds: int = 1
    # Pods of these components are killed; those are stopped until their probes tell, and go on or are replaced.
    killed: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    hung: tuple[str, ...] = ()
    streams: int = 2
    max_tokens: int = 48
    patience_s: float = 60.0
    doors: bool = True
    # Of the clients: environment, and Secrets that they mount, by path.
    client_environment: dict[str, str] = field(default_factory=dict)
    client_secrets: dict[str, str] = field(default_factory=dict)


class Trial:
    """A plan while it is carried out; `record` is what is known so far."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self.record: dict[str, Any] = {"isolated": plan.isolated, "phases": {}}

    async def run(self) -> None:
        """All of it."""
        plan = self._plan
        rendered = render(plan.values, release=plan.release)
        objects = Objects([*rendered, *plan.objects], NAMESPACE)
        work = self._folder / "work"
        work.mkdir()
        if plan.isolated:
            # Gone with the namespaces, whatever happens.
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(work)], check=True)
        registry = Registry(Models.prepared(resolve_model(DEFAULT_MODEL), work))
        kernels = cache_dir() / "kernels"
        node = (SandboxNode if plan.isolated else LoopbackNode)(
            work, registry, kernels if plan.warm and kernels.is_dir() else None
        )
        async with Cluster(node, objects) as cluster:
            try:
                await self._carry_out(cluster)
            finally:
                await self._write_down(cluster)
        self.record["left"] = [event.told() for event in cluster.events if event.what == "SIGKILL"]

    async def _carry_out(self, cluster: Cluster) -> None:
        began = cluster.now_s()
        await cluster.deploy()
        self._phase("boot", cluster, began)
        client = Client(cluster, gateway_address(cluster.objects), self._plan)
        began = cluster.now_s()
        self.record["reference"] = await client.reference()
        self._phase("reference", cluster, began)
        self.record["hooks"] = [await self._hook(cluster, hook) for hook in cluster.objects.hooks("test")]
        if self._plan.rolls or self._plan.killed or self._plan.frozen or self._plan.hung:
            await client.begin()
            for _ in range(self._plan.rounds):
                await self._disturb(cluster)
            self.record["answers"] = await client.finish()
        if self._plan.doors and cluster.node.isolated:
            began = cluster.now_s()
            self.record["doors"] = await knock(cluster)
            self._phase("doors", cluster, began)

    async def _disturb(self, cluster: Cluster) -> None:
        for component in self._plan.rolls:
            for name in _workloads_of(cluster, component):
                began = cluster.now_s()
                await cluster.roll(name)
                self._phase(f"roll {name}", cluster, began)
        for component in self._plan.killed:
            await self._fault(cluster, component, "kill", self._kill)
        for component in self._plan.frozen:
            await self._fault(cluster, component, "freeze", self._freeze)
        for component in self._plan.hung:
            await self._fault(cluster, component, "hang", self._hang)

    async def _fault(self, cluster: Cluster, component: str, kind: str, strike: Any) -> None:
        for name in _workloads_of(cluster, component):
            began = cluster.now_s()
            pod = cluster.pods_of(name)[-1]
            await strike(cluster, pod)
            await cluster.until(lambda pod=pod: pod.ready, f"{pod.identity.name} is back", _FAULT_S)  # type: ignore[misc]
            self._phase(f"{kind} {pod.identity.name}", cluster, began)

    async def _kill(self, cluster: Cluster, pod: Pod) -> None:
        restarts = pod.restarts
        pod.send(signal.SIGKILL)
        await cluster.until(lambda: pod.restarts > restarts, "the kubelet starts it again")

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
        """What `helm test` runs, to its end."""
        status, said = await Client.run_hook(cluster, hook)
        return {
            "name": hook["metadata"]["name"],
            "on": hook_of(hook),
            "status": status,
            "output": said[-2000:],
        }

    def _phase(self, name: str, cluster: Cluster, began: float) -> None:
        told = {"began_s": round(began, 3), "seconds": round(cluster.now_s() - began, 3)}
        self.record["phases"].setdefault(name, []).append(told)

    async def _write_down(self, cluster: Cluster) -> None:
        traffic = await cluster.node.traffic()
        events: list[Event] = cluster.events
        self.record |= {
            "began_s": cluster.began,
            "events": [event.told() for event in events],
            "probes": dict(sorted(cluster.node.probes.items())),
            "unknown_names": sorted(cluster.unknown_names),
            "made": [asdict(connection) for connection in sorted(traffic.made)],
            "refused": [asdict(connection) for connection in sorted(traffic.refused)],
            "packets": dict(traffic.packets),
            "ends": {
                end.ip: {"name": end.name, "namespace": end.namespace, "labels": dict(end.labels or {})}
                for end in cluster.seen
            },
            "openings": _openings(cluster.policies),
        }


def _openings(policies: Policies) -> list[dict[str, Any]]:
    return [
        {"name": opening.name, "peers": list(opening.peers), "ports": [str(port) for port in opening.ports]}
        for opening in policies.openings
    ]


def _workloads_of(cluster: Cluster, component: str) -> list[str]:
    label = "app.kubernetes.io/component"
    return [
        name
        for name, workload in cluster.objects.workloads().items()
        if workload.template.labels.get(label) == component and workload.replicas
    ]


async def _check(folder: Path) -> None:
    """Whether a container can be run, with all that one is given here; raises what went wrong."""
    work = folder / "work"
    work.mkdir()
    node: Node = SandboxNode(work, Registry(Models(work, work)), None)
    await node.open()
    ip = node.next_ip()
    await node.attach(ip)
    await node.serve([], Policies((), (), {}), [], [])
    security = Security(10001, 10001, (), True, True, (), True)
    image, log = node.image("valkey"), node.logs / "check"
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
        raise RuntimeError(node.tail(log))


def read_plan(told: dict[str, Any]) -> Plan:
    """A plan as JSON holds it."""
    kinds = {known.name: known for known in fields(Plan)}
    return Plan(
        **{name: tuple(v) if str(kinds[name].type).startswith("tuple") else v for name, v in told.items()}
    )


def main() -> int:
    """Exit status 1, with the reason, where the trial came to no end."""
    parser = argparse.ArgumentParser(prog="python -m tests.boot.trial", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only see whether a container can be run")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    if given.check:
        asyncio.run(_check(given.folder))
        return 0
    trial = Trial(read_plan(json.loads(given.plan.read_text())), given.folder)
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
