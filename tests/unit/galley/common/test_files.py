"""Files that settings name: read together, read anew when they change, kept when what is new is of no use."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from galley.common.tls import files as files_module
from galley.common.tls.files import BadFile, NamedFile, WatchedFiles
from tests.fakes.log_lines import logged
from tests.fakes.waiting import PATIENCE_S, with_turns


class Watched:
    def __init__(self, directory: Path) -> None:
        self.paths = [directory / "one", directory / "two"]
        self.write("old")
        self.named = [NamedFile(path.name, str(path)) for path in self.paths]
        self.after_one: Callable[[], None] = lambda: None

    def write(self, text: str) -> None:
        for path in self.paths:
            replace(path, text)

    def read(self) -> list[str]:
        one = self.named[0].read().decode()
        self.after_one()
        two = self.named[1].read().decode()
        if one != two:
            raise self.named[1].bad("is another than the first")
        return [one]


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.rename(path)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_CHECK_PATIENCE_S", PATIENCE_S)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_unchanged_file_is_read_once(watched: Watched) -> None:
    files = WatchedFiles(watched.named, watched.read)
    assert files.current() == ["old"]
    assert files.current() is files.current()


def test_a_change_is_read_at_the_next_look_and_no_sooner(watched: Watched) -> None:
    now_s = [0.0]
    files = WatchedFiles(watched.named, watched.read, check_interval_s=1.0, clock=lambda: now_s[0])
    watched.write("new")
    assert files.current() == ["old"]
    now_s[0] = 1.0
    assert files.current() == ["new"]


def test_unusable_file_is_logged_once_and_old_content_stays(watched: Watched) -> None:
    files = WatchedFiles(watched.named, watched.read)
    replace(watched.paths[0], "torn")
    with logged(files_module) as logs:
        assert files.current() == ["old"]
        assert files.current() == ["old"]
    [line] = logs
    assert line["log_level"] == "error"
    assert line["error"] == f"two: {watched.paths[1]}: is another than the first"
    replace(watched.paths[1], "torn")
    assert files.current() == ["torn"]


def test_a_file_that_goes_and_comes_back_is_read_when_it_is_back(watched: Watched) -> None:
    files = WatchedFiles(watched.named, watched.read)
    watched.paths[1].unlink()
    with logged(files_module) as logs:
        assert files.current() == ["old"]
    assert "No such file" in logs[0]["error"]
    watched.write("new")
    assert files.current() == ["new"]


def test_file_is_read_after_its_permissions_change(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("key")
    path.chmod(0o600)
    files = WatchedFiles([NamedFile("key", str(path))], lambda: oct(path.stat().st_mode & 0o777))
    assert files.current() == "0o600"
    path.chmod(0o640)
    assert files.current() == "0o640"


def test_unreadable_file_is_retried_and_logged_once(watched: Watched) -> None:
    now_s, crowded = [0.0], [False]

    def read() -> list[str]:
        if crowded[0]:
            raise BadFile("one", "Too many open files", may_pass=True)
        return watched.read()

    files = WatchedFiles(watched.named, read, clock=lambda: now_s[0])
    watched.write("new")
    crowded[0] = True
    with logged(files_module) as logs:
        for now_s[0] in (0.0, 1.0, 4.0):
            assert files.current() == ["old"]
        crowded[0] = False
        now_s[0] = 4.5
        assert files.current() == ["old"], "it was tried half a second ago"
        now_s[0] = 5.0
        assert files.current() == ["new"]
    assert [line.get("error") for line in logs] == ["one: Too many open files", None]


def test_permanently_bad_file_is_read_once(watched: Watched) -> None:
    now_s, reads = [0.0], [0]

    def read() -> list[str]:
        reads[0] += 1
        return watched.read()

    files = WatchedFiles(watched.named, read, clock=lambda: now_s[0])
    replace(watched.paths[0], "new")
    for now_s[0] in (1.0, 3.0, 5.0):
        assert files.current() == ["old"]
    assert reads == [2]


def test_rewriting_equal_content_is_no_change(watched: Watched) -> None:
    files = WatchedFiles(watched.named, watched.read)
    before = files.current()
    watched.write("old")
    with logged(files_module) as logs:
        assert files.current() is before
    assert logs == []


def test_files_that_are_replaced_while_they_are_read_are_read_again(watched: Watched) -> None:
    def once() -> None:
        watched.after_one = lambda: None
        watched.write("new")

    watched.after_one = once
    assert WatchedFiles(watched.named, watched.read).current() == ["new"]


def test_wait_for_changing_files_is_bounded(watched: Watched) -> None:
    rounds = iter(range(100))
    watched.after_one = lambda: watched.write(f"version {next(rounds)}")
    with pytest.raises(BadFile, match="is another than the first"):
        WatchedFiles(watched.named, watched.read)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "must be a regular file"),
        (os.mkfifo, "must be a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "must be a regular file"),
        (lambda path: path.write_bytes(bytes(4 * 2**20 + 1)), "must be at most 4194304 bytes"),
    ],
    ids=["missing", "directory", "fifo", "device", "large"],
)
def test_unreadable_file_is_named_with_its_setting(
    tmp_path: Path, make: Callable[[Path], object], why: str
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(BadFile) as refused:
        NamedFile("tls_key_file", str(path)).read()
    assert refused.value.setting == "tls_key_file"
    assert refused.value.problem == f"{path}: {why}"


def test_a_fifo_that_replaces_a_file_is_not_waited_for(watched: Watched) -> None:
    files = WatchedFiles(watched.named, watched.read)
    watched.paths[0].unlink()
    os.mkfifo(watched.paths[0])
    with logged(files_module) as logs:
        assert files.current() == ["old"]
    assert [line["error"] for line in logs] == [f"one: {watched.paths[0]}: must be a regular file"]


class Hanging:
    """Files on a mount that hangs from the second read on, until `resume` is set."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.hangs, self.resume, self.is_hanging = False, threading.Event(), threading.Event()
        self.files = WatchedFiles(watched.named, self._read)

    def _read(self) -> list[str]:
        if self.hangs:
            self.is_hanging.set()
            self.resume.wait(PATIENCE_S)
        return self._watched.read()

    def hang(self) -> None:
        self.hangs = True
        self._watched.write("new")

    def end(self) -> None:
        """Let the check end and wait for it: a later test would see what its thread logs."""
        self.hangs = False
        self.resume.set()
        until_s = time.monotonic() + PATIENCE_S
        while self.files.current() == ["old"] and time.monotonic() < until_s:
            pass


