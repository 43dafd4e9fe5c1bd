"""Files that settings name: read together, read anew when they change, kept when what is new is of no use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from galley.common.tls import files as files_module
from galley.common.tls.files import BadFile, NamedFile, WatchedFiles
from tests.fakes.log_lines import logged


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
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(bytes(4 * 2**20 + 1)), "must be at most 4194304 bytes"),
    ],
    ids=["missing", "directory", "large"],
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


def test_a_device_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(BadFile, match="must be at most"):
        NamedFile("tls_key_file", "/dev/zero").read()
