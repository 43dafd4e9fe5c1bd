"""The life of a pod, as the kubelet manages it.

Its containers are started, probed, restarted when they end or hang, and stopped: preStop, SIGTERM, and
SIGKILL after the grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galley.stack.part import log_tail
from tests.deploy.render import Manifest
from tests.proofs.boot.containers import Container, Launch, security_of
from tests.proofs.boot.environment import PodFacts, amount, command_of, environment_of
from tests.proofs.boot.names import Served
from tests.proofs.boot.node import Node
from tests.proofs.boot.objects import Objects, PodTemplate
from tests.proofs.boot.policies import Endpoint
from tests.proofs.boot.probes import Probe, act, problem_of
from tests.proofs.boot.volumes import Mount, Volumes

_LEAST_GRACE_S = 2.0

Report = Callable[..., None]
"""`report(what, **details)`: something happened to the pod."""
Count = Callable[..., None]
"""`count(probe, passed=)`: a probe was answered."""


class Kept:
    def __init__(self, spec: Manifest, running: Container, pod: Pod, count: Count, report: Report) -> None:
        self._spec, self._name, self._running, self._pod = spec, spec["name"], running, pod
        self._count, self._report = count, report
        self._ports = pod.end.ports or {}

    async def until_it_ends(self, ending: asyncio.Event) -> int:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            stopping = group.create_task(self._stop_when(ending))
            status = await self._running.ended()
            watching.cancel()
            if not ending.is_set():
                stopping.cancel()
        return status

    async def _watch(self) -> None:
        startup = self._probe("startupProbe")
        if startup is not None:
            problem = await self._probe_until("startup", startup, passes=True)
            if problem is not None:
                await self._give_up("startup", startup, problem)
                return
        self._report("up", container=self._name)
        readiness, liveness = self._probe("readinessProbe"), self._probe("livenessProbe")
        async with asyncio.TaskGroup() as group:
            if readiness is None:
                self._pod.set_ready(self._name, ready=True)
            else:
                group.create_task(self._watch_readiness(readiness))
            if liveness is not None:
                group.create_task(self._watch_liveness(liveness))

    def _probe(self, kind: str) -> Probe | None:
        return Probe.of(self._spec[kind]) if kind in self._spec else None

    async def _watch_readiness(self, probe: Probe) -> None:
        await asyncio.sleep(probe.delay_s)
        while True:
            await self._probe_until("readiness", probe, passes=True, for_ever=True)
            self._pod.set_ready(self._name, ready=True)
            problem = await self._probe_until("readiness", probe, passes=False)
            self._pod.set_ready(self._name, ready=False, problem=problem or "")

    async def _watch_liveness(self, probe: Probe) -> None:
        await asyncio.sleep(probe.delay_s)
        problem = await self._probe_until("liveness", probe, passes=False)
        await self._give_up("liveness", probe, problem or "")

    async def _give_up(self, kind: str, probe: Probe, problem: str) -> None:
        if not self._pod.ending:
            self._report("failed", probe=kind, container=self._name, problem=problem)
            await self._stop(probe.grace_s)

    async def _probe_until(
        self, kind: str, probe: Probe, *, passes: bool, for_ever: bool = False
    ) -> str | None:
        passed = failed = 0
        while kind == "readiness" or not self._pod.ending:
            request = time.monotonic()
            problem = await problem_of(probe, self._pod.ip, self._ports, self._running.execute)
            passed, failed = (passed + 1, 0) if problem is None else (0, failed + 1)
            self._count(kind, passed=problem is None)
            if passes and passed >= probe.successes:
                return None
            if not for_ever and failed >= probe.failures:
                return problem
            await asyncio.sleep(max(0.0, request + probe.period_s - time.monotonic()))
        return None

    async def _stop_when(self, ending: asyncio.Event) -> None:
        await ending.wait()
        await self._stop(None)

    async def _stop(self, grace_s: float | None) -> None:
        """Run preStop, send SIGTERM, and SIGKILL after the grace period (the pod's, if None)."""
        grace_s = self._pod.template.grace_s if grace_s is None else grace_s
        began = time.monotonic()
        hook = (self._spec.get("lifecycle") or {}).get("preStop")
        if hook is not None:
            problem = await self._pre_stop(hook, grace_s)
            self._report("preStop", container=self._name, seconds=_since(began), problem=problem or "")
        self._running.send(signal.SIGTERM)
        self._report("SIGTERM", container=self._name)
        try:
            async with asyncio.timeout(max(_LEAST_GRACE_S, grace_s - (time.monotonic() - began))):
                await self._running.ended()
        except TimeoutError:
            self._report("SIGKILL", container=self._name, seconds=_since(began))
            await self._running.kill()

    async def _pre_stop(self, hook: Manifest, grace_s: float) -> str | None:
        try:
            async with asyncio.timeout(grace_s):
                return await act(hook, self._pod.ip, self._ports, self._running.execute, grace_s)
        except TimeoutError:
            return f"no end within {grace_s:g} s"


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


# Back-off before a restart, in seconds.
_BACK_OFF_S = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)


