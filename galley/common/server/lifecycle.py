"""Tells whoever started this process how far its start has come, in JSON lines on a file descriptor."""

from __future__ import annotations

import json
import os
from contextlib import suppress


class Readiness:
    """Writes to `fd`, or nowhere if it is None; the descriptor is closed once the process is ready."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def stage(self, stage: str, **facts: object) -> None:
        """Say what is being done now, such as "loading model"."""
        self._write({"stage": stage, **facts})

    def ready(self, address: str, **facts: object) -> None:
        """Say that `address` (host:port) is served; nothing follows."""
        self._write({"stage": "ready", "address": address, **facts})
        self.close()

    def close(self) -> None:
        """Give the descriptor up; a reader that has not seen "ready" knows that the start failed."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def _write(self, line: dict[str, object]) -> None:
        if self._fd is None:
            return
        # A reader that has gone away must not keep a server from serving.
        with suppress(BrokenPipeError):
            os.write(self._fd, json.dumps(line).encode() + b"\n")
