"""Processes by pid and start time, because Linux uses a pid again once its process has ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STATE, _START_TIME = 0, 19
"""Fields of /proc/PID/stat, counted after the name of the command (proc_pid_stat(5))."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, with the time of its start in clock ticks since the boot of the machine."""

    pid: int
    started: int

    @property
    def is_running(self) -> bool:
        return start_time(self.pid) == self.started

    def terminate(self) -> None:
        """Send SIGTERM, if the process still runs."""
        with self._opened() as fd, contextlib.suppress(ProcessLookupError):
            if fd is not None:
                signal.pidfd_send_signal(fd, signal.SIGTERM)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for the end. Return False if the process runs on after `timeout_s`."""
        with self._opened() as fd:
            return fd is None or bool(select.select([fd], [], [], timeout_s)[0])

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Open a file descriptor of the process; None if it has ended."""
        with contextlib.ExitStack() as opened:
            fd = None
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(self.pid)
                opened.callback(os.close, fd)
            yield fd if self.is_running else None


def this_process() -> Process:
    pid = os.getpid()
    return Process(pid, start_time(pid) or 0)


def start_time(pid: int) -> int | None:
    """Return the start time of a process; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[_STATE] in "ZX" else int(fields[_START_TIME])
