"""Containers run by crun, a real OCI runtime, in the node's own namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.deploy.render import Manifest
from tests.proofs.boot.images import Image
from tests.proofs.boot.sandbox import output_of
from tests.proofs.boot.volumes import Mount


class CannotRun(Exception):
    """A container that the kubelet would refuse to start, and why."""


@dataclass(frozen=True, slots=True)
class Security:
    user: int
    group: int
    groups: tuple[int, ...]
    read_only_root: bool
    no_new_privileges: bool
    capabilities: tuple[str, ...]
    seccomp: bool


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    image: Image
    command: Sequence[str]
    environment: Mapping[str, str]
    workdir: str
    mounts: Sequence[Mount]
    security: Security
    folder: Path
    log: Path
    ip: str
    hostname: str


# The default capabilities of container runtimes.
_DEFAULT = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP"),
    *("SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
)


def security_of(pod: Manifest, container: Manifest, image: Image) -> Security:
    """Merge the two contexts over the image's user. Raises CannotRun."""
    above, own = pod.get("securityContext") or {}, container.get("securityContext") or {}
    own_user, own_group = image.stage.ids()
    context = {**above, **own}
    user = int(context.get("runAsUser", own_user))
    # A user that the image does not know is in the group root.
    group = int(context.get("runAsGroup", own_group if user == own_user else 0))
    if context.get("runAsNonRoot") and user == 0:
        raise CannotRun(f"{container['name']}: runAsNonRoot, and the image's user is root")
    capabilities = own.get("capabilities") or {}
    dropped = set(capabilities.get("drop") or ())
    kept = set() if "ALL" in dropped else set(_DEFAULT) - dropped
    kept |= set(capabilities.get("add") or ())
    shared = [above["fsGroup"]] if "fsGroup" in above else []
    return Security(
        user,
        group,
        (*shared, *(above.get("supplementalGroups") or ())),
        bool(own.get("readOnlyRootFilesystem")),
        own.get("allowPrivilegeEscalation") is False,
        tuple(sorted(f"CAP_{name.removeprefix('CAP_')}" for name in kept)),
        (context.get("seccompProfile") or {}).get("type") == "RuntimeDefault",
    )


_PROC = Path("/proc")
_KIB = 1024


def processes_beside(first: int) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        space = _space(_PROC / str(first))
        for process in _PROC.iterdir():
            with suppress(OSError):
                if process.name.isdecimal() and _space(process) == space:
                    yield _process_facts(process)


def _space(process: Path) -> Path:
    return (process / "ns" / "pid").readlink()


def _process_facts(process: Path) -> dict[str, Any]:
    lines = (process / "status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return {
        "users": sorted({int(user) for user in status["Uid"]}),
        "capabilities": int(status["CapEff"][0], 16) | int(status["CapPrm"][0], 16),
        "gains_no_privileges": status["NoNewPrivs"] == ["1"],
        "filtered": status["Seccomp"] == ["2"],
        "reads_its_root_alone": bool(os.statvfs(process / "root").f_flag & os.ST_RDONLY),
        "peak_bytes": int(status["VmHWM"][0]) * _KIB if "VmHWM" in status else 0,
    }


# Debian's golang-github-containers-common; what podman and CRI-O mean by RuntimeDefault.
SECCOMP = Path("/usr/share/containers/seccomp.json")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@cache
def _default_config() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["crun", "spec"], cwd=folder, check=True)
        config: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    return config


