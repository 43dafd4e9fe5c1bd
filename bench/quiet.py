"""Measure the share of our cores that other processes use."""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds since the machine's start (`busy_s`, of our cores) and since ours (`own_s`), at `at_s`.

    `busy_s` includes time that the host took from a virtual machine. `own_s` is that of this process and all
    that it started.
    """

    at_s: float
    cores: int
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> Usage:
        cores = sorted(os.sched_getaffinity(0))
        times = psutil.cpu_times(percpu=True)
        busy_s = sum(sum(times[core]) - _unused(times[core]) for core in cores)
        return cls(time.monotonic(), len(cores), busy_s, _own_s())

    def others_since(self, before: Usage) -> float:
        """Return the share of the cores, in [0, 1], that others used from `before` until now."""
        of_all = (self.at_s - before.at_s) * self.cores
        others_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return min(1.0, max(0.0, others_s / of_all)) if of_all > 0 else 0.0


def _unused(times: Any) -> float:
    # A guest's time is part of `user` and `nice`.
    return float(times.idle + times.iowait + times.guest + times.guest_nice)


def _own_s() -> float:
    """Return the CPU seconds of this process and its descendants, those that have ended included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:  # it ended just now
            continue
        found += times.user + times.system + times.children_user + times.children_system
    return float(found)


class Watch:
    """The share of our cores that others used, from note to note, by the name that each note gives."""

    def __init__(self) -> None:
        self._shares: dict[str, list[float]] = defaultdict(list)
        self.begin()

    def begin(self) -> None:
        """Leave out what was used until now."""
        self._before = Usage.now()

    def note(self, name: str) -> None:
        """Note what others used since the last note, or since `begin`."""
        now = Usage.now()
        self._shares[name].append(now.others_since(self._before))
        self._before = now

    def report(self) -> dict[str, dict[str, float]]:
        """Return the median and the greatest share of each name."""
        return {
            name: {"median": round(median(shares), 3), "max": round(max(shares), 3)}
            for name, shares in self._shares.items()
        }
