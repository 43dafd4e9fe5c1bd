"""Sample the memory of each process of a stack, and compute its growth.

Growth is the median of the last fifth of the samples over the median of the first, less 1. It is that of
anonymous memory, which a process has allocated. Pages of files, such as libraries and mapped weights, would
dilute it, and their share changes when another process that maps them starts or ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

if TYPE_CHECKING:
    from redis import asyncio as redis_asyncio

REDIS_MEMORY = "redis used_memory"
WINDOWS = 5


@dataclass(frozen=True, slots=True)
class Held:
    """Memory in bytes, threads and descriptors of one process."""

    anonymous: int
    rss: int
    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of all processes, taken `at_s` (monotonic)."""

    at_s: float
    processes: Mapping[str, Held]
    redis_bytes: int
    session_keys: int
    blocks_free: int
    blocks_total: int
    queue_depth: int

    def megabytes(self, name: str) -> float:
        """Return the megabytes of a process, or of REDIS_MEMORY."""
        return (self.redis_bytes if name == REDIS_MEMORY else self.processes[name].anonymous) / 2**20


@dataclass(frozen=True, slots=True)
class Growth:
    """Megabytes in the first window and in the last."""

    first: float
    last: float

    @property
    def share(self) -> float:
        """Return the growth as a share: 0.05 is five per cent more than at first."""
        return self.last / self.first - 1

    def __str__(self) -> str:
        return f"{self.share:+.1%} ({self.first:.1f} to {self.last:.1f} MiB)"


def growth(values: Sequence[float]) -> Growth:
    """Return the growth of values over time. Raises ValueError below two values a window."""
    size = len(values) // WINDOWS
    if size < 2:
        raise ValueError(f"values: must be at least {2 * WINDOWS} for {WINDOWS} windows, got {len(values)}")
    return Growth(median(values[:size]), median(values[-size:]))


@dataclass(slots=True)
class Watcher:
    """A sampler that takes one of `samples` every `every_s`, from the first to the last moment of a run."""

    pids: Mapping[str, int]
    redis: redis_asyncio.Redis
    target: rpc.TargetAsyncStub
    info: pb.GetTargetInfoRequest
    every_s: float
    samples: list[Sample] = field(default_factory=list)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.samples.append(await self.look())
            await asyncio.sleep(self.every_s)

    async def look(self) -> Sample:
        """Take one sample now."""
        # In a thread: the kernel needs some time for gigabytes.
        processes = await asyncio.to_thread(lambda: {name: held(pid) for name, pid in self.pids.items()})
        memory = await self.redis.info("memory")
        info = await self.target.GetTargetInfo(self.info)
        return Sample(
            at_s=time.monotonic(),
            processes=processes,
            redis_bytes=int(memory["used_memory"]),
            session_keys=len(await session_keys(self.redis)),
            blocks_free=info.kv_blocks_free,
            blocks_total=info.kv_blocks_total,
            queue_depth=info.queue_depth,
        )

    def between(self, first_s: float, last_s: float) -> list[Sample]:
        """Return the samples of a time span."""
        return [sample for sample in self.samples if first_s <= sample.at_s <= last_s]


def held(pid: int) -> Held:
    """Return what a process and its children hold."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    memory = [_rollup(one.pid) for one in family]
    return Held(
        anonymous=sum(one["Anonymous"] for one in memory),
        rss=sum(one["Rss"] for one in memory),
        threads=sum(one.num_threads() for one in family),
        descriptors=sum(one.num_fds() for one in family),
    )


def _rollup(pid: int) -> dict[str, int]:
    """Return the sums over all mappings of a process, in bytes (proc_pid_smaps(5))."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    lines = [line.split() for line in text.splitlines()[1:]]
    return {words[0].removesuffix(":"): int(words[1]) * 1024 for words in lines}


async def session_keys(redis: redis_asyncio.Redis) -> list[bytes]:
    """Return all keys of all sessions in the store: a few for each."""
    return [key async for key in redis.scan_iter("galley:sessions:*", count=1000)]
