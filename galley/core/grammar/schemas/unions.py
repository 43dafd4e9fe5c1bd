"""Tell whether the schemas of a oneOf exclude each other, where llguidance does not follow references."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from galley.core.grammar.schemas.subschemas import as_dict, as_list, target


def are_exclusive(root: dict[str, Any], schemas: list[Any]) -> bool:
    """Return True if no value fits two of these schemas: by their types, or by a required property.

    Such a property has other strings as its constants in each, or other types. All references must be paths
    from the root.
    """
    pairs = combinations([_resolved(root, each) for each in schemas], 2)
    return all(_are_apart(one, other) or _differ_in_a_property(root, one, other) for one, other in pairs)


def _resolved(root: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Return what a schema is or refers to; what stands beside a reference excludes only more."""
    met: set[int] = set()
    while isinstance(schema, dict) and "$ref" in schema and id(schema) not in met:
        met.add(id(schema))
        schema = target(root, schema["$ref"])
    return as_dict(schema)


def _differ_in_a_property(root: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.get("type") != "object" or other.get("type") != "object":
        return False
    names = {name for name in as_list(one.get("required")) if isinstance(name, str)}
    mine, others = as_dict(one.get("properties")), as_dict(other.get("properties"))
    return any(
        _are_apart(_resolved(root, mine.get(name)), _resolved(root, others.get(name)))
        for name in as_list(other.get("required"))
        if isinstance(name, str) and name in names
    )


def _are_apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return _is_apart(set(_types(one)), set(_types(other))) or _is_apart(_strings(one), _strings(other))


def _is_apart(one: set[str], other: set[str]) -> bool:
    return bool(one) and bool(other) and one.isdisjoint(other)


def _types(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the types of a schema; none if it names none."""
    named = schema.get("type")
    for each in as_list(named) or [named]:
        if isinstance(each, str):
            # An integer is a number.
            yield "number" if each == "integer" else each


def _strings(schema: dict[str, Any]) -> set[str]:
    """Return the constants of a schema if all are strings."""
    values = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    return set(values) if all(isinstance(each, str) for each in values) else set()
