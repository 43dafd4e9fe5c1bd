"""Where clients and `galley top` find the stack that runs here: one small file, private to the user."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from galley.top.service import Service


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


@dataclass(frozen=True, slots=True)
class Announced:
    """The processes of a stack that tell metrics, and the URL of its own store; empty if it has none."""

    services: tuple[Service, ...]
    store: str = ""


def announce(address: str, services: Sequence[Service] = (), store: str = "") -> Path:
    """Name `address` (of several gateways, with commas) as the endpoint of this machine's stack.

    `services` and `store` are as in Announced. The stack is kept up by this process. Returns the file.
    """
    path = state_dir() / "endpoint"
    fresh = path.with_suffix(f".{os.getpid()}")
    told = {"address": address, "pid": os.getpid(), "store": store}
    told["services"] = [dataclasses.asdict(one) for one in services]
    fresh.write_text(json.dumps(told), encoding="utf-8")
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
    address = _announced().get("address")
    if not isinstance(address, str):
        raise NoEndpoint("no stack runs here: start one with `galley up`, or name a gateway with --endpoint")
    return address


def find_services() -> Announced:
    """What a stack that still runs has announced of its metrics; raises NoEndpoint if there is none."""
    told = _announced()
    listed, store = told.get("services"), told.get("store")
    try:
        services = tuple(Service(**one) for one in listed) if isinstance(listed, list) else ()
    except TypeError:
        services = ()
    if not services:
        raise NoEndpoint("no stack runs here: start one with `galley up`, or name services with --metrics")
    return Announced(services, store if isinstance(store, str) else "")


def _announced() -> dict[str, object]:
    """What a stack that still runs has announced; nothing if there is none."""
    told = _read(state_dir() / "endpoint")
    pid = told.get("pid")
    return told if isinstance(pid, int) and _alive(pid) else {}


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
