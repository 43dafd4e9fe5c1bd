"""The machine that pods run on: what kinds of it share.

`SandboxNode` has namespaces, a packet filter and a container runtime; `LoopbackNode` (loopback.py) is for
machines that allow none of them.
"""

from __future__ import annotations

import abc
import collections
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.boot.commands import run
from tests.boot.crun import Crun
from tests.boot.environment import PodFacts
from tests.boot.images import Image, Registry
from tests.boot.launch import Container, Launch
from tests.boot.names import DOMAIN, Service, resolv_conf
from tests.boot.policies import Endpoint, Policies
from tests.boot.ruleset import Traffic, VirtualAddress, ruleset
from tests.boot.volumes import Mount
from tests.boot.wires import DNS_IP, NODE_IP, Wires, pod_ips, service_ips
from tests.deploy.render import Manifest

if TYPE_CHECKING:
    from tests.boot.pod import Pod

DNS = Endpoint("dns", DNS_IP, "kube-system", {"k8s-app": "kube-dns"}, {"dns": 53, "dns-tcp": 53})
"""The cluster's name server, as a policy's selectors find it everywhere."""
_KERNELS = "galley/kernels"


class Node(abc.ABC):
    """One machine with its images, disks and probes."""

    host_ip: str
    isolated: bool
    """Whether pods have namespaces of their own."""

    def __init__(self, folder: Path, registry: Registry, kernels: Path | None) -> None:
        """`kernels` is where this machine keeps compiled ones, for pods to find; None: they find none."""
        self.folder, self._registry, self._kernels = folder, registry, kernels
        # Logs outlast the node: they are what is looked at when something went wrong.
        self.claims, self.logs = folder / "claims", folder.parent / "logs"
        self.probes: collections.Counter[str] = collections.Counter()

    async def open(self) -> None:
        """Make ready for pods."""
        for path in (self.claims, self.logs):
            path.mkdir(parents=True, exist_ok=True)

    @abc.abstractmethod
    def next_ip(self) -> str:
        """An address for a pod."""

    @abc.abstractmethod
    def service_ip(self) -> str:
        """An address for a Service."""

    @abc.abstractmethod
    async def attach(self, ip: str) -> None:
        """Make a pod's network."""

    @abc.abstractmethod
    async def detach(self, ip: str) -> None:
        """Take it away."""

    @abc.abstractmethod
    def empty(self, path: Path, limit: float | None) -> None:
        """Make an emptyDir that holds `limit` bytes."""

    @abc.abstractmethod
    async def forget(self, folder: Path) -> None:
        """Let go of what was made beneath a pod's folder."""

    @abc.abstractmethod
    def own_files(self, folder: Path, facts: PodFacts, spec: Manifest) -> list[Mount]:
        """What the kubelet mounts into every container of a pod."""

    @abc.abstractmethod
    async def start(self, launch: Launch) -> Container:
        """Start a container."""

    @abc.abstractmethod
    async def serve(
        self,
        known: Sequence[Endpoint],
        policies: Policies,
        services: Sequence[Service],
        addresses: Sequence[VirtualAddress],
    ) -> None:
        """Have the network be as these say."""

    @abc.abstractmethod
    async def traffic(self) -> Traffic:
        """What the filter has seen."""

    async def close(self) -> None:  # noqa: B027  # most have nothing to do
        """Let go of what is not the pods'."""

    def image(self, reference: str) -> Image:
        """Raises UnknownImage."""
        return self._registry.image(reference)

    def count_probe(self, kind: str, *, passed: bool) -> None:
        """One answer of one probe."""
        self.probes[f"{kind} {'passed' if passed else 'failed'}"] += 1

    def warm(self, pod: Pod) -> None:
        """Put what this machine has compiled where the pod's image keeps its own."""
        if self._kernels is not None and self._kernels.is_dir():
            for place, volume in self._places_of_kernels(pod):
                if not place.exists():
                    shutil.copytree(self._kernels, place)
                    _share(place, volume)

    def keep_kernels(self, pod: Pod) -> None:
        """Take what a pod has compiled, for the next ones."""
        if self._kernels is None:
            return
        for place, _ in self._places_of_kernels(pod):
            for file in place.rglob("*"):
                kept = self._kernels / file.relative_to(place)
                if file.is_file() and not kept.exists():
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    scratch = kept.with_name(f"{kept.name}.{os.getpid()}")
                    shutil.copyfile(file, scratch)
                    scratch.rename(kept)

    def _places_of_kernels(self, pod: Pod) -> Iterator[tuple[Path, Path]]:
        """In which volumes, and in which folder of each, the containers keep them."""
        for spec in pod.template.containers:
            cache = self.image(spec["image"]).stage.env.get("XDG_CACHE_HOME")
            for mount in pod.mounts_of(spec):
                if cache and not mount.read_only and Path(cache).is_relative_to(mount.destination):
                    place = mount.source / Path(cache).relative_to(mount.destination) / _KERNELS
                    yield place, mount.source


