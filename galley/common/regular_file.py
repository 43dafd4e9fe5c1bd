"""Read a file that an operator names, whatever it turns out to be.

A FIFO would wait for a writer, and a device may have no end. Clients import this: standard library only.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

# Opening never waits, and a terminal does not become that of this process. Clients also run where the system
# has other flags.
_FLAGS = os.O_RDONLY
for _name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"):
    _FLAGS |= getattr(os, _name, 0)


def read_regular(path: str | Path, most: int) -> bytes:
    """Return the content. Raise OSError, or ValueError if it is no regular file or has over `most` bytes."""
    fd = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("must be a regular file")
        with os.fdopen(fd, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(fd)
    if len(content) > most:
        raise ValueError(f"must be at most {most} bytes")
    return content
