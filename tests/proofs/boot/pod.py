"""A pod from its making to its end, as the kubelet has it.

Its containers are started, asked by their probes, started again where they end or hang, and told to end:
preStop, SIGTERM, and SIGKILL once the grace is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galley.stack.part import log_tail
from tests.deploy.render import Manifest
from tests.proofs.boot.environment import PodFacts, command_of, environment_of
from tests.proofs.boot.kept import Kept, Tell
from tests.proofs.boot.launch import Container, Launch, security_of
from tests.proofs.boot.names import Served
from tests.proofs.boot.node import Node
from tests.proofs.boot.objects import Objects, PodTemplate
from tests.proofs.boot.policies import Endpoint
from tests.proofs.boot.quantities import amount
from tests.proofs.boot.volumes import Mount, Volumes

# What the kubelet waits before it starts again what ended: at once, then longer and longer.
_BACK_OFF_S = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)


# Starts after which it was never ready; a kubelet would go on for ever.
_MOST_FRUITLESS = 2


class PodFailed(Exception):
    """An init container, or one that must not be started again, ended badly."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a pod is called. `subdomain` is the Service that gives it a name of its own.

    `group` names those that live and die together.
    """

    name: str
    owner: str
    subdomain: str = ""
    group: str = ""


class Pod:
    """One pod; `run` is its life."""

    def __init__(
        self, node: Node, objects: Objects, template: PodTemplate, identity: Identity, tell: Tell
    ) -> None:
        self.identity, self.template = identity, template
        self._node, self._objects, self._tell = node, objects, tell
        self.ip = node.next_ip()
        self.folder = node.folder / "pods" / f"{identity.name}.{uuid.uuid4().hex[:6]}"
        self.facts = PodFacts(
            identity.name,
            template.namespace,
            str(uuid.uuid4()),
            self.ip,
            node.host_ip,
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
    def ready(self) -> bool:
        """All containers are, and it is not told to end."""
        return not self._ending.is_set() and all(self._ready.values())

    @property
    def ending(self) -> bool:
        """It was told to end."""
        return self._ending.is_set()

    @property
    def end(self) -> Endpoint:
        """As policies see it."""
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
        """As Services see it."""
        return Served(self.end, self.ready, self.identity.name, self.identity.subdomain)

    def set_ready(self, name: str, *, ready: bool, problem: str = "") -> None:
        """What the probes of one container tell."""
        if self._ready[name] != ready:
            self._ready[name] = ready
            self._fruitless = 0 if ready else self._fruitless
            self._tell("ready" if ready else "unready", container=name, problem=problem)

    def terminate(self) -> None:
        """Tell it to end; `run` returns when it has."""
        if not self._ending.is_set():
            self._ending.set()
            self._tell("ending")

    def send(self, number: signal.Signals) -> None:
        """A signal from outside to the first process of its first container: a fault."""
        self._tell("fault", signal=number.name)
        self._running[self.template.containers[0]["name"]].send(number)

    async def execute(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Run a command in its first container: exit status and output."""
        running = self._running[self.template.containers[0]["name"]]
        return await running.execute(command, timeout_s)

    def census(self) -> list[dict[str, Any]]:
        """Of each container that runs: its memory limit in bytes, if it has one, and its processes."""
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
        """Where a container's output goes."""
        return (
            self._node.logs / f"{self.identity.name}.{container or self.template.containers[0]['name']}.log"
        )

    async def run(self) -> None:
        """From its making to its end. Raises PodFailed, CannotRun or NoSuchObject."""
        self.folder.mkdir(parents=True)
        async with AsyncExitStack() as cleanup:
            cleanup.push_async_callback(self._remove)
            await self._node.attach(self.ip)
            cleanup.push_async_callback(self._node.detach, self.ip)
            self._volumes.make()
            self._node.warm(self)
            self._tell("made", ip=self.ip)
            for spec in self.template.init_containers:
                await self._run_once(spec)
            async with asyncio.TaskGroup() as group:
                for spec in self.template.containers:
                    group.create_task(self._keep(spec))
        self._tell("gone")

    async def _remove(self) -> None:
        for running in self._running.values():
            await running.kill()
        await self._node.forget(self.folder)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def _run_once(self, spec: Manifest) -> None:
        running = await self._start(spec)
        status = await running.ended()
        if status != 0:
            said = log_tail(self.log(spec["name"]))
            raise PodFailed(f"{self.identity.name}/{spec['name']}: exit {status}: {said}")

    async def _keep(self, spec: Manifest) -> None:
        """One container, started again as often as need be."""
        name = spec["name"]
        for attempt in itertools.count():
            running = await self._start(spec)
            kept = Kept(spec, running, self, self._node.count_probe, self._tell)
            status = await kept.until_it_ends(self._ending)
            self.set_ready(name, ready=False)
            self._tell("ended", container=name, status=status)
            if self.ending or self.template.spec.get("restartPolicy", "Always") == "Never":
                self.exit_status = status
                return
            if await self._told_while_backing_off(attempt):
                return
            self.restarts += 1
            self._fruitless += 1
            if self._fruitless > _MOST_FRUITLESS:
                raise PodFailed(f"{self.identity.name}: it ends again and again: {log_tail(self.log(name))}")

    async def _told_while_backing_off(self, attempt: int) -> bool:
        """Wait before the next start; True if it was told to end meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)]):
                await self._ending.wait()
        return self.ending

    async def _start(self, spec: Manifest) -> Container:
        image = self._node.image(spec["image"])
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
        self._tell("started", container=spec["name"])
        return running

    def _own_files(self) -> list[Mount]:
        return self._node.own_files(self.folder, self.facts, self.template.spec)

    def mounts_of(self, spec: Manifest) -> list[Mount]:
        """What a container mounts, by path."""
        return self._volumes.mounts(spec)


def _memory_limit(spec: Manifest) -> float | None:
    limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
    return None if limit is None else amount(limit)