def bundle(launch: Launch, netns: Path) -> Path:
    root = launch.folder / "root"
    root.mkdir(parents=True)
    launch.image.unpack(root)
    (root / launch.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (launch.folder / "config.json").write_text(json.dumps(config(launch, root, netns)))
    return launch.folder


def config(launch: Launch, root: Path, netns: Path) -> dict[str, Any]:
    default, security = _default_config(), launch.security
    kinds = ("bounding", "permitted", "effective")
    capabilities = dict.fromkeys(kinds, security.capabilities)
    if security.user != 0:
        # The kernel clears them when a process becomes another user.
        capabilities = {"bounding": security.capabilities}
    linux: dict[str, Any] = {
        "namespaces": [
            *({"type": kind} for kind in ("pid", "ipc", "uts", "mount")),
            {"type": "network", "path": str(netns)},
        ],
        **{paths: default["linux"][paths] for paths in ("maskedPaths", "readonlyPaths")},
    }
    if security.seccomp and SECCOMP.exists():
        linux["seccomp"] = seccomp()
    return {
        "ociVersion": default["ociVersion"],
        "process": {
            "user": {
                "uid": security.user,
                "gid": security.group,
                "additionalGids": list(security.groups),
                "umask": 0o022,
            },
            "args": list(launch.command),
            "env": [f"{name}={value}" for name, value in launch.environment.items()],
            "cwd": launch.workdir,
            "capabilities": capabilities,
            "noNewPrivileges": security.no_new_privileges,
        },
        "root": {"path": str(root), "readonly": security.read_only_root},
        "hostname": launch.hostname,
        # Without control groups, which the node's namespaces do not have.
        "mounts": [*(one for one in default["mounts"] if one["type"] != "cgroup"), *_mounts(launch)],
        "linux": linux,
    }


def _mounts(launch: Launch) -> list[dict[str, Any]]:
    """Return the image's binds and the volumes, nested ones after those that contain them."""
    result = {path: _bind(path, source, read_only=True) for path, source in launch.image.binds.items()}
    result |= {
        mount.destination: _bind(mount.destination, mount.source, read_only=mount.read_only)
        for mount in launch.mounts
    }
    return [result[path] for path in sorted(result, key=lambda path: Path(path).parts)]


def _bind(path: str, source: Path, *, read_only: bool) -> dict[str, Any]:
    options = ["rbind", "nosuid", "nodev", "ro" if read_only else "rw"]
    return {"destination": path, "type": "bind", "source": str(source), "options": options}


@cache
def seccomp() -> dict[str, Any]:
    """Return the profile's rules for this machine and for a process without capabilities."""
    profile = json.loads(SECCOMP.read_text())
    here = _ARCHITECTURES.get(platform.machine(), platform.machine())

    def applies(rule: dict[str, Any]) -> bool:
        included, excluded = rule.get("includes") or {}, rule.get("excludes") or {}
        return (
            here in included.get("arches", [here])
            and here not in excluded.get("arches", [])
            and not included.get("caps")
            and not included.get("minKernel")
        )

    rules = [
        {
            "names": rule["names"],
            "action": rule["action"],
            "args": rule.get("args") or [],
            **({"errnoRet": rule["errnoRet"]} if "errnoRet" in rule else {}),
        }
        for rule in profile["syscalls"]
        if applies(rule)
    ]
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile.get("defaultErrnoRet", 1),
        "architectures": [f"SCMP_ARCH_{platform.machine().upper()}"],
        "syscalls": rules,
    }


_POLL_S = 0.005


class Crun:
    def __init__(self, state: Path) -> None:
        self._state = state
        # Limits of memory and cpu are not set: groups would be made outside of the node's namespaces.
        self._command = ("crun", "--root", str(state), "--cgroup-manager", "disabled")

    async def start(self, launch: Launch, netns: Path) -> Container:
        folder = await asyncio.to_thread(bundle, launch, netns)
        pid_file = folder / "pid"
        with launch.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(*self._command, "run", "--bundle", str(folder), "--pid-file", str(pid_file), launch.name),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        started = (pid_file, self._state / launch.name / "status")
        while process.returncode is None and not all(path.exists() for path in started):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return Container(launch.name, process, pid_file, self._command)


class Container:
    def __init__(
        self, name: str, process: asyncio.subprocess.Process, pid_file: Path, command: Sequence[str]
    ) -> None:
        self._name, self._process, self._pid_file, self._command = name, process, pid_file, command

    async def ended(self) -> int:
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        if self._process.returncode is None and self._pid_file.exists():
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(self._pid_file.read_text()), number)

    async def execute(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        return await output_of(*self._command, "exec", self._name, *command, timeout_s=timeout_s)

    def processes(self) -> list[dict[str, Any]]:
        there = self._process.returncode is None and self._pid_file.exists()
        return list(processes_beside(int(self._pid_file.read_text()))) if there else []

    async def kill(self) -> None:
        while self._process.returncode is None:
            self.send(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                # It may not have come so far that there is something to kill.
                await asyncio.wait_for(self._process.wait(), _POLL_S)
