"""Run a command that dies with its parent: `python guard.py PARENT_PID NICENESS COMMAND ARGS...`.

It asks Linux to SIGKILL this process when its parent ends (prctl PR_SET_PDEATHSIG, which survives execve),
then becomes the command, under the same pid. If the parent has ended before that, nothing is started. On
other systems the command runs unguarded.

A NICENESS above 0 gives other work precedence. It is set for the process and for its session, because Linux
shares cores between sessions first (sched(7), autogroups). SCHED_IDLE lets other work that wakes take the
core at once.

Run it by path, without site-packages (`python -I -S`), which takes some 10 ms: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_ORPHANED = 70
_NOT_FOUND = 127


def main(argv: list[str]) -> int:
    """Become the command `argv[2:]`. Return an exit status if it fails or parent `argv[0]` has ended."""
    parent, niceness, command = int(argv[0]), int(argv[1]), argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return _ORPHANED
    _give_way(niceness)
    try:
        os.execvp(command[0], command)  # noqa: S606  # without a shell on purpose
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return _NOT_FOUND


def _give_way(niceness: int) -> None:
    if not niceness:
        return
    os.nice(niceness)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:  # noqa: PTH123  # see above
        group.write(str(niceness))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
