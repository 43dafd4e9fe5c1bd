"""CPU profiles of a gateway: py-spy's samples of the main thread, summed by package."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PY_SPY = Path(sys.executable).with_name("py-spy")
_RATE_HZ = 200
_MOST = 15
_INSTALLED = re.compile(r"^.*(?:site-packages/|/lib/(?:python[\d.]+/)?)")
_WAITING = ("threading", "concurrent")
_FRAME = re.compile(r"(?P<name>[^;]+) \((?P<file>[^;:)]+)(?::\d+)?\)")
_OURS = re.compile(r"(?:galley|services)/(?:[\w-]+/)*[\w-]+\.py")


@dataclass(frozen=True, slots=True)
class Profile:
    """Shares of the samples: by package of the innermost frame, and of the functions with the most."""

    samples: int
    packages: dict[str, float]
    functions: dict[str, float]


async def record_profile(pid: int, seconds: float, load: Coroutine[Any, Any, object]) -> Profile:
    """Sample a process while `load` runs, from its middle on. Raise RuntimeError if py-spy fails."""
    with tempfile.TemporaryDirectory(prefix="galley-profile-") as folder:
        path = Path(folder) / "raw"
        loading = asyncio.ensure_future(load)
        try:
            # The load starts its streams in this time.
            await asyncio.sleep(seconds / 2)
            process = await asyncio.create_subprocess_exec(
                *(str(_PY_SPY), "record", "--format", "raw", "--rate", str(_RATE_HZ)),
                *("--duration", str(max(1, round(seconds / 2))), "--output", str(path), "--pid", str(pid)),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await process.communicate()
            if process.returncode:
                raise RuntimeError(f"py-spy failed: {errors.decode(errors='replace')[-500:]}")
            await loading
        finally:
            loading.cancel()
        return summarize(path.read_text(encoding="utf-8").splitlines())


def summarize(stacks: Iterable[str]) -> Profile:
    """Return the shares of collapsed stacks: frames from the outermost on, a space, a count.

    Threads that wait for work are left out: py-spy takes them as busy.
    """
    packages: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = [match.groupdict() for match in _FRAME.finditer(stack)]
        if frames and _package(frames[-1]["file"]) not in _WAITING:
            innermost = frames[-1]
            packages[_package(innermost["file"])] += int(count)
            functions[f"{_package(innermost['file'])}: {innermost['name'].strip(';')}"] += int(count)
    total = max(1, packages.total())
    return Profile(total, _shares(packages, total), _shares(functions, total))


def _package(file: str) -> str:
    """Return the folder of a file of ours, or the first name of a file of another package."""
    if found := _OURS.search(file):
        return found.group().rpartition("/")[0]
    installed = _INSTALLED.sub("", file)
    return installed.partition("/")[0].removesuffix(".py")


def _shares(counts: Counter[str], total: int) -> dict[str, float]:
    return {name: round(count / total, 3) for name, count in counts.most_common(_MOST)}
