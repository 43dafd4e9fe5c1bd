"""Containers run by crun, a real OCI runtime, in the node's own namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.proofs.boot.census import processes_beside
from tests.proofs.boot.commands import output_of
from tests.proofs.boot.launch import Launch
from tests.proofs.boot.oci import bundle

_POLL_S = 0.005


class Crun:
    """Starts containers; `state` is crun's own folder."""

    def __init__(self, state: Path) -> None:
        self._state = state
        # Limits of memory and cpu are not set: groups would be made outside of the node's namespaces.
        self._command = ("crun", "--root", str(state), "--cgroup-manager", "disabled")

    async def start(self, launch: Launch, netns: Path) -> CrunContainer:
        """Start it; what keeps crun from doing so stands in its log, and it ends with 1.

        Returns when it runs, or has ended.
        """
        folder = await asyncio.to_thread(bundle, launch, netns)
        pid_file = folder / "pid"
        with launch.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(*self._command, "run", "--bundle", str(folder), "--pid-file", str(pid_file), launch.name),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        started = (pid_file, self._state / launch.name / "status")
        while process.returncode is None and not all(path.exists() for path in started):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return CrunContainer(launch.name, process, pid_file, self._command)


class CrunContainer:
    """One that was started; see launch.Container."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, pid_file: Path, command: Sequence[str]
    ) -> None:
        self._name, self._process, self._pid_file, self._command = name, process, pid_file, command

    async def ended(self) -> int:
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        if self._process.returncode is None and self._pid_file.exists():
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(self._pid_file.read_text()), number)

    async def execute(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        return await output_of(*self._command, "exec", self._name, *command, timeout_s=timeout_s)

    def processes(self) -> list[dict[str, Any]]:
        there = self._process.returncode is None and self._pid_file.exists()
        return list(processes_beside(int(self._pid_file.read_text()))) if there else []

    async def kill(self) -> None:
        while self._process.returncode is None:
            self.send(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                # It may not have come so far that there is something to kill.
                await asyncio.wait_for(self._process.wait(), _POLL_S)
