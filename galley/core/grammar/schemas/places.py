"""Name the place of a schema that a refusal is about: `properties.size.format`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_UNKNOWN_KEYWORD = "Unimplemented keys: "
_REFUSED_VALUES = {"Unknown format: ": "format", "Invalid type: ": "type", "oneOf constraints ": "oneOf"}
"""What a message of llguidance begins with, and the keyword that it is about."""


def place_of(schema: dict[str, Any], part: dict[str, Any]) -> str:
    """Return the place of an object within `schema`; nothing for the schema itself."""
    return next(place for place, each in _placed(schema) if each is part)


def place_of_message(schema: dict[str, Any], message: str) -> str:
    """Return the place that a message of llguidance is about; nothing where it may be about several."""
    places = [
        f"{place}.{name}".lstrip(".")
        for place, part in _placed(schema)
        for name, value in part.items()
        if _is_about(message, name, value)
    ]
    return places[0] if len(places) == 1 else ""


def _is_about(message: str, name: str, value: Any) -> bool:
    if message.startswith(_UNKNOWN_KEYWORD):
        return f'"{name}"' in message
    begin = next((begin for begin in _REFUSED_VALUES if message.startswith(begin)), None)
    if begin is None or _REFUSED_VALUES[begin] != name:
        return False
    return not isinstance(value, str) or message == f"{begin}{value}"


def _placed(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all objects of a schema with their places."""
    rest: list[tuple[str, Any]] = [("", schema)]
    while rest:
        place, value = rest.pop()
        if isinstance(value, dict):
            yield place, value
            rest += [(f"{place}.{name}".lstrip("."), each) for name, each in value.items()]
        elif isinstance(value, list):
            rest += [(f"{place}[{index}]", each) for index, each in enumerate(value)]
