"""The cores that a replica computes on, as it describes them to gateways."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from galley.common.cores import cpu_limits, usable_cores
from galley.pb.galley.v1 import galley_pb2 as pb

_ROOT = Path("/")


def this_host(threads: int, device: str = "cpu", root: Path = _ROOT) -> pb.Host:
    """Describe the cores for a process that computes with `threads`; empty for another device than a CPU.

    Two processes have the same id if they may use the same cores of one machine, and what a control group
    limits is the limit of both. `root` is where /proc and /sys are mounted.
    """
    if device.partition(":")[0] != "cpu" or not hasattr(os, "sched_getaffinity"):
        return pb.Host()
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_bytes()
        group = _group(root) if any(cpu_limits(root)) else ""
    except OSError:
        return pb.Host()
    shared = repr((boot, sorted(os.sched_getaffinity(0)), group))
    digest = hashlib.sha256(shared.encode()).hexdigest()
    return pb.Host(id=digest[:16], cores=usable_cores(root), threads=threads)


def _group(root: Path) -> str:
    """Return a text that names the control group: containers see theirs at the root, by different inodes."""
    return f"{(root / 'proc/self/cgroup').read_text()} {(root / 'sys/fs/cgroup').stat().st_ino}"
