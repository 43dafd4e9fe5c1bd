"""The CPU cores that this process may use: its affinity, and the limits of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many cores this process may keep busy: whole ones, at least 1.

    Hardware threads of one core count as one. `root` is where /proc and /sys are mounted.
    """
    return max(1, math.floor(min([affine_cores(root), *(limit.cores for limit in cpu_limits(root))])))


def affine_cores(root: Path = _ROOT) -> int:
    """Return how many cores this process's affinity has, whatever its control groups allow."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return len({_siblings(root, cpu) for cpu in cpus})


def _siblings(root: Path, cpu: int) -> str:
    """Return a text that names the core of a CPU."""
    file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return str(cpu)


class CpuLimit(NamedTuple):
    """The cores that all processes of a control group may keep busy together, and the group's directory."""

    cores: float
    group: Path


def cpu_limits(root: Path) -> Iterator[CpuLimit]:
    """Yield the CPU limits of this process's control groups of either version."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers:
            yield from _limits_of(root / "sys/fs/cgroup", path, "cpu.max")
        elif "cpu" in controllers.split(","):
            yield from _limits_of(root / "sys/fs/cgroup/cpu", path, "cpu.cfs_quota_us", "cpu.cfs_period_us")


def _limits_of(mount: Path, path: str, *files: str) -> Iterator[CpuLimit]:
    """Yield the limits of a group and of those that hold it; a container may see its own as the root."""
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        with suppress(OSError, ValueError):  # no limit is -1, or the word max
            text = " ".join((group / file).read_text(encoding="ascii") for file in files)
            quota, period = map(int, text.split())
            if quota > 0:
                yield CpuLimit(quota / period, group)
        group = group.parent
