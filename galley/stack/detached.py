"""Run the rest of this program in the background: `galley up --detach`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

_POLL_S = 0.1
_READY = b"1"


def detach(log: Path) -> Callable[[], None] | None:
    """Fork: return None in this process, once its child is ready, and in the child what reports that it is.

    The child is in an operating system session of its own and writes to `log`, which this process copies to
    standard output meanwhile. Raise SystemExit with the child's exit code, or 1 for 0, if it ends before.
    Call it before any thread or event loop starts.
    """
    log.touch(mode=0o600)
    os.truncate(log, 0)
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_fd)
        with contextlib.closing(os.fdopen(read_fd, "rb", buffering=0)) as pipe, log.open("rb") as output:
            _wait_until_ready(pid, pipe, output)
        return None
    os.close(read_fd)
    os.setsid()
    _redirect(log)

    def ready() -> None:
        # Nobody waits for it any more if the process that started it was killed.
        with os.fdopen(write_fd, "wb", buffering=0) as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(_READY)

    return ready


def _redirect(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "rb") as null, log.open("ab") as file:  # noqa: PTH123  # no path of a file
        os.dup2(null.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _wait_until_ready(pid: int, pipe: IO[bytes], output: IO[bytes]) -> None:
    try:
        while not select.select([pipe], [], [], _POLL_S)[0]:
            _copy(output)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
    is_ready = pipe.read(1) == _READY
    _copy(output)
    if not is_ready:
        _, status = os.waitpid(pid, 0)
        _copy(output)
        sys.exit(abs(os.waitstatus_to_exitcode(status)) or "error: stopped before it served")


def _copy(output: IO[bytes]) -> None:
    try:
        sys.stdout.write(output.read().decode(errors="replace"))
        sys.stdout.flush()
    except BrokenPipeError:  # the stack starts also if nobody reads how
        with open(os.devnull, "wb") as null:  # noqa: PTH123  # no path of a file
            os.dup2(null.fileno(), sys.stdout.fileno())
