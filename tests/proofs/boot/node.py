"""The machine that pods run on: namespaces, a packet filter and a container runtime.

Everything lies in the namespaces of this process, which must be its own (machine.py).
"""

from __future__ import annotations

import collections
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.deploy.render import Manifest
from tests.proofs.boot.commands import run
from tests.proofs.boot.crun import Crun
from tests.proofs.boot.environment import PodFacts
from tests.proofs.boot.images import Image, Registry
from tests.proofs.boot.launch import Container, Launch
from tests.proofs.boot.names import Service, resolv_conf
from tests.proofs.boot.policies import Endpoint, Policies
from tests.proofs.boot.ruleset import Traffic, VirtualAddress, ruleset
from tests.proofs.boot.volumes import Mount
from tests.proofs.boot.wires import DNS_IP, NODE_IP, Wires, pod_ips, service_ips

if TYPE_CHECKING:
    from tests.proofs.boot.pod import Pod

DNS = Endpoint("dns", DNS_IP, "kube-system", {"k8s-app": "kube-dns"}, {"dns": 53, "dns-tcp": 53})
"""The cluster's name server, as a policy's selectors find it everywhere."""
_KERNELS = "galley/kernels"


class Node:
    """One machine with its images, disks, network and probes."""

    host_ip = NODE_IP

    def __init__(self, folder: Path, registry: Registry, kernels: Path | None) -> None:
        """`kernels` is the folder of compiled kernels that pods start with; None: their caches are empty."""
        self.folder, self._registry, self._kernels = folder, registry, kernels
        # Logs outlast the node: they are what is looked at when something went wrong.
        self.claims, self.logs = folder / "claims", folder.parent / "logs"
        self.probes: collections.Counter[str] = collections.Counter()
        self._wires = Wires()
        self._crun = Crun(folder / "crun")
        self._pod_ips, self._service_ips = pod_ips(), service_ips()
        self._spaces: dict[str, Path] = {}

    async def open(self) -> None:
        """Create the folders and the network."""
        for path in (self.claims, self.logs):
            path.mkdir(parents=True, exist_ok=True)
        await self._wires.open()

    def next_ip(self) -> str:
        """Return an unused address for a pod."""
        return next(self._pod_ips)

    def service_ip(self) -> str:
        """Return an unused address for a Service."""
        return next(self._service_ips)

    async def attach(self, ip: str) -> None:
        """Create the network namespace of a pod."""
        self._spaces[ip] = await self._wires.attach(ip)

    async def detach(self, ip: str) -> None:
        """Delete the network namespace of a pod."""
        del self._spaces[ip]
        await self._wires.detach(ip)

    def empty(self, path: Path, limit: float | None) -> None:
        """Create an emptyDir; `limit` is its size in bytes."""
        path.mkdir(parents=True)
        if limit is not None:
            size = f"size={int(limit)}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"{size},mode=777", "tmpfs", str(path)], check=True)

    async def forget(self, folder: Path) -> None:
        """Unmount everything below a pod's folder."""
        mounted = (await run("cat", "/proc/self/mounts")).splitlines()
        for path in sorted((line.split()[1] for line in mounted), reverse=True):
            if Path(path).is_relative_to(folder):
                await run("umount", "--lazy", path)

    def own_files(self, folder: Path, facts: PodFacts, spec: Manifest) -> list[Mount]:
        """Write the files that the kubelet mounts into every container of a pod."""
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
        """Start a container."""
        return await self._crun.start(launch, self._spaces[launch.ip])

    async def serve(
        self,
        known: Sequence[Endpoint],
        policies: Policies,
        services: Sequence[Service],
        addresses: Sequence[VirtualAddress],
    ) -> None:
        """Apply the endpoints, policies and Services to the packet filter."""
        await self._wires.filter(ruleset([DNS, *known], policies, addresses))

    async def traffic(self) -> Traffic:
        """Return the connections that the filter has counted."""
        return await self._wires.traffic()

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
