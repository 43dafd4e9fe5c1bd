"""Cached machine code is a pickle: it is only read from a directory that this user alone can write."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from galley.core.errors import UnsafeCache
from galley.engine.cpu.kernels.compile import compile_kernels


def double(numbers: Any) -> None:
    numbers *= 2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GALLEY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run() -> None:
    [kernel] = compile_kernels("test", (double,), (sys.modules[__name__],))
    numbers = np.array([3.0])
    kernel(numbers)
    assert numbers[0] == 6.0


def directory_in(cache: Path) -> Path:
    return cache / "kernels"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_machine_code_is_kept_in_a_private_directory(cache: Path) -> None:
    run()
    assert mode(directory_in(cache)) == 0o700
    kept = {path.name: path.stat().st_mtime_ns for path in directory_in(cache).rglob("*.nb?")}
    assert kept
    run()
    assert {path.name: path.stat().st_mtime_ns for path in directory_in(cache).rglob("*.nb?")} == kept


@pytest.mark.parametrize("by", [0o020, 0o002])
def test_files_that_others_may_have_written_are_discarded(cache: Path, by: int) -> None:
    run()
    directory = directory_in(cache)
    for planted in (directory / "planted", next(directory.iterdir()) / "planted.nbc"):
        planted.write_bytes(b"")
    (directory / "link").symlink_to(cache.parent)
    directory.chmod(0o700 | by)
    run()
    assert mode(directory) == 0o700
    assert not list(cache.rglob("planted*"))
    assert [path.name for path in cache.iterdir()] == ["kernels"]
    assert cache.parent.exists()


def test_files_that_cannot_be_discarded_are_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    directory = directory_in(cache)
    directory.chmod(0o777)
    monkeypatch.setattr(Path, "rename", Mock(side_effect=PermissionError))
    for _ in range(2):
        with pytest.raises(UnsafeCache, match="kernels: must be a directory that only user"):
            run()


def test_a_directory_of_another_user_or_a_link_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directory_in(cache)
    cache.mkdir()
    directory.symlink_to(cache.parent / "elsewhere")
    for _ in range(2):  # a link that leads nowhere could be given a directory later
        with pytest.raises(UnsafeCache, match="kernels: must be a directory that only user"):
            run()
        (cache.parent / "elsewhere").mkdir(exist_ok=True)
    directory.unlink()
    other = os.geteuid() + 1
    directory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(UnsafeCache, match=f"that only user {other} can write"):
        run()


def test_a_cache_directory_that_everyone_can_write_is_refused(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(UnsafeCache, match=f"{cache}: must not be writable by everyone"):
        run()
    cache.chmod(0o1777)  # as /tmp
    run()
