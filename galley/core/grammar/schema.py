"""Check the schemas of requests for what llguidance would take, but not as JSON Schema means it.

Control characters: the grammar writes none, so that it would drop them from constants, names and patterns.
Counts of properties: the grammar may write a property twice, which counts as one. References in a circle:
no answer would ever be finished.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from galley.core.grammar.limits import InvalidGrammar
from galley.core.grammar.spec import Kind

GUIDANCE = "x-guidance"
_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
# JSON has an escape for each of \b, \t, \n, \f and \r.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# The same, written as an escape in a pattern. Classes that are negated or have ranges only become smaller.
_ESCAPED = re.compile(
    r"\\x(?:0[0-7bef]|1[0-9a-f]|7f)|\\u00(?:0[0-7bef]|1[0-9a-f]|7f)|\\c[a-z]|\\0|\\v", re.IGNORECASE
)
_WIDE_CLASS = re.compile(r"\[(?:\^|(?=(?:[^][\\-]|\\.)*+-))(?:[^][\\]|\\.)*+\]")
_MOST_NAME_CHARS = 64


def check_schema(kind: Kind, schema: Any) -> dict[str, Any]:
    """Return `schema`. Raise InvalidGrammar unless it is an object that llguidance reads as it is meant."""
    if not isinstance(schema, dict):
        raise InvalidGrammar(kind, "must be a JSON object")
    parts = list(_parts(schema))
    for part in parts:
        _check_part(kind, part)
    needs = {id(part): [id(need) for need in _needs(schema, part)] for part in parts}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError:
        raise InvalidGrammar(kind, "must allow a finite answer, got a part that contains itself") from None
    return schema


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema and all schemas in it."""
    rest: list[Any] = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            yield part
            rest += [part.get(name) for name in _ONE]
            rest += [each for name in _LISTS for each in _list(part.get(name))]
            rest += [each for name in _NAMED for each in _dict(part.get(name)).values()]


def _needs(root: dict[str, Any], part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas for each of which an answer of `part` has a value."""
    yield from (each for each in _list(part.get("allOf")) if isinstance(each, dict))
    target = _target(root, part.get("$ref"))
    if isinstance(target, dict):
        yield target
    if part.get("type") == "object":
        properties = _dict(part.get("properties"))
        required = [properties.get(name) for name in _list(part.get("required")) if isinstance(name, str)]
        yield from (each for each in required if isinstance(each, dict))
    least = part.get("minItems")
    if part.get("type") == "array" and isinstance(least, int) and least > 0:
        first = _list(part.get("prefixItems"))[:least]
        each = first if len(first) == least else [*first, part.get("items")]
        yield from (need for need in each if isinstance(need, dict))


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
            node = _dict(node).get(key)
    return node


def _check_part(kind: Kind, part: dict[str, Any]) -> None:
    if GUIDANCE in part:
        raise InvalidGrammar(kind, f"must not have {GUIDANCE}")
    names = [*_dict(part.get("properties")), *_list(part.get("required"))]
    for text in _texts([part.get("const"), part.get("enum"), names]):
        if _CONTROL.search(text):
            raise InvalidGrammar(kind, f"must not have a control character, got {_short(text)}")
    for pattern in _texts([part.get("pattern"), list(_dict(part.get("patternProperties")))]):
        narrow = _WIDE_CLASS.sub("", pattern)
        if _CONTROL.search(narrow) or _ESCAPED.search(narrow):
            raise InvalidGrammar(
                kind, f"must not have a control character in a pattern, got {_short(pattern)}"
            )
    least, certain = part.get("minProperties"), len(set(_texts(part.get("required"))))
    if isinstance(least, int) and least > certain + 1:
        raise InvalidGrammar(
            kind, f"minProperties must be at most one more than the {certain} required, got {least}"
        )


def _texts(value: Any) -> Iterator[str]:
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


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _short(text: str) -> str:
    return repr(text[:_MOST_NAME_CHARS])
