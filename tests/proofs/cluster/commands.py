"""helm and kubectl, pointed at one API server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.render import tool


class Failed(Exception):
    """A command failed; the message is its output."""


@dataclass(frozen=True, slots=True)
class Commands:
    context: str = ""
    kubeconfig: Path | None = None
    find: Callable[[str], str] = tool
    """Return the path of helm or kubectl."""

    def kubectl(self, *arguments: str, stdin: str = "") -> tuple[str, str]:
        """Return standard output and standard error. Raises Failed."""
        where = ["--context", self.context] if self.context else []
        return _run([self.find("kubectl"), *self._config(), *where, *arguments], stdin)

    def helm(self, *arguments: str, stdin: str = "") -> tuple[str, str]:
        """Return standard output and standard error. Raises Failed."""
        where = ["--kube-context", self.context] if self.context else []
        return _run([self.find("helm"), *self._config(), *where, *arguments], stdin)

    def _config(self) -> list[str]:
        return [] if self.kubeconfig is None else ["--kubeconfig", str(self.kubeconfig)]


def _run(command: list[str], stdin: str) -> tuple[str, str]:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = [Path(command[0]).name, *command[1:]]
        raise Failed(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout, done.stderr
