"""The cores that a replica computes on, as it describes them to gateways."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from galley.common.cores import affine_cores, cpu_limits
from galley.pb.galley.v1 import galley_pb2 as pb

_ROOT = Path("/")


def this_host(threads: int, device: str = "cpu", root: Path = _ROOT) -> pb.Host:
    """Describe the cores for a process that computes with `threads`; empty for another device than a CPU.

    Two processes have the same id if they may use the same cores of one machine, and the same `limit_id` if
    one limit of a control group holds for both. `root` is where /proc and /sys are mounted.
    """
    if device.partition(":")[0] != "cpu" or not hasattr(os, "sched_getaffinity"):
        return pb.Host()
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return pb.Host()
    cores = affine_cores(root)
    host = pb.Host(id=_digest(boot, sorted(os.sched_getaffinity(0))), cores=cores, threads=threads)
    limit = min(cpu_limits(root), default=None)
    if limit is not None and limit.cores < cores:
        # Containers see their own group at the root, but each has its own inode.
        host.limit_id = _digest(boot, str(limit.group), limit.group.stat().st_ino)
        host.limit_cores = limit.cores
    return host


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
