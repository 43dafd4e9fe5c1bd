"""JSON without spaces, as every response and event has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

to_text = json.JSONEncoder(separators=(",", ":")).encode


def to_json(value: object) -> bytes:
    return to_text(value).encode()


def with_json(fields: Mapping[str, Any], name: str, value: bytes) -> bytes:
    """Return the JSON of an object of `fields` and one more, whose value is JSON already."""
    return b'%b,"%b":%b}' % (to_json(fields)[:-1], name.encode(), value)
