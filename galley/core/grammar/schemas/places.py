"""Name the place of a schema that a refusal is about: `properties.size.format`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

# The path above, and the last step: a name, or an index of a list. Its text is made for one place only.
_Path: TypeAlias = "tuple[_Path | None, str | int]"
# With its message it must fit into the metadata of a response, 8 KiB with up to 12 bytes a character.
_MOST_CHARS = 200
_UNKNOWN_KEYWORD = "Unimplemented keys: "
_REFUSED_VALUES = {"Unknown format: ": "format", "Invalid type: ": "type", "oneOf constraints ": "oneOf"}
"""What a message of llguidance begins with, and the keyword that it is about."""


def place_of(schema: dict[str, Any], part: dict[str, Any]) -> str:
    """Return the place of an object within `schema`; nothing for the schema itself, or where it is long."""
    return _written(next(path for path, each in _placed(schema) if each is part))


def place_of_message(schema: dict[str, Any], message: str) -> str:
    """Return the place that a message of llguidance is about; nothing where it may be several, or is long."""
    paths = (
        (path, name)
        for path, part in _placed(schema)
        for name, value in part.items()
        if _is_about(message, name, value)
    )
    path = next(paths, None)
    return "" if path is None or next(paths, None) is not None else _written(path)


def _is_about(message: str, name: str, value: Any) -> bool:
    if message.startswith(_UNKNOWN_KEYWORD):
        return f'"{name}"' in message
    begin = next((begin for begin in _REFUSED_VALUES if message.startswith(begin)), None)
    if begin is None or _REFUSED_VALUES[begin] != name:
        return False
    return not isinstance(value, str) or message == f"{begin}{value}"


def _placed(schema: dict[str, Any]) -> Iterator[tuple[_Path | None, dict[str, Any]]]:
    """Yield all objects of a schema with their paths."""
    rest: list[tuple[_Path | None, Any]] = [(None, schema)]
    while rest:
        path, value = rest.pop()
        if isinstance(value, dict):
            yield path, value
        steps = value.items() if isinstance(value, dict) else enumerate(value)
        rest += [((path, step), each) for step, each in steps if isinstance(each, dict | list)]


def _written(path: _Path | None) -> str:
    """Return a path as it stands in a message."""
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(f".{step}" if isinstance(step, str) else f"[{step}]")
    place = "".join(reversed(steps)).lstrip(".")
    return place if len(place) <= _MOST_CHARS else ""
