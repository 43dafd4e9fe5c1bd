"""Forked processes, a few at a time. A fork has the parent's libraries without importing them again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

BROKEN = 70
"""The exit status of a job that raised."""
_PAUSE_S = 0.01

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """What a forked process runs: `work` returns its exit status."""

    subject: T
    work: Callable[[], int]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """`status` is None if the process was killed at its limit."""

    subject: T
    status: int | None
    output: str


@dataclass(frozen=True, slots=True)
class _Running(Generic[T]):
    job: Job[T]
    output: Path
    until_s: float

    def ended(self, status: int | None) -> Ended[T]:
        return Ended(self.job.subject, status, self.output.read_text(errors="replace"))


def run_all(jobs: Iterable[Job[T]], workers: int, directory: Path) -> Iterator[Ended[T]]:
    """Run the jobs, at most `workers` at once; their output passes through files in `directory`."""
    waiting, running = iter(jobs), dict[int, _Running[T]]()
    try:
        while True:
            while len(running) < workers and (job := next(waiting, None)) is not None:
                output = directory / f"output-{len(running)}-{time.monotonic_ns()}.txt"
                until_s = time.monotonic() + job.limit_s
                running[_fork(job.work, output)] = _Running(job, output, until_s)
            if not running:
                return
            for pid, status in _ended(running):
                done = running.pop(pid)
                yield done.ended(status)
                done.output.unlink()
            time.sleep(_PAUSE_S)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
        for pid, left in running.items():
            os.waitpid(pid, 0)
            left.output.unlink(missing_ok=True)


def _fork(work: Callable[[], int], output: Path) -> int:
    output.touch()
    pid = os.fork()
    if pid:
        return pid
    status = BROKEN
    try:
        os.setpgid(0, 0)  # so that what the tests start is killed too
        file = os.open(output, os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = work()
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001  # nothing may return into the parent's code
        os.write(2, repr(error).encode())
    os._exit(status)


def _ended(running: dict[int, _Running[T]]) -> Iterator[tuple[int, int | None]]:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what its tests started, if it could not end it
            yield pid, os.waitstatus_to_exitcode(status)
        elif time.monotonic() > running[pid].until_s:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            yield pid, None
