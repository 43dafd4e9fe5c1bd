"""A container as the OCI runtime is told of it: what containerd and CRI-O write of a pod's spec."""

from __future__ import annotations

import json
import platform
from functools import cache
from pathlib import Path
from typing import Any

from tests.proofs.boot.launch import Launch

# Debian's golang-github-containers-common; what podman and CRI-O mean by RuntimeDefault.
SECCOMP = Path("/usr/share/containers/seccomp.json")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_UMASK = 0o022
_MOUNTS: tuple[dict[str, Any], ...] = (
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
    },
    {
        "destination": "/dev/pts",
        "type": "devpts",
        "source": "devpts",
        "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
    },
    {
        "destination": "/dev/shm",
        "type": "tmpfs",
        "source": "shm",
        "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
    },
    {
        "destination": "/sys",
        "type": "sysfs",
        "source": "sysfs",
        "options": ["nosuid", "noexec", "nodev", "ro"],
    },
)
_MASKED = [
    *("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"),
]
_READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]


def bundle(launch: Launch, netns: Path) -> Path:
    """Write the container's bundle (root file system and config.json) into its folder."""
    root = launch.folder / "root"
    root.mkdir(parents=True)
    launch.image.unpack(root)
    (root / launch.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (launch.folder / "config.json").write_text(json.dumps(config(launch, root, netns)))
    return launch.folder


def config(launch: Launch, root: Path, netns: Path) -> dict[str, Any]:
    """The runtime's configuration."""
    security = launch.security
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
        "maskedPaths": _MASKED,
        "readonlyPaths": _READ_ONLY,
    }
    if security.seccomp and SECCOMP.exists():
        linux["seccomp"] = seccomp()
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {
                "uid": security.user,
                "gid": security.group,
                "additionalGids": list(security.groups),
                "umask": _UMASK,
            },
            "args": list(launch.command),
            "env": [f"{name}={value}" for name, value in launch.environment.items()],
            "cwd": launch.workdir,
            "capabilities": capabilities,
            "noNewPrivileges": security.no_new_privileges,
        },
        "root": {"path": str(root), "readonly": security.read_only_root},
        "hostname": launch.hostname,
        "mounts": [*_MOUNTS, *_mounts(launch)],
        "linux": linux,
    }


def _mounts(launch: Launch) -> list[dict[str, Any]]:
    """What lies in the image, and the volumes; what is within another's place comes after it."""
    found = {path: _bind(path, source, read_only=True) for path, source in launch.image.binds.items()}
    found |= {
        mount.destination: _bind(mount.destination, mount.source, read_only=mount.read_only)
        for mount in launch.mounts
    }
    return [found[path] for path in sorted(found, key=lambda path: Path(path).parts)]


def _bind(path: str, source: Path, *, read_only: bool) -> dict[str, Any]:
    options = ["rbind", "nosuid", "nodev", "ro" if read_only else "rw"]
    return {"destination": path, "type": "bind", "source": str(source), "options": options}


@cache
def seccomp() -> dict[str, Any]:
    """The profile's rules that are meant for this machine and for a process without capabilities."""
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
