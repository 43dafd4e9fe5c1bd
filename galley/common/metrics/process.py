"""Metrics of the process itself, by the names that Prometheus's clients use. Linux only.

`prometheus_client` lists the open descriptors, which takes 30 ms in the event loop if there are 10,000.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from galley.common.metrics import catalogue
from galley.common.metrics.metric import LabelValues, Metric

Add: TypeAlias = "Callable[[Metric, Callable[[], Iterable[tuple[LabelValues, float]]]], None]"
_PROC = Path("/proc/self")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_START_TIME = 22
"""Number of the field of /proc/self/stat, by proc(5)."""


def observe_process(add: Add) -> None:
    """Register the metrics; they are absent on other systems."""
    if not _PROC.exists():
        return
    started_s = _started_s()
    add(catalogue.PROCESS_START, lambda: [((), started_s)])
    add(catalogue.PROCESS_CPU, lambda: [((), time.process_time())])
    add(catalogue.PROCESS_RESIDENT, lambda: [((), resident_bytes())])
    add(catalogue.PROCESS_VIRTUAL, lambda: [((), _pages(0) * _PAGE_BYTES)])
    add(catalogue.PROCESS_OPEN_FDS, _open_fds)
    add(catalogue.PROCESS_MAX_FDS, lambda: [((), resource.getrlimit(resource.RLIMIT_NOFILE)[0])])


def resident_bytes() -> int:
    """Return how much memory of the process is in RAM."""
    return _pages(1) * _PAGE_BYTES


def _pages(field: int) -> int:
    return int((_PROC / "statm").read_text().split()[field])


def _open_fds() -> list[tuple[LabelValues, float]]:
    """Return the number that the kernel counts; nothing before Linux 6.2, which does not."""
    count = (_PROC / "fd").stat().st_size
    return [((), count)] if count else []


def _started_s() -> float:
    """Return the Unix time at which the process began."""
    # The second field is the name, in parentheses, which may hold spaces.
    fields = (_PROC / "stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[_START_TIME - 3])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
