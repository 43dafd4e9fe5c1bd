"""The stacks that run on this machine: one small file each, private to the user."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galley.stack.processes import Process, this_process

DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_SUFFIX = ".stack"


class NoEndpoint(Exception):
    """No stack can be chosen: none has announced its gateways here, none has the name, or several run."""


class SeveralStacks(NoEndpoint):
    def __init__(self, stacks: Sequence[RunningStack]) -> None:
        names = ", ".join(f"{stack.name} ({stack.address})" for stack in stacks)
        super().__init__(f"several stacks run here: {names}; choose one with --stack")
        self.names = [stack.name for stack in stacks]


class NameTaken(ValueError):
    """A stack of this name runs already."""


@dataclass(frozen=True, slots=True)
class Service:
    """A process that exports metrics at `metrics` (host:port); `address` is where it serves, if known."""

    name: str
    metrics: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A stack that runs here: its process, and what it has announced. While it starts, it has no address.

    `address` are its gateways and `http` their HTTP addresses, with commas. `store` is the URL of its own
    store, or empty. `logs` is the directory of its logs.
    """

    name: str
    process: Process
    address: str = ""
    http: str = ""
    services: tuple[Service, ...] = ()
    store: str = ""
    model: str = ""
    logs: str = ""


def state_dir() -> Path:
    """Return $XDG_RUNTIME_DIR/galley or $TMPDIR/galley-UID, made if missing; PermissionError if unsafe."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "galley" if runtime else Path(tempfile.gettempdir()) / f"galley-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path}: must be your own directory, closed to other users; run chmod 700")
    return path


class Endpoint:
    """The name of a stack of this process, by which clients find it; the end of `with` frees it."""

    def __init__(self, name: str | None = None) -> None:
        """Take `name`, or the first free one of "default", "default-2", ... Raises ValueError, NameTaken."""
        if name is None:
            number = 1
            while not self._take(DEFAULT_NAME if number == 1 else f"{DEFAULT_NAME}-{number}"):
                number += 1
        elif not _NAME.fullmatch(name):
            raise ValueError(f"must be 1 to 40 letters, digits or (not first) '.', '_', '-', got {name!r}")
        elif not self._take(name):
            raise NameTaken(f"must be free, got {name!r}, which process {_read(self._path).get('pid')} uses")

    def _take(self, name: str) -> bool:
        directory = state_dir()
        self.name, self._path = name, directory / f"{name}{_SUFFIX}"
        with (directory / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _process(_read(self._path)).is_running:
                return False
            self._write({})
        self.log.unlink(missing_ok=True)
        return True

    @property
    def log(self) -> Path:
        """Return where a detached stack writes its output; kept until the name is taken again."""
        return console_log(self.name)

    def adopt(self) -> None:
        """Give the name to this process, a child of the one that took it."""
        self._write({})

    def announce(
        self,
        address: str = "",
        services: Sequence[Service] = (),
        store: str = "",
        *,
        http: str = "",
        model: str = "",
        logs: str = "",
    ) -> None:
        facts = {"address": address, "http": http, "store": store, "model": model, "logs": logs}
        self._write({**facts, "services": [dataclasses.asdict(service) for service in services]})

    def _write(self, facts: Mapping[str, Any]) -> None:
        fresh = self._path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({**_owner(), **facts}), encoding="utf-8")
        fresh.replace(self._path)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        if _read(self._path).get("pid") == os.getpid():
            self._path.unlink(missing_ok=True)


def console_log(name: str) -> Path:
    return state_dir() / f"{name}.log"


def live_stacks() -> list[RunningStack]:
    """Return the stacks that run or start here, sorted by name."""
    stacks = []
    for path in sorted(state_dir().glob(f"*{_SUFFIX}")):
        facts = _read(path)
        if (process := _process(facts)).is_running:
            services = tuple(Service(**one) for one in facts.pop("services", ()))
            known = {field.name for field in dataclasses.fields(RunningStack)} & set(facts)
            announced = {name: facts[name] for name in known}
            stacks.append(
                RunningStack(path.name.removesuffix(_SUFFIX), process, services=services, **announced)
            )
    return stacks


def find_stack(name: str | None = None, *, starting: bool = False) -> RunningStack:
    """Return the stack of that name, or the only one; with `starting` also one that has not announced itself.

    Raises NoEndpoint, SeveralStacks, PermissionError.
    """
    known = [stack for stack in live_stacks() if name in {None, stack.name}]
    stacks = known if starting else [stack for stack in known if stack.address]
    if not stacks and known:
        raise NoEndpoint(f"stack {known[0].name!r} still starts; `galley logs --follow` shows how far it is")
    if not stacks and name is not None:
        raise NoEndpoint(f"no stack {name!r} runs here; start it with `galley up --name {name}`")
    if not stacks:
        raise NoEndpoint("no stack runs here; start one with `galley up`")
    if len(stacks) > 1:
        raise SeveralStacks(stacks)
    return stacks[0]


def _owner() -> dict[str, int]:
    return dataclasses.asdict(this_process())


def _process(facts: Mapping[str, Any]) -> Process:
    """Return the process that a file names; one that never runs if it names none."""
    pid, started = facts.get("pid"), facts.get("started")
    return Process(pid, started) if isinstance(pid, int) and isinstance(started, int) else Process(0, -1)


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
