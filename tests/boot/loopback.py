"""A node without namespaces: the same pods as processes of this user, each at a loopback address of its own.

What a namespace would have given is put into what the process is told: paths of volumes and images are
replaced by where they lie here, names of Services by the address of a relay that balances as a Service does,
and 0.0.0.0 by the pod's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from galley.stack import guard
from tests.boot.commands import output_of
from tests.boot.environment import PodFacts
from tests.boot.images import Registry
from tests.boot.launch import Launch
from tests.boot.names import DOMAIN, Service
from tests.boot.node import Node
from tests.boot.policies import Endpoint, Policies
from tests.boot.ruleset import Traffic, VirtualAddress
from tests.boot.volumes import Mount
from tests.deploy.render import Manifest

_ANY = "0.0.0.0"  # what pods listen on, replaced
_READ_BYTES = 65536


class LoopbackNode(Node):
    """Policies, read-only roots and other users are not to be had here."""

    isolated = False

    def __init__(self, folder: Path, registry: Registry, kernels: Path | None) -> None:
        super().__init__(folder, registry, kernels)
        # Runs beside one another on one machine draw different ones.
        self._block = f"127.{random.SystemRandom().randrange(16, 250)}"
        self.host_ip = f"{self._block}.0.1"
        self._pod_ips, self._service_ips = itertools.count(2), itertools.count(1)
        self._services: dict[str, str] = {}
        self._relays: dict[tuple[str, int], _Relay] = {}

    def next_ip(self) -> str:
        number = next(self._pod_ips)
        return f"{self._block}.{number // 250 + 1}.{number % 250 + 1}"

    def service_ip(self) -> str:
        return f"{self._block}.0.{next(self._service_ips) + 1}"

    async def attach(self, ip: str) -> None:
        """Every address of 127/8 is there."""

    async def detach(self, ip: str) -> None:
        """Nor is it taken away."""

    def empty(self, path: Path, limit: float | None) -> None:
        path.mkdir(parents=True)

    async def forget(self, folder: Path) -> None:
        """Nothing was mounted."""

    def own_files(self, folder: Path, facts: PodFacts, spec: Manifest) -> list[Mount]:
        return []

    async def start(self, launch: Launch) -> _Process:
        told = Told(launch, self._services)
        folder = launch.folder / "work"
        folder.mkdir(parents=True)
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "0"]
        with launch.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(*guarded, *told.command(launch.command)),
                env=told.environment(),
                cwd=folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return _Process(process, told)

    async def serve(
        self,
        known: Sequence[Endpoint],
        policies: Policies,
        services: Sequence[Service],
        addresses: Sequence[VirtualAddress],
    ) -> None:
        wanted = {(address.ip, address.port): address for address in addresses}
        self._services = {service.host: service.ip for service in services}
        for key, address in wanted.items():
            if key not in self._relays:
                self._relays[key] = _Relay()
                await self._relays[key].open(address)
            self._relays[key].backends = address.backends

    async def traffic(self) -> Traffic:
        return Traffic(frozenset(), frozenset(), {})

    async def close(self) -> None:
        for relay in self._relays.values():
            relay.close()


class Told:
    """What a container is told, with this machine's paths and addresses in it."""

    def __init__(self, launch: Launch, services: Mapping[str, str]) -> None:
        self._launch = launch
        places = {
            path: str(source) for path, source in launch.image.binds.items() if path.startswith("/models")
        }
        places |= {mount.destination: str(mount.source) for mount in launch.mounts}
        rules = {
            rf"(?<![\w./-]){re.escape(path)}(?![\w.-])": places[path] for path in sorted(places, reverse=True)
        }
        for host, ip in services.items():
            name, namespace = host.split(".")[:2]
            forms = rf"{name}(?:\.{namespace}(?:\.svc(?:\.{re.escape(DOMAIN)})?)?)?"
            rules[rf"(?<![\w.-]){forms}(?=:\d)"] = ip
        rules[re.escape(_ANY)] = launch.ip
        # In one go: what one rule has put in is no matter of another. Longer paths come first.
        self._replacements = list(rules.values())
        self._pattern = re.compile("|".join(f"({rule})" for rule in rules))

    def text(self, text: str) -> str:
        """A value or an argument."""
        return self._pattern.sub(lambda found: self._replacements[(found.lastindex or 1) - 1], text)

    def environment(self) -> dict[str, str]:
        """Its variables, and where this machine has its programs."""
        given = {name: self.text(value) for name, value in self._launch.environment.items()}
        return {**given, "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}

    def command(self, command: Sequence[str]) -> list[str]:
        """A command, with this machine's programs."""
        program = self._launch.image.programs.get(command[0], command[0])
        words = [program, *map(self.text, command[1:])]
        if command[0] == "valkey-server":
            words += ["--bind", self._launch.ip]
        elif command[0] == "valkey-cli":
            words[1:1] = ["-h", self._launch.ip]
        return words


class _Process:
    """See launch.Container."""

    def __init__(self, process: asyncio.subprocess.Process, told: Told) -> None:
        self._process, self._told = process, told

    async def ended(self) -> int:
        status = await self._process.wait()
        return status if status >= 0 else 128 - status

    def send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            os.kill(self._process.pid, number)

    async def execute(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        return await output_of(*self._told.command(command), timeout_s=timeout_s)

    def processes(self) -> list[dict[str, Any]]:
        return []

    async def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class _Relay:
    """A Service's port: passes each connection to one of its backends."""

    def __init__(self) -> None:
        self.backends: tuple[tuple[str, int], ...] = ()
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()

    async def open(self, address: VirtualAddress) -> None:
        self._server = await asyncio.start_server(self._accept, address.ip, address.port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._passing:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._passing.add(task)
            task.add_done_callback(self._passing.discard)
        with contextlib.suppress(OSError, IndexError, asyncio.CancelledError):
            there, back = await asyncio.open_connection(*random.choice(self.backends))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_copy(reader, back))
                    group.create_task(_copy(there, writer))
            finally:
                back.close()
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()
    writer.close()
