"""Machines made of files: what a process reads below /proc and /sys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

EIGHT_CPUS = frozenset(range(8))
FOUR_CORES = {
    f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
    for cpu in EIGHT_CPUS
}
"""The eight CPUs are four cores of two hardware threads each."""


def write_machine(root: Path, files: Mapping[str, str]) -> None:
    """Write these files, named by their path below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
