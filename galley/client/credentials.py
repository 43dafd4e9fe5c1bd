"""The API key or token that a client sends in the metadata of every call.

A token may be valid for minutes only, so a file or a callable is read again for each call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from galley.client.errors import BadKey

API_KEY_VARIABLE = "GALLEY_API_KEY"
API_KEY_FILE_VARIABLE = "GALLEY_API_KEY_FILE"

Key: TypeAlias = str | Callable[[], str]
"""An API key or token, or a callable that returns the current one."""


def key_metadata(key: Key) -> tuple[tuple[str, str], ...]:
    """Return the metadata that sends the current key; empty without one. Raises BadKey."""
    current = key() if callable(key) else key
    if not current:
        return ()
    # gRPC refuses such metadata with a message that does not name the cause.
    if not (current.isascii() and current.isprintable()):
        raise BadKey(
            "the API key must be one line of printable ASCII characters "
            f"({API_KEY_VARIABLE}, {API_KEY_FILE_VARIABLE} or `api_key`)"
        )
    return (("authorization", f"Bearer {current}"),)


def environment_key() -> Key:
    """Return the key of GALLEY_API_KEY_FILE, which is read again for each call, or of GALLEY_API_KEY."""
    if file := os.environ.get(API_KEY_FILE_VARIABLE):
        return lambda: _read_key(Path(file))
    return os.environ.get(API_KEY_VARIABLE, "")


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise BadKey(f"{API_KEY_FILE_VARIABLE}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if not key:
        raise BadKey(f"{API_KEY_FILE_VARIABLE}: {path}: holds no line of text")
    return key
