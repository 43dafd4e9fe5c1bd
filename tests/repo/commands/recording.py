"""Runs the shell blocks of a page in bash, with harmless programs; every other call is recorded, not run.

bash itself reads quotes, loops, functions, here-documents and pipes: a call is recorded as a shell makes it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# These run. They only read, or write where the page's reader is: here a temporary folder.
HARMLESS = (
    *("awk", "base64", "basename", "cat", "cp", "cut", "grep", "head", "mkdir", "openssl", "sed"),
    *("sha256sum", "sort", "tail", "tee", "tr", "wc"),
)
# A page may use what an earlier page of its series had set.
VARIABLES = {
    "NS": "galley",
    "PODS": "app.kubernetes.io/instance=galley",
    "KEY": "k",
    "PUBLIC_KEY": "p",
    "SECRET_KEY": "s",
}
_BLOCK = re.compile(r"^( *)```(?:sh|bash)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SESSION = re.compile(r"^ *```\n *\$ (.*)$", re.MULTILINE)
_INLINE = re.compile(r"`((?:\.venv/bin/)?(?:galley|helm|kubectl|make|docker|kind|python -m)(?: [^`]*)?)`")
_RECORD = """\
record() {
  local file
  file=$(/usr/bin/mktemp "$RECORDS/XXXXXXXX")
  printf '%s\\0' "$@" >"$file"
  [[ -t 0 ]] || /bin/cat >"$file.stdin"
}
command_not_found_handle() { record "$@"; }
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A program that a page calls, with its arguments and what is written to it."""

    program: str
    arguments: tuple[str, ...]
    stdin: str = ""

    def __str__(self) -> str:
        return " ".join((self.program, *self.arguments))


def blocks(page: str) -> list[str]:
    """Return the shell blocks of a page, without their indentation, and what shown sessions type."""
    typed = [match[1] for match in _SESSION.finditer(page)]
    return typed + [
        "".join(line.removeprefix(match[1]) for line in match[2].splitlines(keepends=True))
        for match in _BLOCK.finditer(page)
    ]


def inline(page: str) -> list[str]:
    """Return the commands in the text of a page, without names alone and patterns of several commands."""
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    commands = [re.sub(r"\[([^]]*)\]", r"\1", found) for found in _INLINE.findall(text)]
    return [one for one in commands if " " in one and not re.search(r"[…|*]|COMMAND", one)]


class Shell:
    """A folder in which blocks run one after another, as their reader would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "reader"
        self._records, programs = folder / "records", folder / "programs"
        for made in (self.folder, self._records, programs):
            made.mkdir()
        for name in HARMLESS:
            (programs / name).symlink_to(str(shutil.which(name)))
        for path in ROOT.iterdir():
            if not path.name.startswith("."):
                (self.folder / path.name).symlink_to(path)
        venv = self.folder / ".venv" / "bin"
        venv.mkdir(parents=True)
        prelude = folder / "prelude.sh"
        prelude.write_text(_RECORD)
        for name in ("galley", "python"):
            (venv / name).write_text(f'#!/bin/bash\nsource {prelude}\nrecord {name} "$@"\n')
            (venv / name).chmod(0o755)
        self._environment = {
            **VARIABLES,
            "BASH_ENV": str(prelude),
            "HOME": str(folder),
            "PATH": str(programs),
            "RECORDS": str(self._records),
        }

    def run(self, script: str) -> tuple[list[Call], str]:
        """Run a block; return the calls of programs that did not run, and why the block failed, if it did.

        A block that calls such programs may fail: they write nothing.
        """
        done = subprocess.run(
            ["/bin/bash", "-c", script + "\nstatus=$?\nwait\nexit $status\n"],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        calls = list(self._calls())
        is_broken = "syntax error" in done.stderr or "unexpected EOF" in done.stderr
        failed = is_broken or (not calls and done.returncode != 0)
        return calls, done.stderr or f"exit status {done.returncode}" if failed else ""

    def _calls(self) -> Iterator[Call]:
        for file in sorted(self._records.iterdir(), key=lambda one: one.stat().st_mtime_ns):
            if file.suffix == ".stdin":
                continue
            written = file.with_suffix(".stdin")
            program, *arguments = file.read_text().split("\0")[:-1]
            yield Call(program, tuple(arguments), written.read_text() if written.exists() else "")
            written.unlink(missing_ok=True)
            file.unlink()
