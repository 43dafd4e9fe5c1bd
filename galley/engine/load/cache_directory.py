"""The cache directory of this machine: converted models, kernels, and digests of large files."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path


def cache_dir() -> Path:
    """Return $GALLEY_CACHE_DIR, else $XDG_CACHE_HOME/galley, else ~/.cache/galley. It may not exist yet."""
    own = os.environ.get("GALLEY_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "galley"


def file_digest(path: Path) -> str:
    """Return the blake2b-128 of the file's content, in hex.

    Kept in the cache directory under path, size and modification time, so that a second start reads less.
    """
    path = path.resolve()
    stat = path.stat()
    key = hashlib.blake2b(f"{path}|{stat.st_size}|{stat.st_mtime_ns}".encode(), digest_size=16).hexdigest()
    note = cache_dir() / "digests" / key
    try:
        return note.read_text(encoding="ascii")
    except OSError:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        scratch = note.with_name(f"{key}.{os.getpid()}")
        scratch.write_text(digest, encoding="ascii")
        scratch.replace(note)
    except OSError:
        pass
    return digest