def _share(place: Path, volume: Path) -> None:
    """As what lies in the volume itself is shared."""
    group = volume.stat().st_gid if os.geteuid() == 0 else -1
    for path in [*_between(place, volume), *place.rglob("*")]:
        os.chown(path, -1, group)
        path.chmod(0o777 if path.is_dir() else 0o666)


def _between(place: Path, above: Path) -> Iterator[Path]:
    while place != above:
        yield place
        place = place.parent


class SandboxNode(Node):
    """Everything lies in the namespaces of this process, which must be its own (machine.py)."""

    host_ip = NODE_IP
    isolated = True

    def __init__(self, folder: Path, registry: Registry, kernels: Path | None) -> None:
        super().__init__(folder, registry, kernels)
        self._wires = Wires()
        self._crun = Crun(folder / "crun")
        self._pod_ips, self._service_ips = pod_ips(), service_ips()
        self._spaces: dict[str, Path] = {}

    async def open(self) -> None:
        await super().open()
        await self._wires.open()

    def next_ip(self) -> str:
        return next(self._pod_ips)

    def service_ip(self) -> str:
        return next(self._service_ips)

    async def attach(self, ip: str) -> None:
        self._spaces[ip] = await self._wires.attach(ip)

    async def detach(self, ip: str) -> None:
        del self._spaces[ip]
        await self._wires.detach(ip)

    def empty(self, path: Path, limit: float | None) -> None:
        path.mkdir(parents=True)
        if limit is not None:
            size = f"size={int(limit)}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"{size},mode=777", "tmpfs", str(path)], check=True)

    async def forget(self, folder: Path) -> None:
        mounted = (await run("cat", "/proc/self/mounts")).splitlines()
        for path in sorted((line.split()[1] for line in mounted), reverse=True):
            if Path(path).is_relative_to(folder):
                await run("umount", "--lazy", path)

    def own_files(self, folder: Path, facts: PodFacts, spec: Manifest) -> list[Mount]:
        files = {
            "hosts": f"127.0.0.1\tlocalhost\n{facts.ip}\t{facts.name}\n",
            "hostname": f"{facts.name}\n",
            "resolv.conf": resolv_conf(DNS_IP, facts.namespace, spec.get("dnsConfig")),
        }
        place = folder / "etc"
        place.mkdir(exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text)
        return [Mount(place / name, f"/etc/{name}", read_only=False) for name in files]

    async def start(self, launch: Launch) -> Container:
        return await self._crun.start(launch, self._spaces[launch.ip])

    async def serve(
        self,
        known: Sequence[Endpoint],
        policies: Policies,
        services: Sequence[Service],
        addresses: Sequence[VirtualAddress],
    ) -> None:
        await self._wires.filter(ruleset([DNS, *known], policies, addresses))

    async def traffic(self) -> Traffic:
        return await self._wires.traffic()


__all__ = ["DNS", "DOMAIN", "Node", "SandboxNode"]
