"""JSON without spaces, as every response and event has it."""

from __future__ import annotations

import json

to_text = json.JSONEncoder(separators=(",", ":")).encode


def to_json(value: object) -> bytes:
    return to_text(value).encode()
