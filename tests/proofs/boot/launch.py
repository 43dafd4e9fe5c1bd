"""What a container is started with, whoever starts it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.deploy.render import Manifest
from tests.proofs.boot.images import Image
from tests.proofs.boot.volumes import Mount


class CannotRun(Exception):
    """A container that the kubelet would refuse to start, and why."""


@dataclass(frozen=True, slots=True)
class Security:
    """What a container may, from the securityContext of its pod and its own."""

    user: int
    group: int
    groups: tuple[int, ...]
    read_only_root: bool
    no_new_privileges: bool
    capabilities: tuple[str, ...]
    seccomp: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of one container. `ip` is its pod's; `links` are the Services' names with their addresses."""

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


class Container(Protocol):
    """A container that was started."""

    async def ended(self) -> int:
        """Wait for its end: the exit status, 128 and more by a signal."""

    def send(self, number: signal.Signals) -> None:
        """A signal to its first process, if it is there."""

    async def execute(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Run a command in it: exit status (-1 where the time was up) and output."""

    async def kill(self) -> None:
        """End it at once, and wait for that."""

    def processes(self) -> list[dict[str, Any]]:
        """What the kernel says of each (census.py); none where they are like all others of this machine."""


# What container runtimes leave to a container that says nothing.
_DEFAULT = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP"),
    *("SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
)


def security_of(pod: Manifest, container: Manifest, image: Image) -> Security:
    """The two contexts laid over one another and over the image's user; raises CannotRun."""
    above, own = pod.get("securityContext") or {}, container.get("securityContext") or {}
    user, group = image.stage.ids()
    context = {**above, **own}
    user = int(context.get("runAsUser", user))
    group = int(context.get("runAsGroup", group))
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
