"""A model's directory is read as it lies there: nothing in it may lead out of it.

Models come from others. A file of theirs that is a link could have a service read what nobody meant to give
it, and tell of it in an error; a pipe would have it wait for ever.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from services.core.errors import CallerFault

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_INDEX = "*.safetensors.index.json"


class StrayFile(CallerFault):
    """Something in a model's directory is not a file of that directory; the message names it."""


def refuse_strays(directory: Path) -> None:
    """Raise StrayFile for a link that leads out of the directory, what is no file, and an index of such.

    The directory itself may be a link: whoever names it chose it. What the hub's cache links to is its own,
    and so is what Kubernetes links to in a volume.
    """
    root = directory.resolve()
    homes = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    for path in sorted(root.iterdir()):
        found = path.resolve()
        if not any(found.is_relative_to(home) for home in homes):
            raise StrayFile(f"{path} is a link that leads out of the model's directory")
        if found.exists() and not (found.is_file() or found.is_dir()):
            raise StrayFile(f"{path} is no regular file")
    for path in sorted(root.glob(_INDEX)):
        for name in _indexed(path):
            if "/" in name or "\\" in name or name in {"", ".", ".."}:
                raise StrayFile(f"{path} names {name!r:.80}, which is no file of the model's directory")


def _indexed(path: Path) -> Iterator[str]:
    """The files that an index of shards names."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        yield from {str(name) for name in names}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise StrayFile(f"{path} is no index of weights") from None
