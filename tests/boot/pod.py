"""A pod from its making to its end, as the kubelet has it.

Its containers are started, asked by their probes, started again where they end or hang, and told to end: preStop,
SIGTERM, and SIGKILL once the grace is over.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.boot.environment import PodFacts, command_of, environment_of
from tests.boot.launch import Container, Launch, security_of
from tests.boot.names import Served
from tests.boot.policies import Endpoint
from tests.boot.probes import Probe, act, problem_of
from tests.boot.volumes import Volumes

if TYPE_CHECKING:
    from pathlib import Path

    from tests.boot.node import Node
    from tests.boot.objects import Objects, PodTemplate
    from tests.deploy.render import Manifest

# What the kubelet waits before it starts again what ended: at once, then longer and longer.
_BACK_OFF_S = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)
# What is left for SIGTERM where preStop took the whole grace.
_LEAST_GRACE_S = 2.0

Tell = Callable[..., None]
"""`tell(what, **details)`: something happened to the pod."""


class PodFailed(Exception):
    """An init container, or one that must not be started again, ended badly."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a pod is called. `subdomain` is the Service that gives it a name of its own."""

    name: str
    owner: str
    subdomain: str = ""


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
        self.restarts = 0
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

    def refresh_files(self) -> None:
        """After a Secret or ConfigMap changed."""
        self._volumes.refresh()

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
            raise PodFailed(
                f"{self.identity.name}/{spec['name']}: exit {status}: {self._node.tail(self.log(spec['name']))}"
            )

    async def _keep(self, spec: Manifest) -> None:
        """One container, started again as often as need be."""
        name = spec["name"]
        for attempt in itertools.count():
            running = await self._start(spec)
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(spec, running))
                stopping = group.create_task(self._stop_when_told(spec, running))
                status = await running.ended()
                watching.cancel()
                if not self.ending:
                    stopping.cancel()
            self._set_ready(name, ready=False)
            self._tell("ended", container=name, status=status)
            if self.ending or self.template.spec.get("restartPolicy", "Always") == "Never":
                self.exit_status = status
                return
            await self._back_off(attempt)
            if self.ending:
                return
            self.restarts += 1

    async def _back_off(self, attempt: int) -> None:
        try:
            async with asyncio.timeout(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)]):
                await self._ending.wait()
        except TimeoutError:
            pass

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

    def _own_files(self) -> list[Any]:
        return self._node.own_files(self.folder, self.facts, self.template.spec)

    def mounts_of(self, spec: Manifest) -> list[Any]:
        """What a container mounts, by path."""
        return self._volumes.mounts(spec)

    # ------------------------------------------------------------------------------------- probes --

    async def _watch(self, spec: Manifest, running: Container) -> None:
        startup = _probe(spec, "startupProbe")
        if startup is not None:
            problem = await self._ask_until(spec, running, "startup", startup, passes=True)
            if problem is not None:
                await self._give_up(spec, running, "startup", startup, problem)
                return
        self._tell("up", container=spec["name"])
        readiness, liveness = _probe(spec, "readinessProbe"), _probe(spec, "livenessProbe")
        async with asyncio.TaskGroup() as group:
            if readiness is None:
                self._set_ready(spec["name"], ready=True)
            else:
                group.create_task(self._watch_readiness(spec, running, readiness))
            if liveness is not None:
                group.create_task(self._watch_liveness(spec, running, liveness))

    async def _watch_readiness(self, spec: Manifest, running: Container, probe: Probe) -> None:
        while True:
            await self._ask_until(spec, running, "readiness", probe, passes=True, for_ever=True)
            self._set_ready(spec["name"], ready=True)
            problem = await self._ask_until(spec, running, "readiness", probe, passes=False)
            self._set_ready(spec["name"], ready=False, problem=problem or "")

    async def _watch_liveness(self, spec: Manifest, running: Container, probe: Probe) -> None:
        problem = await self._ask_until(spec, running, "liveness", probe, passes=False)
        await self._give_up(spec, running, "liveness", probe, problem or "")

    async def _give_up(
        self, spec: Manifest, running: Container, kind: str, probe: Probe, problem: str
    ) -> None:
        if self.ending:
            return
        self._tell("failed", probe=kind, container=spec["name"], problem=problem)
        await self._stop(spec, running, probe.grace_s)

    async def _ask_until(
        self,
        spec: Manifest,
        running: Container,
        kind: str,
        probe: Probe,
        *,
        passes: bool,
        for_ever: bool = False,
    ) -> str | None:
        """Ask until it has passed, or failed, as often in a row as it must.

        The problem that it failed with; None where it passed. A pod that ends is asked nothing but readiness.
        """
        await asyncio.sleep(probe.delay_s)
        passed = failed = 0
        while True:
            if kind != "readiness" and self.ending:
                await asyncio.Event().wait()
            asked = time.monotonic()
            problem = await problem_of(probe, self.ip, self.end.ports or {}, running)
            passed, failed = (passed + 1, 0) if problem is None else (0, failed + 1)
            self._node.count_probe(kind, passed=problem is None)
            if passes and passed >= probe.successes:
                return None
            if not for_ever and failed >= probe.failures:
                return problem
            await asyncio.sleep(max(0.0, asked + probe.period_s - time.monotonic()))

    def _set_ready(self, name: str, *, ready: bool, problem: str = "") -> None:
        if self._ready[name] != ready:
            self._ready[name] = ready
            self._tell("ready" if ready else "unready", container=name, problem=problem)

    # ---------------------------------------------------------------------------------------- end --

    async def _stop_when_told(self, spec: Manifest, running: Container) -> None:
        await self._ending.wait()
        await self._stop(spec, running, None)

    async def _stop(self, spec: Manifest, running: Container, grace_s: float | None) -> None:
        grace_s = self.template.grace_s if grace_s is None else grace_s
        began = time.monotonic()
        hook = (spec.get("lifecycle") or {}).get("preStop")
        if hook is not None:
            problem = await self._pre_stop(hook, running, grace_s)
            self._tell("preStop", container=spec["name"], seconds=_since(began), problem=problem or "")
        running.send(signal.SIGTERM)
        self._tell("SIGTERM", container=spec["name"])
        try:
            async with asyncio.timeout(max(_LEAST_GRACE_S, grace_s - (time.monotonic() - began))):
                await running.ended()
        except TimeoutError:
            self._tell("SIGKILL", container=spec["name"], seconds=_since(began))
            await running.kill()

    async def _pre_stop(self, hook: Manifest, running: Container, grace_s: float) -> str | None:
        try:
            async with asyncio.timeout(grace_s):
                return await act(hook, self.ip, self.end.ports or {}, running, grace_s)
        except TimeoutError:
            return f"no end within {grace_s:g} s"


def _probe(spec: Manifest, kind: str) -> Probe | None:
    return Probe(spec[kind]) if kind in spec else None


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)
