"""Set up a process: its end with its parent, its threads, its memory, the reports of its start."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from galley.common.logs import get_logger
from galley.core.errors import OutOfMemory

P = ParamSpec("P")
R = TypeVar("R")

_LOG = get_logger(__name__)
_PR_SET_PDEATHSIG = 1
_ALLOCATION = re.compile("out of memory|allocate memory", re.IGNORECASE)
# Some microseconds; as fast as a long spin if the cores are free.
_SPINS = "2000"


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends; does nothing except on Linux.

    `parent_pid` is the expected parent, which may have ended already. Raise OSError if the kernel refuses.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        # It ended in between, so the signal will never come.
        os.kill(os.getpid(), signal.SIGTERM)


def hand_back_free_memory() -> None:
    """Return freed memory from glibc to the system; does nothing under another C library.

    glibc keeps freed memory below live objects. After a model is loaded, this process needs it no more.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def report_memory(what: str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemory, in one line, for any error of an allocation that failed."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:  # torch raises RuntimeError
        reason = str(error).partition("\n")[0]
        if not (isinstance(error, MemoryError) or _ALLOCATION.search(reason)):
            raise
        raise OutOfMemory(f"{what} must fit into memory ({reason or 'out of memory'}); {remedy}") from error


def limit_threads(count: int) -> None:
    """Have every thread's numeric kernels use `count` threads; call before torch or numpy is imported.

    A library's own setter would hold for the calling thread alone.
    """
    os.environ.update(thread_environment(count))


def thread_environment(count: int) -> dict[str, str]:
    """Return the environment of a process whose numeric kernels use `count` threads.

    Threads that wait for one another spin only for a moment: a long spin takes the core away from the thread
    that is waited for, and steps stall.
    """
    threads = str(count)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", _SPINS),
    }


async def in_passing_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function` in a thread of its own, which ends with the call, also if the caller is cancelled.

    Use it for computation before the thread of the steps starts: OpenMP keeps a team for each thread that
    used it, and idle teams slow the steps (31 ms instead of 20 for 8 sessions on two threads).
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="passing")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, partial(function, *args, **kwargs))
    finally:
        thread.shutdown(wait=False)


class Readiness:
    """Reports of the start: in the log, and as JSON lines on the file descriptor `fd` unless it is None."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def runs(self) -> None:
        """Report that the process runs. The log has it only once a stage takes time."""
        self._write({"stage": "starting"})

    def stage(self, stage: str, **facts: object) -> None:
        _LOG.info("start", stage=stage, **facts)
        self._write({"stage": stage, **facts})

    def ready(self, address: str, **facts: object) -> None:
        self._write({"stage": "ready", "address": address, **facts})
        self.close()

    def close(self) -> None:
        """Close the descriptor; a reader that has not read "ready" knows that the start failed."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def _write(self, line: dict[str, object]) -> None:
        if self._fd is None:
            return
        # A reader that has gone away must not keep a server from serving.
        with suppress(BrokenPipeError):
            os.write(self._fd, json.dumps(line).encode() + b"\n")


async def run_unless(stopped: asyncio.Event, work: Coroutine[Any, Any, R]) -> R | None:
    """Return the result of `work`, or None if `stopped` was set first, which cancels `work`.

    `work` has ended when this returns or raises. Exceptions of `work` pass.
    """
    task, stop = asyncio.create_task(work), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        given_up = not task.done()
    finally:
        for each in (task, stop):
            each.cancel()
        await asyncio.wait({task, stop})
    return None if given_up and task.cancelled() else task.result()
