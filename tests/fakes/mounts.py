"""Real mounts: a disk that is small, and a file system that never answers."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE_S

NEEDED = "mounting needs CAP_SYS_ADMIN"
_CAP_SYS_ADMIN = 21
_NOSUID_NODEV = 2 | 4
_FORCE_DETACH = 1 | 2


def may_mount() -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    [capabilities] = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    return bool(capabilities >> _CAP_SYS_ADMIN & 1)


def require_mounts() -> None:
    """Skip the test if this process may not mount. With the capability, a mount that fails is an error."""
    if not may_mount():
        pytest.skip(NEEDED)


@contextmanager
def small_disk() -> Iterator[Path]:
    """Return a directory on a disk of 1 MiB."""
    # The path of a unix socket is limited to 107 bytes, which pytest's tmp_path can exceed.
    with (
        tempfile.TemporaryDirectory(prefix="galley-") as directory,
        _mounted("tmpfs", Path(directory), "size=1m"),
    ):
        yield Path(directory)


@contextmanager
def hanging(directory: Path) -> Iterator[None]:
    """Have every look into the directory wait, as on a network file system without its server.

    It is a FUSE file system whose server, this process, answers nothing. It fails after PATIENCE_S, as the
    event loop may be what waits.
    """
    server = os.fdopen(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC), "rb", buffering=0)
    watchdog = threading.Timer(PATIENCE_S, server.close)
    with server, _mounted("fuse", directory, f"fd={server.fileno()},rootmode=40000,user_id=0,group_id=0"):
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()
            watchdog.join()
        assert not server.closed, "somebody waited for the mount"


@contextmanager
def _mounted(kind: str, directory: Path, options: str) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    target = os.fsencode(directory)
    _check(libc.mount(b"galley", target, kind.encode(), _NOSUID_NODEV, options.encode()))
    try:
        yield
    finally:
        _check(libc.umount2(target, _FORCE_DETACH))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
