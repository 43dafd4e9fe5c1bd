"""Where the clients find the stack that runs on this machine: one small file, private to the user."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path


class NoEndpoint(Exception):
    """No gateway was named and none is known to run here."""


def state_dir() -> Path:
    """A directory of this user's own: $XDG_RUNTIME_DIR/galley, else galley-UID among the temporary files.

    Raises PermissionError if somebody else made it first, or can write to it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "galley" if runtime else Path(tempfile.gettempdir()) / f"galley-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(f"{path} is not a directory that only its owner can write")
    return path


def announce(address: str) -> Path:
    """Name `address` (of several gateways, with commas) as the endpoint of this machine's stack.

    The stack is kept up by this process. Returns the file.
    """
    path = state_dir() / "endpoint"
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"address": address, "pid": os.getpid()}), encoding="utf-8")
    fresh.replace(path)
    return path


def withdraw(path: Path) -> None:
    """Take back what `announce` wrote, unless another stack has announced itself meanwhile."""
    if _read(path).get("pid") == os.getpid():
        path.unlink(missing_ok=True)


def find_endpoint(named: str | None) -> str:
    """`named` if given, else the announced endpoint of a stack that still runs; raises NoEndpoint."""
    if named:
        return named
    told = _read(state_dir() / "endpoint")
    address, pid = told.get("address"), told.get("pid")
    if not isinstance(address, str) or not isinstance(pid, int) or not _alive(pid):
        raise NoEndpoint("no stack runs here: start one with `galley up`, or name a gateway with --endpoint")
    return address


def _read(path: Path) -> dict[str, object]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
