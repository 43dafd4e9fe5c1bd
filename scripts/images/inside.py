"""Check, inside an unpacked image, what it contains and what its user may do."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.images.container import Container

_MB = 10**6
_ENVIRONMENT = "venv"
# Names of compilers, linkers and build tools.
_COMPILER = re.compile(
    r"(.+-)?(cc|c\+\+|cc1|cc1plus|g\+\+|gcc|clang|clang\+\+|tcc|ld|as|nvcc|rustc|go|make)(-[\d.]+)?"
)
# The image's own Python runs this as its user: it tries to write to folders and prints its capabilities.
_TRY = """
import os, sys
for folder in sys.argv[1:]:
    try:
        open(os.path.join(folder, "tried"), "w").close()
        print(folder, "written")
    except OSError as error:
        print(folder, error.strerror)
shown = ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "NoNewPrivs")
for line in open("/proc/self/status"):
    name, _, value = line.partition(":")
    if name in shown:
        print(name, " ".join(value.split()))
"""


def contents(container: Container) -> dict[str, Any]:
    """Return sizes, and what should not be there: compilers, pip, set-uid files, writable files."""
    root = container.root
    return {
        "megabytes": _megabytes(root),
        "environment_megabytes": _megabytes(root / _ENVIRONMENT),
        "models_megabytes": _megabytes(root / "models"),
        "compilers": sorted(_compilers(root)),
        "headers_of_python": sorted(_relative(root, root.rglob("Python.h"))),
        "pip": (_package(root, "pip") or root / _ENVIRONMENT / "bin" / "pip").exists(),
        "torch": _package(root, "torch") is not None,
        "set_uid_in_environment": sorted(_relative(root, _set_uid(root / _ENVIRONMENT))),
        "writable_by_the_user": sorted(_relative(root, _writable(root / _ENVIRONMENT))),
        "user": container.config["User"],
        "labels": dict(container.config["Labels"]),
    }


def privileges(container: Container, folders: Sequence[str]) -> dict[str, str]:
    """Return for each folder "written" or the error of the image's user; and its ids and capabilities."""
    done = container.run(("python", "-c", _TRY, *folders))
    done.check_returncode()
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return {name: value for name, _, value in lines}


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _megabytes(folder: Path) -> float:
    """Return the megabytes of all files, hard links counted once."""
    found = {(info.st_dev, info.st_ino): info.st_size for info in map(os.lstat, _files(folder))}
    return round(sum(found.values()) / _MB, 1)


def _compilers(root: Path) -> Iterator[str]:
    for path in _files(root):
        mode = path.lstat().st_mode
        if (stat.S_ISLNK(mode) or mode & stat.S_IXUSR) and _COMPILER.fullmatch(path.name):
            yield str(path.relative_to(root))


def _package(root: Path, name: str) -> Path | None:
    return next((root / _ENVIRONMENT / "lib").glob(f"python3*/site-packages/{name}"), None)


def _set_uid(folder: Path) -> Iterator[Path]:
    return (path for path in _files(folder) if path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID))


def _writable(folder: Path) -> Iterator[Path]:
    """Yield files that root does not own or that anybody may write."""
    for path in _files(folder):
        info = path.lstat()
        if info.st_uid != 0 or (not stat.S_ISLNK(info.st_mode) and info.st_mode & stat.S_IWOTH):
            yield path


def _relative(root: Path, paths: Iterator[Path]) -> Iterator[str]:
    return (str(path.relative_to(root)) for path in paths)
