"""Walk over a JSON schema whose form nobody has checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OPTIONS = ("anyOf", "oneOf")
# Draft 4 has `id`.
BASES = ("$id", "id")
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def subschemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schema and all schemas in it, and those elsewhere to which a reference leads.

    With references other than by path these are all objects of it, since any may be what one leads to.
    """
    parts = _reached(root, partial(_following, root))
    return parts if refers_by_path(root, parts) else _reached(root, _objects)


def certain_subschemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of `subschemas` that are schemas, whatever references lead to that are no paths."""
    parts = subschemas(root)
    if refers_by_path(root, parts):
        return parts
    # Where a base moves, a path does not begin at the root.
    return _reached(root, children if _moves(root, parts) else partial(_following, root))


def refers_by_path(root: dict[str, Any], parts: Iterable[dict[str, Any]]) -> bool:
    """Return True if all references of the parts are paths from the root, and lead to something."""
    references = [part["$ref"] for part in parts if isinstance(part.get("$ref"), str)]
    if not all(isinstance(target(root, each), dict | bool) for each in references):
        return False
    return not references or not _moves(root, parts)


def _moves(root: dict[str, Any], parts: Iterable[dict[str, Any]]) -> bool:
    """Return True if a part other than the root has a base of its own for references."""
    return any(part is not root and any(isinstance(part.get(name), str) for name in BASES) for part in parts)


def _following(root: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    return [*children(part), *merged(root, part)]


def _reached(
    root: dict[str, Any], following: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the root and all that follows from it, once each."""
    reached, rest = dict[int, dict[str, Any]](), [root]
    while rest:
        part = rest.pop()
        if id(part) not in reached:
            reached[id(part)] = part
            rest += following(part)
    return list(reached.values())


def _objects(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects right below `part`, and in lists there."""
    found, rest = list[dict[str, Any]](), list(part.values())
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            found.append(item)
        elif isinstance(item, list):
            rest += item
    return found


def children(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas right below `part`."""
    found: list[Any] = [part.get(name) for name in _ONE]
    found += [each for name in _LISTS for each in as_list(part.get(name))]
    found += [each for name in _NAMED for each in as_dict(part.get(name)).values()]
    return [each for each in found if isinstance(each, dict)]


def options(part: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the schemas of anyOf and of oneOf, where there are some: a value satisfies one of each."""
    lists = ([each for each in as_list(part.get(name)) if isinstance(each, dict)] for name in _OPTIONS)
    return [some for some in lists if some]


def merged(root: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas that a value of `part` must satisfy as well, by allOf or by reference."""
    found = [*as_list(part.get("allOf")), target(root, part.get("$ref"))]
    return [each for each in found if isinstance(each, dict)]


def depth(value: Any) -> int:
    """Return how deeply lists and objects are nested."""
    levels, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        levels += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return levels


def target(root: dict[str, Any], reference: Any) -> Any:
    """Return what a reference by a path within `root` points to; None if it points to nothing."""
    name = root.get("$id")
    if isinstance(name, str) and isinstance(reference, str) and _is_prefix(name, reference):
        reference = reference[len(name) :] or "#"
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    node: Any = root
    for name in unquote(reference[1:]).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(key)] if _INDEX.fullmatch(key) and int(key) < len(node) else None
        else:
            node = as_dict(node).get(key)
    return node


def _is_prefix(name: str, reference: str) -> bool:
    return bool(name) and not name.startswith("#") and reference.split("#", maxsplit=1)[0] == name


def texts(value: Any) -> Iterator[str]:
    """Yield the strings in `value`, names included."""
    return (item for item in _scalars(value) if isinstance(item, str))


def integers(value: Any) -> Iterator[int]:
    """Yield the integers in `value`."""
    return (item for item in _scalars(value) if isinstance(item, int) and not isinstance(item, bool))


def _scalars(value: Any) -> Iterator[Any]:
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            rest += [*item, *item.values()]
        elif isinstance(item, list):
            rest += item
        else:
            yield item


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
