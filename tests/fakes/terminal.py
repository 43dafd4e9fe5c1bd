"""A command on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from fcntl import ioctl
from typing import Self

from tests.fakes.waiting import PATIENCE_S


class Terminal:
    """Run `command` on a terminal of 24 lines; leaving the block ends it."""

    def __init__(self, command: Sequence[str], *, columns: int = 80, **environment: str) -> None:
        self._fd, self._theirs = pty.openpty()
        self.resize(columns)
        self.before = self.modes
        self.process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **environment},
        )
        self.output = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._fd)

    def resize(self, columns: int) -> None:
        ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    @property
    def modes(self) -> list[object]:
        return list(termios.tcgetattr(self._theirs))

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def until(self, words: bytes) -> bytes:
        """Wait until the command has written `words`; return what came up to their end, which is taken."""
        end_s = time.monotonic() + PATIENCE_S
        while words not in self.output:
            left_s = end_s - time.monotonic()
            assert left_s > 0, self.output.decode(errors="replace")
            if select.select([self._fd], [], [], left_s)[0]:
                self.output += os.read(self._fd, 65536)
        before, _, self.output = self.output.partition(words)
        return before + words
