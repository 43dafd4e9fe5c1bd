"""The cores that a replica computes on, as it describes them to gateways."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from galley.pb.galley.v1 import galley_pb2 as pb

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_host(threads: int, device: str = "cpu", boot_file: Path = _BOOT) -> pb.Host:
    """Describe the cores for a process that computes with `threads`; empty for another device than a CPU.

    Two processes have the same id if they may use the same cores of one machine.
    """
    if device.partition(":")[0] != "cpu" or not hasattr(os, "sched_getaffinity"):
        return pb.Host()
    cores = sorted(os.sched_getaffinity(0))
    try:
        boot = boot_file.read_bytes()
    except OSError:
        return pb.Host()
    digest = hashlib.sha256(boot + repr(cores).encode()).hexdigest()
    return pb.Host(id=digest[:16], cores=len(cores), threads=threads)