# Failed starts before the trial gives up; a kubelet would go on.
_MOST_FRUITLESS = 2


class PodFailed(Exception):
    """An init container, or one that must not be restarted, failed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A pod's names: `subdomain` is the Service that names it; pods of a `group` are recreated together."""

    name: str
    owner: str
    subdomain: str = ""
    group: str = ""


class Pod:
    def __init__(
        self, node: Node, objects: Objects, template: PodTemplate, identity: Identity, report: Report
    ) -> None:
        self.identity, self.template = identity, template
        self._node, self._objects, self._report = node, objects, report
        self.ip = next(node.pod_ips)
        self.folder = node.folder / "pods" / f"{identity.name}.{uuid.uuid4().hex[:6]}"
        self.facts = PodFacts(
            identity.name,
            template.namespace,
            str(uuid.uuid4()),
            self.ip,
            node.family.node_ip,
            template.labels,
            template.annotations,
        )
        self._volumes = Volumes(
            template.spec, self.facts, objects, self.folder / "volumes", node.claims, node.empty
        )
        self._running: dict[str, Container] = {}
        self._ready: dict[str, bool] = {spec["name"]: False for spec in template.containers}
        self._ending = asyncio.Event()
        self._starts = itertools.count(1)
        self.restarts = self._fruitless = 0
        self.exit_status: int | None = None

    @property
    def user(self) -> int:
        """Return the user of its first container."""
        spec = self.template.containers[0]
        return security_of(self.template.spec, spec, self._node.registry.image(spec["image"])).user

    @property
    def ready(self) -> bool:
        return not self._ending.is_set() and all(self._ready.values())

    @property
    def ending(self) -> bool:
        return self._ending.is_set()

    @property
    def end(self) -> Endpoint:
        ports = {
            port["name"]: int(port["containerPort"])
            for container in self.template.containers
            for port in container.get("ports") or ()
            if "name" in port
        }
        return Endpoint(
            self.identity.name, self.ip, self.template.namespace, dict(self.template.labels), ports
        )

    @property
    def served(self) -> Served:
        return Served(self.end, self.ready, self.identity.name, self.identity.subdomain)

    def set_ready(self, name: str, *, ready: bool, problem: str = "") -> None:
        if self._ready[name] != ready:
            self._ready[name] = ready
            self._fruitless = 0 if ready else self._fruitless
            self._report("ready" if ready else "unready", container=name, problem=problem)

    def terminate(self) -> None:
        if not self._ending.is_set():
            self._ending.set()
            self._report("ending")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the first process of its first container: a fault."""
        self._report("fault", signal=number.name)
        self._running[self.template.containers[0]["name"]].send(number)

    async def execute(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        running = self._running[self.template.containers[0]["name"]]
        return await running.execute(command, timeout_s)

    def census(self) -> list[dict[str, Any]]:
        """Return the memory limit in bytes and the processes of each running container."""
        return [
            {
                "pod": self.identity.name,
                "namespace": self.template.namespace,
                "container": spec["name"],
                "limit_bytes": _memory_limit(spec),
                "processes": self._running[spec["name"]].processes(),
            }
            for spec in self.template.containers
            if spec["name"] in self._running
        ]

    def log(self, container: str | None = None) -> Path:
        return (
            self._node.logs / f"{self.identity.name}.{container or self.template.containers[0]['name']}.log"
        )

    async def run(self) -> None:
        """Live from creation to end. Raises PodFailed, CannotRun or NoSuchObject."""
        self.folder.mkdir(parents=True)
        async with AsyncExitStack() as cleanup:
            cleanup.push_async_callback(self._remove)
            await self._node.wires.attach(self.ip)
            cleanup.push_async_callback(self._node.wires.detach, self.ip)
            self._volumes.make()
            self._node.warm(self)
            self._report("made", ip=self.ip)
            for spec in self.template.init_containers:
                await self._run_once(spec)
            async with asyncio.TaskGroup() as group:
                for spec in self.template.containers:
                    group.create_task(self._keep(spec))
        self._report("gone")

    async def _remove(self) -> None:
        for running in self._running.values():
            await running.kill()
        await self._node.forget(self.folder)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def _run_once(self, spec: Manifest) -> None:
        running = await self._start(spec)
        status = await running.ended()
        if status != 0:
            output = log_tail(self.log(spec["name"]))
            raise PodFailed(f"{self.identity.name}/{spec['name']}: exit {status}: {output}")

    async def _keep(self, spec: Manifest) -> None:
        name = spec["name"]
        for attempt in itertools.count():
            running = await self._start(spec)
            kept = Kept(spec, running, self, self._node.count_probe, self._report)
            status = await kept.until_it_ends(self._ending)
            self.set_ready(name, ready=False)
            self._report("ended", container=name, status=status)
            if self.ending or self._is_done(status):
                self.exit_status = status
                return
            if await self._ends_in_back_off(attempt):
                return
            self.restarts += 1
            self._fruitless += 1
            if self._fruitless > _MOST_FRUITLESS:
                raise PodFailed(f"{self.identity.name}: it ends again and again: {log_tail(self.log(name))}")

    def _is_done(self, status: int) -> bool:
        policy = self.template.spec.get("restartPolicy", "Always")
        return policy == "Never" or (policy == "OnFailure" and status == 0)

    async def _ends_in_back_off(self, attempt: int) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)]):
                await self._ending.wait()
        return self.ending

    async def _start(self, spec: Manifest) -> Container:
        image = self._node.registry.image(spec["image"])
        environment = environment_of(spec, self.facts, self._objects, image.stage.env)
        number = next(self._starts)
        launch = Launch(
            f"{self.identity.name}.{spec['name']}.{self.facts.uid[:8]}.{number}",
            image,
            command_of(spec, image.stage.entrypoint, image.stage.cmd, environment),
            environment,
            spec.get("workingDir") or image.stage.workdir,
            [*self._volumes.mounts(spec), *self._own_files()],
            security_of(self.template.spec, spec, image),
            self.folder / "containers" / f"{spec['name']}.{number}",
            self.log(spec["name"]),
            self.ip,
            self.identity.name,
        )
        launch.folder.mkdir(parents=True)
        running = await self._node.start(launch)
        self._running[spec["name"]] = running
        self._report("started", container=spec["name"])
        return running

    def _own_files(self) -> list[Mount]:
        return self._node.own_files(self.folder, self.facts, self.template.spec)

    def mounts_of(self, spec: Manifest) -> list[Mount]:
        return self._volumes.mounts(spec)


def _memory_limit(spec: Manifest) -> float | None:
    limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
    return None if limit is None else amount(limit)
