"""One start of one container, as the kubelet keeps it: asked by its probes, and ended in good order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.deploy.render import Manifest
from tests.proofs.boot.launch import Container
from tests.proofs.boot.probes import Probe, act, problem_of

if TYPE_CHECKING:
    from tests.proofs.boot.pod import Pod

# What is left for SIGTERM where preStop took the whole grace.
_LEAST_GRACE_S = 2.0

Tell = Callable[..., None]
"""`tell(what, **details)`: something happened to the pod."""
Count = Callable[..., None]
"""`count(probe, passed=)`: a probe was answered."""


class Kept:
    """From its start to its end."""

    def __init__(self, spec: Manifest, running: Container, pod: Pod, count: Count, tell: Tell) -> None:
        self._spec, self._name, self._running, self._pod = spec, spec["name"], running, pod
        self._count, self._tell = count, tell
        self._ports = pod.end.ports or {}

    async def until_it_ends(self, told_to_end: asyncio.Event) -> int:
        """Watch it until it has ended, by itself or because it was told; its exit status."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            stopping = group.create_task(self._stop_when(told_to_end))
            status = await self._running.ended()
            watching.cancel()
            if not told_to_end.is_set():
                stopping.cancel()
        return status

    async def _watch(self) -> None:
        startup = self._probe("startupProbe")
        if startup is not None:
            problem = await self._ask_until("startup", startup, passes=True)
            if problem is not None:
                await self._give_up("startup", startup, problem)
                return
        self._tell("up", container=self._name)
        readiness, liveness = self._probe("readinessProbe"), self._probe("livenessProbe")
        async with asyncio.TaskGroup() as group:
            if readiness is None:
                self._pod.set_ready(self._name, ready=True)
            else:
                group.create_task(self._watch_readiness(readiness))
            if liveness is not None:
                group.create_task(self._watch_liveness(liveness))

    def _probe(self, kind: str) -> Probe | None:
        return Probe(self._spec[kind]) if kind in self._spec else None

    async def _watch_readiness(self, probe: Probe) -> None:
        await asyncio.sleep(probe.delay_s)
        while True:
            await self._ask_until("readiness", probe, passes=True, for_ever=True)
            self._pod.set_ready(self._name, ready=True)
            problem = await self._ask_until("readiness", probe, passes=False)
            self._pod.set_ready(self._name, ready=False, problem=problem or "")

    async def _watch_liveness(self, probe: Probe) -> None:
        await asyncio.sleep(probe.delay_s)
        problem = await self._ask_until("liveness", probe, passes=False)
        await self._give_up("liveness", probe, problem or "")

    async def _give_up(self, kind: str, probe: Probe, problem: str) -> None:
        if not self._pod.ending:
            self._tell("failed", probe=kind, container=self._name, problem=problem)
            await self._stop(probe.grace_s)

    async def _ask_until(
        self, kind: str, probe: Probe, *, passes: bool, for_ever: bool = False
    ) -> str | None:
        """Ask until it has passed, or failed, as often in a row as it must.

        The problem that it failed with; None where it passed. A pod that ends is asked nothing but readiness.
        """
        passed = failed = 0
        while kind == "readiness" or not self._pod.ending:
            asked = time.monotonic()
            problem = await problem_of(probe, self._pod.ip, self._ports, self._running)
            passed, failed = (passed + 1, 0) if problem is None else (0, failed + 1)
            self._count(kind, passed=problem is None)
            if passes and passed >= probe.successes:
                return None
            if not for_ever and failed >= probe.failures:
                return problem
            await asyncio.sleep(max(0.0, asked + probe.period_s - time.monotonic()))
        return None

    async def _stop_when(self, told_to_end: asyncio.Event) -> None:
        await told_to_end.wait()
        await self._stop(None)

    async def _stop(self, grace_s: float | None) -> None:
        """preStop, SIGTERM, and SIGKILL once the grace (the pod's, if None) is over."""
        grace_s = self._pod.template.grace_s if grace_s is None else grace_s
        began = time.monotonic()
        hook = (self._spec.get("lifecycle") or {}).get("preStop")
        if hook is not None:
            problem = await self._pre_stop(hook, grace_s)
            self._tell("preStop", container=self._name, seconds=_since(began), problem=problem or "")
        self._running.send(signal.SIGTERM)
        self._tell("SIGTERM", container=self._name)
        try:
            async with asyncio.timeout(max(_LEAST_GRACE_S, grace_s - (time.monotonic() - began))):
                await self._running.ended()
        except TimeoutError:
            self._tell("SIGKILL", container=self._name, seconds=_since(began))
            await self._running.kill()

    async def _pre_stop(self, hook: Manifest, grace_s: float) -> str | None:
        try:
            async with asyncio.timeout(grace_s):
                return await act(hook, self._pod.ip, self._ports, self._running, grace_s)
        except TimeoutError:
            return f"no end within {grace_s:g} s"


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)
