"""Run a command that dies with its parent: `python guard.py PARENT_PID NICENESS COMMAND ARGS...`.

Asks Linux to SIGKILL this process when its parent ends (prctl PR_SET_PDEATHSIG, which survives execve), then
becomes the command, under the same pid. The parent may have ended before the request took hold: then the
process has another parent by now, and nothing is started. Elsewhere than on Linux the command runs unguarded.

It is made nicer by NICENESS first, and its session with it: Linux shares cores out between sessions, and what
counts between these is theirs (sched(7), on autogroups). And it becomes idle work (SCHED_IDLE there): what
wakes takes a core from that at once, and does not queue on another behind work that is not nice at all. So
other work of the machine goes before it.

Run by path, without site-packages (`python -I -S`), so that it costs some 10 ms: the standard library only.
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
    """Become `argv[2:]`, tied to the parent of pid `argv[0]`; returns only if that cannot be."""
    parent, niceness, command = int(argv[0]), int(argv[1]), argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return _ORPHANED
    _give_way(niceness)
    try:
        os.execvp(command[0], command)  # noqa: S606  # no shell is what is wanted
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
