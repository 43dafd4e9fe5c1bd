"""Waits for the end of processes that are not our children."""

from __future__ import annotations

import os
import select
from contextlib import ExitStack
from typing import Self


class Ends:
    """Watch processes by pid descriptors, since pids may be reused."""

    def __init__(self, pids: list[int]) -> None:
        self._stack = ExitStack()
        self._fds: list[int] = []
        for pid in pids:
            fd = os.pidfd_open(pid)
            self._stack.callback(os.close, fd)
            self._fds.append(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def all_within(self, seconds: float) -> bool:
        return all(select.select([fd], [], [], seconds)[0] for fd in self._fds)
