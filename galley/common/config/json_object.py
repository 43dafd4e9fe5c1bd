"""A JSON object as the value of a flag."""

from __future__ import annotations

import json
from typing import Any


def parse_json_object(text: str) -> dict[str, Any]:
    """Return the object; an empty one for empty text. Raise ValueError, which names no flag."""
    try:
        given = json.loads(text or "{}", object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"must be a JSON object, got {text:.40}")  # noqa: TRY004  # a value of a user
    return given


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"must be a JSON object that has each name once, got {name!r} several times")
    return dict(pairs)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"must be a JSON object of finite numbers, got {word}")
