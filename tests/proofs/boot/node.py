"""The machine that pods run on: namespaces, a packet filter and a container runtime.

Everything lies in the namespaces of this process, which must be its own (sandbox.py).
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
from tests.proofs.boot.containers import Container, Crun, Launch
from tests.proofs.boot.environment import PodFacts
from tests.proofs.boot.images import Registry
from tests.proofs.boot.names import resolv_conf
from tests.proofs.boot.network import IPV4, Family, VirtualAddress, Wires, ruleset
from tests.proofs.boot.policies import Endpoint, Policies
from tests.proofs.boot.sandbox import run
from tests.proofs.boot.volumes import Mount

if TYPE_CHECKING:
    from tests.proofs.boot.pod import Pod

_KERNELS = "galley/kernels"


class Node:
    def __init__(self, folder: Path, registry: Registry, kernels: Path | None, family: Family = IPV4) -> None:
        """`kernels` is the folder of compiled kernels that pods start with; None: their caches are empty."""
        self.folder, self.registry, self._kernels = folder, registry, kernels
        # Logs outlast the node: they are what is looked at when something went wrong.
        self.claims, self.logs = folder / "claims", folder.parent / "logs"
        self.probes: collections.Counter[str] = collections.Counter()
        self.family, self.wires = family, Wires(family)
        # The cluster's name server, as a policy's selectors find it everywhere.
        ports = {"dns": 53, "dns-tcp": 53}
        self.dns = Endpoint("dns", family.dns_ip, "kube-system", {"k8s-app": "kube-dns"}, ports)
        self._crun = Crun(folder / "crun")
        self.pod_ips, self.service_ips = family.pod_ips(), family.service_ips()

    async def open(self) -> None:
        for path in (self.claims, self.logs):
            path.mkdir(parents=True, exist_ok=True)
        await self.wires.open()

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
        aliases = [(alias["ip"], *alias["hostnames"]) for alias in spec.get("hostAliases") or ()]
        hosts = [("127.0.0.1", "localhost"), ("::1", "localhost"), (facts.ip, facts.name), *aliases]
        files = {
            "hosts": "".join("\t".join(line) + "\n" for line in hosts),
            "hostname": f"{facts.name}\n",
            "resolv.conf": resolv_conf(self.dns.ip, facts.namespace, spec.get("dnsConfig")),
        }
        place = folder / "etc"
        place.mkdir(exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text)
        return [Mount(place / name, f"/etc/{name}", read_only=False) for name in files]

    async def start(self, launch: Launch) -> Container:
        return await self._crun.start(launch, self.wires.spaces[launch.ip])

    async def serve(
        self, known: Sequence[Endpoint], policies: Policies, addresses: Sequence[VirtualAddress]
    ) -> None:
        await self.wires.filter(ruleset([self.dns, *known], policies, addresses, self.family))

    def count_probe(self, kind: str, *, passed: bool) -> None:
        self.probes[f"{kind} {'passed' if passed else 'failed'}"] += 1

    def warm(self, pod: Pod) -> None:
        """Copy this machine's compiled kernels to the pod's kernel cache."""
        if self._kernels is not None and self._kernels.is_dir():
            for place, volume in self._places_of_kernels(pod):
                if not place.exists():
                    shutil.copytree(self._kernels, place)
                    _share(place, volume, pod.user)

    def keep_kernels(self, pod: Pod) -> None:
        """Keep the kernels that a pod has compiled for the next ones."""
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
        for spec in pod.template.containers:
            cache = self.registry.image(spec["image"]).stage.env.get("XDG_CACHE_HOME")
            for mount in pod.mounts_of(spec):
                if cache and not mount.read_only and Path(cache).is_relative_to(mount.destination):
                    place = mount.source / Path(cache).relative_to(mount.destination) / _KERNELS
                    yield place, mount.source


def _share(place: Path, volume: Path, user: int) -> None:
    """Let the pod write in the folders above its kernels, and give it those, which must be its own."""
    is_root = os.geteuid() == 0
    group = volume.stat().st_gid if is_root else -1
    for path in _between(place.parent, volume):
        os.chown(path, -1, group)
        path.chmod(0o775)
    for path in [place, *place.rglob("*")]:
        os.chown(path, user if is_root else -1, group)
        path.chmod(0o700 if path.is_dir() else 0o600)


def _between(place: Path, above: Path) -> Iterator[Path]:
    while place != above:
        yield place
        place = place.parent
