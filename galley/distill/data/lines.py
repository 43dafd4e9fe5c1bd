"""JSONL that grows line by line; a kill may cut its last line off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from galley.core.errors import InvalidField


def kept_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file, none if it does not exist; a last line that was cut off is removed.

    Raises InvalidField if a line cannot be read.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    end = text.rfind(b"\n") + 1
    if end < len(text):
        os.truncate(path, end)
    try:
        return [json.loads(line) for line in text[:end].split(b"\n")[:-1]]
    except ValueError as error:
        raise InvalidField("work", f"{path}: a line cannot be read: {error}") from error