@pytest.fixture
def hanging(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr(files_module, "_CHECK_PATIENCE_S", 0.02)
    made = Hanging(watched)
    yield made
    made.end()


async def test_a_mount_that_hangs_delays_callers_briefly_and_holds_no_event_loop(hanging: Hanging) -> None:
    hanging.hang()
    checked, turns = await with_turns(hanging.files.checked())
    assert checked == ["old"]
    assert hanging.is_hanging.wait(PATIENCE_S)
    assert turns > 1
    assert hanging.files.latest() == hanging.files.current() == ["old"]
    hanging.hangs = False
    hanging.resume.set()
    async with asyncio.timeout(PATIENCE_S):
        while hanging.files.latest() == ["old"]:  # noqa: ASYNC110  # a thread ends it
            await asyncio.sleep(0)
    assert await hanging.files.checked() == ["new"]


async def test_a_caller_bounds_its_wait(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_CHECK_PATIENCE_S", PATIENCE_S)
    hanging.hang()
    async with asyncio.timeout(PATIENCE_S / 2):
        assert await hanging.files.checked(0.02) == ["old"]


def test_a_check_that_hangs_is_logged_once(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_STALLED_S", 0.0)
    hanging.hang()
    with logged(files_module) as logs:
        for _ in range(3):
            assert hanging.files.current() == ["old"]
    [line] = logs
    assert line["event"] == "files cannot be checked; the earlier ones stay in use"
    assert line["log_level"] == "error"


def test_a_check_that_gets_no_thread_is_tried_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = WatchedFiles(watched.named, watched.read)
    watched.write("new")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        assert files.current() == ["old"]
    assert files.current() == ["new"]


def test_the_latest_value_begins_a_check_without_waiting(watched: Watched) -> None:
    checked = threading.Event()
    files = WatchedFiles(watched.named, watched.read)
    watched.after_one = checked.set
    watched.write("new")
    assert files.latest() in (["old"], ["new"])
    assert checked.wait(PATIENCE_S)
    assert files.current() == ["new"]
