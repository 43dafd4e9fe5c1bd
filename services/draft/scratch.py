"""Directories for the files of a draft while they are loaded."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "galley-draft-"


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory that only this user can read, and remove it; also those that killed processes left.

    A process holds a lock on its directory, so those of others that run are left alone.
    """
    for stale in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), _locked(stale):
            shutil.rmtree(stale, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with _locked(directory):
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory of this user. Raise OSError if another has it, or it is none."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(opened).st_uid != os.geteuid():
            raise PermissionError(f"{directory}: must be a directory of this user")
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)
