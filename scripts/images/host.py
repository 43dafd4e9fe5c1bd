"""Check what this machine lacks to build images without a daemon."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("buildah", "debootstrap", "unshare")
# vfs stores every layer as a full copy; the CUDA build of torch alone has 5 GB.
_FREE_GB = {"cpu": 16, "cuda": 45}
_GB = 10**9


def lacking(folder: Path, device: str) -> str | None:
    """Return the first reason why images for `device` cannot be built below `folder`, or None."""
    return next(_reasons(folder, device), None)


def _reasons(folder: Path, device: str) -> Iterator[str]:
    system = f"{platform.system()} {platform.machine()}"
    if system != "Linux x86_64":
        yield f"must run on Linux x86_64, got {system}"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        yield f"{' and '.join(missing)} not found (Debian: apt-get install buildah debootstrap util-linux)"
    if os.geteuid() != 0:
        yield "must run as root: debootstrap and buildah's chroot isolation require it"
    command = ("unshare", "--mount", "true")
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # fixed words
    if done.returncode != 0:
        yield f"root cannot mount here: {done.stderr.strip()}"
    folder.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(folder).free / _GB, _FREE_GB[device]
    if free < needed:
        yield f"{folder}: must have {needed} GB of free disk space, got {free:.0f} GB"
