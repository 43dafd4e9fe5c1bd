"""Directories for the files of a draft, of replicas that share a directory of temporary files."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from services.draft.scratch import PREFIX, scratch_directory


async def make_and_remove() -> None:
    async with scratch_directory():
        pass


async def test_a_replica_that_loads_leaves_the_new_directory_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one looks for stale directories right after this one was made, and again later."""
    make, others = tempfile.mkdtemp, [threading.Thread(target=asyncio.run, args=(make_and_remove(),))]

    def made(*, prefix: str) -> str:
        path = make(prefix=prefix)
        while others:
            other = others.pop()
            other.start()
            other.join()
        return path

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", made)
    async with scratch_directory() as directory:
        await make_and_remove()
        assert set(tmp_path.iterdir()) == {directory}  # noqa: ASYNC240  # an empty directory of a test
    assert not set(tmp_path.iterdir())  # noqa: ASYNC240


async def test_what_a_killed_process_left_before_it_had_its_name_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, new = (Path(tempfile.mkdtemp(prefix=f".{PREFIX}")) for _ in range(2))
    an_hour_ago_s = time.time() - 3600
    os.utime(left, (an_hour_ago_s, an_hour_ago_s))
    await make_and_remove()
    assert set(tmp_path.iterdir()) == {new}  # noqa: ASYNC240
