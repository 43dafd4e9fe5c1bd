"""Directories for the files of a draft while they are loaded."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

PREFIX = "galley-draft-"
_LOCKED_AFTER_S = 60.0
"""Age at which a directory without its later name is no longer new: its process would have locked it."""


@asynccontextmanager
async def scratch_directory() -> AsyncIterator[Path]:
    """Make a directory that only this user can read, and remove it; also those that killed processes left.

    A process holds a lock on its directory, so those of others that run are left alone. Files are removed in
    threads, as that takes 10 ms and more for 64 MiB, and also if the caller is cancelled meanwhile.
    """
    # Others see it by its later name only, so that none removes it before it is locked.
    directory = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    try:
        with _locked(directory):
            directory = _show(directory)
            await asyncio.to_thread(_remove_stale)
            yield directory
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))


def _show(directory: Path) -> Path:
    return directory.rename(directory.with_name(directory.name[1:]))


def _remove_stale() -> None:
    directory, new_since_s = Path(tempfile.gettempdir()), time.time() - _LOCKED_AFTER_S
    for stale in (*directory.glob(f"{PREFIX}*"), *directory.glob(f".{PREFIX}*")):
        with suppress(OSError):
            if stale.name.startswith(".") and stale.stat().st_mtime >= new_since_s:
                continue  # not locked even for a moment: its process is about to
            with _locked(stale):
                shutil.rmtree(stale, ignore_errors=True)


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
