"""Walk over a JSON schema whose form nobody has checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema and all schemas in it."""
    rest = [schema]
    while rest:
        part = rest.pop()
        yield part
        rest += children(part)


def children(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas right below `part`."""
    found: list[Any] = [part.get(name) for name in _ONE]
    found += [each for name in _LISTS for each in as_list(part.get(name))]
    found += [each for name in _NAMED for each in as_dict(part.get(name)).values()]
    return [each for each in found if isinstance(each, dict)]


def merged(root: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas that a value of `part` must satisfy as well, by allOf or by reference."""
    found = [*as_list(part.get("allOf")), _target(root, part.get("$ref"))]
    return [each for each in found if isinstance(each, dict)]


def _target(root: dict[str, Any], reference: Any) -> Any:
    """Return what a reference by a path within `root` points to; None if it points to nothing."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    node: Any = root
    for name in unquote(reference[1:]).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(key)] if key.isdecimal() and int(key) < len(node) else None
        else:
            node = as_dict(node).get(key)
    return node


def texts(value: Any) -> Iterator[str]:
    """Yield the strings in `value`, names included."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            rest += [*item, *item.values()]
        elif isinstance(item, list):
            rest += item


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
