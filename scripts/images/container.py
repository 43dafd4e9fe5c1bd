"""Run commands in an unpacked image, by its configuration and without a container runtime (contain.sh)."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_CONTAIN = Path(__file__).with_name("contain.sh")
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")


@dataclass(frozen=True)
class Container:
    """An unpacked image: its root folder, and its configuration as the image holds it."""

    root: Path
    config: Mapping[str, Any]

    @property
    def entrypoint(self) -> tuple[str, ...]:
        """Return the image's ENTRYPOINT."""
        return tuple(self.config["Entrypoint"])

    @property
    def probe(self) -> tuple[str, ...]:
        """Return the command of the HEALTHCHECK."""
        form, *command = self.config["Healthcheck"]["Test"]
        if form != "CMD":
            raise ValueError(f"HEALTHCHECK: must have the form CMD, got {form}")
        return tuple(command)

    @contextmanager
    def running(self, environment: Mapping[str, str], log: Path) -> Iterator[Running]:
        """Run the entrypoint in a container with its output in `log`; kill it at the end."""
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: S603  # the image's own words
                self._command(self.entrypoint),
                env=self._environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Running(process)
        finally:
            process.kill()
            process.wait()

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` to its end in a container of its own; its exit status is not checked."""
        return subprocess.run(  # noqa: S603  # ours or the image's own words
            self._command(command),
            env=self._environment(environment or {}),
            capture_output=True,
            text=True,
            check=False,
        )

    def _command(self, command: Sequence[str]) -> list[str]:
        volumes = " ".join(sorted(self.config.get("Volumes") or {}))
        where = (str(self.root), self.config["User"], self.config.get("WorkingDir") or "/", volumes)
        return [*_NAMESPACES, str(_CONTAIN), *where, *command]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the image's environment and `more`; nothing of this machine's."""
        return dict(line.split("=", 1) for line in self.config["Env"]) | dict(more)


@dataclass(frozen=True)
class Running:
    """A container that was started."""

    process: subprocess.Popen[bytes]

    def stop(self, patience_s: float) -> int:
        """Send SIGTERM to the first process and return its exit status. Raises TimeoutExpired."""
        (first,) = psutil.Process(self.process.pid).children()
        first.send_signal(signal.SIGTERM)
        return self.process.wait(patience_s)
