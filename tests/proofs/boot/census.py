"""What the kernel says of the processes of a container: who they are, what they may, what they hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_KIB = 1024


def processes_beside(first: int) -> Iterator[dict[str, Any]]:
    """Every process of the container whose first one is `first`; those that end meanwhile are left out."""
    with suppress(OSError):
        space = _space(_PROC / str(first))
        for process in _PROC.iterdir():
            with suppress(OSError):
                if process.name.isdecimal() and _space(process) == space:
                    yield _told(process)


def _space(process: Path) -> Path:
    return (process / "ns" / "pid").readlink()


def _told(process: Path) -> dict[str, Any]:
    lines = (process / "status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return {
        "users": sorted({int(user) for user in status["Uid"]}),
        "capabilities": int(status["CapEff"][0], 16) | int(status["CapPrm"][0], 16),
        "gains_no_privileges": status["NoNewPrivs"] == ["1"],
        "filtered": status["Seccomp"] == ["2"],
        "reads_its_root_alone": bool(os.statvfs(process / "root").f_flag & os.ST_RDONLY),
        "peak_bytes": int(status["VmHWM"][0]) * _KIB if "VmHWM" in status else 0,
    }
