"""Read a secret from a file. Clients import this, so it needs the standard library only."""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 64 * 1024


def read_secret(path: Path) -> str:
    """Return the text of the file without the line break at its end.

    Raises ValueError if it cannot be read, is empty, is not text or is larger than MAX_BYTES.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path}: is larger than {MAX_BYTES} bytes")
    try:
        text = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or "\0" in text:
        raise ValueError(f"{path}: holds no line of text")
    return text
