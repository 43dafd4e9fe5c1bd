"""Check which files of a model's directory may be read: files inside it, and no code.

Models are untrusted. A link out of the directory would disclose the file that it points to. The hub's cache
consists of links from a snapshot to its blobs, which are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def foreign_file(directory: Path, patterns: Iterable[str]) -> str | None:
    """Return which matching file may not be read, and why; None if all may."""
    homes = _homes(directory)
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern)}):
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return f"{path}: is a link to nothing"
        if not any(real.is_relative_to(home) for home in homes):
            return f"{path}: is a link that leads out of the model's directory"
        if not (real.is_file() or real.is_dir()):
            return f"{path}: is no file"
    return None


def _homes(directory: Path) -> list[Path]:
    real = directory.resolve()
    in_hub_cache = real.parent.name == _SNAPSHOTS
    return [real, *([real.parents[1] / _BLOBS] if in_hub_cache else [])]


def code_asked_for(config: Mapping[str, Any]) -> str | None:
    """Return why the model needs code from its repository, or None if it needs none."""
    return "needs code from its repository (auto_map), which is never run" if config.get("auto_map") else None


def hub_model(spec: str) -> tuple[str, str | None]:
    """Split `owner/model`, or `owner/model@revision`, in two.

    A commit as the revision fixes the files; their owner can move a branch or a tag.
    """
    name, _, revision = spec.partition("@")
    return name, revision or None
